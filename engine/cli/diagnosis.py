"""What ``peaksim doctor`` found, for people."""

from __future__ import annotations

from engine.cli.tables import show_line, show_text_table
from engine.doctor import Report


def show_report(found: Report) -> None:
    """Print the report: versions, what can compute here, and what is missing with how to get it."""
    show_line(f"peaksim {found.version}, Python {found.python}, {found.platform}")
    show_line(f"instruction sets: {', '.join(found.instruction_sets) or 'unknown without the CPU kernels'}")
    show_line(f"segmenter: {found.segmenter}")
    rows = [(backend.name, "yes" if backend.available else "no", backend.detail) for backend in found.backends]
    show_text_table(("backend", "usable", "detail"), rows)
    devices = []
    for device in found.devices:
        memory = "" if device.memory_bytes is None else f"{device.memory_bytes / 2**30:.1f} GiB"
        devices.append((device.name, device.description, memory))
    show_text_table(("device", "what", "memory"), devices)
    packages = [(package.name, package.version or "–", package.used_for) for package in found.packages]
    show_text_table(("package", "version", "used for"), packages)
    if not found.missing:
        show_line("nothing is missing")
        return
    show_text_table(
        ("missing", "what that means", "how to get it"),
        [(absent.what, absent.effect, absent.remedy) for absent in found.missing],
    )
