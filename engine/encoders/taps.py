"""Which patch tap of an encoder meets a scorer's needs."""

from __future__ import annotations

from engine.encoders.base import EncoderSpec
from engine.features import Needs


def aligned_taps(spec: EncoderSpec) -> tuple[str, ...]:
    """Names of the taps whose patches live in the text's space."""
    return tuple(name for name, aligned in spec.taps.items() if aligned)


def tap_for(spec: EncoderSpec, needs: Needs) -> str | None:
    """The tap to read: the one asked for, else the encoder's default; None when no patches are needed.

    Raises:
        ValueError: naming the taps that would do, when the encoder has no such tap.
    """
    if not needs.patches and needs.tap is None:
        return None
    tap = needs.tap or spec.default_tap
    if tap is not None and tap in spec.taps and (spec.taps[tap] or not needs.aligned):
        return tap
    wanted = "patches in the text's space" if needs.aligned else "patches"
    would_do = aligned_taps(spec) if needs.aligned else tuple(spec.taps)
    raise ValueError(
        f"{spec.name}: tap must be one that gives {wanted} "
        f"({', '.join(map(repr, would_do)) or 'it has none'}), got {tap!r}"
    )
