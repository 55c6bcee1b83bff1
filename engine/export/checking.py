"""A folder that was exported before, loaded and run again: is it whole, and does it give what it gave then?"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from engine.encoders.exported import load_exported
from engine.encoders.golden import GoldenRow


def check_export(
    folder: str | PathLike[str], *, device: str = "auto", provider: str | None = None, runs: int = 5
) -> list[GoldenRow]:
    """Every output of every graph beside its golden vectors, on the provider that is named or that of the device.

    `runs`: of each graph, for its latency. Raises what `engine.encoders.exported.load_exported` raises.
    """
    # What was exported with loss is looked at all the same.
    place = Path(folder)
    encoder = load_exported(place, device=device, provider=provider, accept_loss=True, verified=False)
    return encoder.verify(runs=runs)
