"""The layers of an encoder that heads read where nobody chooses others, and its last ones."""

from __future__ import annotations

from engine.encoders.base import EncoderSpec
from engine.features import Needs
from engine.heads.base import shipped_heads
from engine.heads.max_sim_head import MaxSimHeadConfig
from engine.heads.peak_patch import PeakPatchConfig
from engine.heads.registry import HEADS, load_head, load_window_head
from engine.heads.window_head import WindowHead


def default_layers(spec: EncoderSpec) -> Needs:
    """Layers by their default settings: of PeakPatch peak, anchor and low; of the max-sim head; the last ones.

    Of a tower that can only be read at its end there are none.
    """
    image: set[int] = set()
    text: set[int] = set()
    if spec.text_layers:
        peak = PeakPatchConfig().fitted(spec)
        text |= {peak.peak, peak.anchor, peak.low, spec.text_layers}
    if spec.image_layers and spec.grid is not None:
        image |= {spec.image_layers}
        image |= set(MaxSimHeadConfig().fitted(spec).image_layers) if spec.text_layers else set()
    return Needs(image_layers=tuple(sorted(image)), text_layers=tuple(sorted(text)))


def shipped_needs(spec: EncoderSpec) -> list[Needs]:
    """What heads read that come with the package for this encoder: naming one must not take another export."""
    if spec.family != "scenes":
        return []
    found = []
    for path in shipped_heads():
        if path.stem == WindowHead.name:
            regions = load_window_head(path)
            held, needs = regions.fingerprint, Needs(image_layers=regions.config.layers)
        elif path.stem in HEADS:
            head = load_head(path)
            held, needs = head.fingerprint, head.needs()
        else:
            continue
        if held == spec.fingerprint:
            found.append(needs)
    return found
