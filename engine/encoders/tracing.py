"""Towers as modules of plain tensors, in and out, for tracing: the same arithmetic as the encoders' own methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.encoders.base import Encoder
from engine.encoders.scenes import ScenesEncoder
from engine.encoders.scenes_model import ScenesModel, last_block
from engine.encoders.towers import DualEncoder


class Traceable(nn.Module):
    """A module whose `forward` takes `inputs` and returns a tuple of the tensors named in `outputs`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class DualImage(Traceable):
    """Image tower of a `DualEncoder`: pixels `(B, 3, S, S)` to embedding, patches of each tap, states of layers."""

    inputs = ("pixels",)

    def __init__(self, encoder: DualEncoder, taps: Sequence[str], layers: Sequence[int]) -> None:
        super().__init__()
        # Held as a module, so that its weights become weights of the graph.
        self.model = encoder._model
        self._encoder, self._taps, self._layers = encoder, tuple(taps), tuple(layers)
        self.outputs = ("embedding", *(f"patches.{tap}" for tap in taps), *(f"hidden.{layer}" for layer in layers))

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        tower = self._encoder._image
        wanted = {*self._layers, *([0, len(tower.blocks)] if self._taps else [])}
        with tower.recorder.recording(wanted) as states:
            embedding = self._encoder._embed_pixels(pixels)
        patches = [self._encoder._read_patches(tap, states) for tap in self._taps]
        hidden = [states[layer].float() for layer in self._layers]
        return functional.normalize(embedding.float(), dim=-1), *patches, *hidden


class DualText(Traceable):
    """Text tower of a `DualEncoder`: ids `(B, T)` to embedding, token vectors, states of layers."""

    inputs = ("ids",)

    def __init__(self, encoder: DualEncoder, layers: Sequence[int]) -> None:
        super().__init__()
        self.model = encoder._model
        self._encoder, self._layers = encoder, tuple(layers)
        self._vectors = encoder._text.project is not None
        tokens = ("tokens",) if self._vectors else ()
        self.outputs = ("embedding", *tokens, *(f"hidden.{layer}" for layer in layers))

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        tower = self._encoder._text
        last = len(tower.blocks)
        with tower.recorder.recording({*self._layers, last}) as states:
            embedding = self._encoder._embed_ids(ids)
        vectors = []
        if tower.project is not None:
            vectors = [functional.normalize(tower.project(states[last]).float(), dim=-1)]
        hidden = [states[layer].float() for layer in self._layers]
        return functional.normalize(embedding.float(), dim=-1), *vectors, *hidden


class ScenesImage(Traceable):
    """Image tower of the embedded model; of its last block the class token alone feeds the embedding."""

    inputs = ("pixels",)

    def __init__(self, model: ScenesModel, taps: Sequence[str], layers: Sequence[int]) -> None:
        super().__init__()
        self.tower = model.image
        self._taps, self._layers = tuple(taps), tuple(layers)
        self.outputs = ("embedding", *(f"patches.{tap}" for tap in taps), *(f"hidden.{layer}" for layer in layers))

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        tower = self.tower
        states, hidden, before_last = tower(pixels.to(tower.positions.dtype), self._layers)
        first = torch.zeros(pixels.shape[0], dtype=torch.int64, device=pixels.device)
        found = [last_block(tower.blocks).at(before_last, first)]
        for tap in self._taps:
            found.append((states if tap == "projected" else tower.last_value_path(before_last))[:, 1:])
        projected = [functional.normalize(tower.projection(tower.norm(part)).float(), dim=-1) for part in found]
        return *projected, *(hidden[layer].float() for layer in self._layers)


class ScenesText(Traceable):
    """Text tower of the embedded model; of its last block the end token alone feeds the embedding."""

    inputs = ("ids", "end")

    def __init__(self, model: ScenesModel, layers: Sequence[int]) -> None:
        super().__init__()
        self.tower = model.text
        self._layers = tuple(layers)
        self.outputs = ("embedding", "tokens", *(f"hidden.{layer}" for layer in layers))

    def forward(self, ids: Tensor, end: Tensor) -> tuple[Tensor, ...]:
        tower, last = self.tower, len(self.tower.blocks)
        states, hidden = tower(ids, (*self._layers, last - 1))
        # A tower of one block has no state before the last one among its layers.
        at_end = last_block(tower.blocks).at(hidden[last - 1], end, causal=True) if last > 1 else (
            tower.end_state(ids, end)
        )
        parts = (at_end, states)
        projected = [functional.normalize(tower.projection(tower.norm(part)).float(), dim=-1) for part in parts]
        return *projected, *(hidden[layer].float() for layer in self._layers)


class Windows(Traceable):
    """What `Encoder.encode_windows` gives: pixels and windows `(B, W, 4)` in cells of the grid to `(B, W, D)`."""

    inputs, outputs = ("pixels", "windows"), ("regions",)

    def __init__(self, encoder: ScenesEncoder | DualEncoder) -> None:
        super().__init__()
        self.model = encoder._model
        self._encoder = encoder

    def forward(self, pixels: Tensor, windows: Tensor) -> tuple[Tensor]:
        if isinstance(self._encoder, DualEncoder):
            return (self._encoder.encode_windows(pixels, windows),)
        tower = self._encoder._model.image
        states = tower.window_states(pixels.to(tower.positions.dtype), windows)
        return (functional.normalize(tower.projection(tower.norm(states)).float(), dim=-1),)


def traceable_windows(encoder: Encoder) -> Windows | None:
    """The tower as it reads windows; None for one that has none."""
    if isinstance(encoder, ScenesEncoder) or (isinstance(encoder, DualEncoder) and encoder._image.windows is not None):
        return Windows(encoder)
    return None


def traceable_towers(
    encoder: Encoder, taps: Sequence[str], image_layers: Sequence[int], text_layers: Sequence[int]
) -> tuple[Traceable, Traceable]:
    """Both towers of an encoder. Raises ValueError for an encoder of another kind."""
    if isinstance(encoder, ScenesEncoder):
        model = encoder._model
        return ScenesImage(model, taps, image_layers), ScenesText(model, text_layers)
    if isinstance(encoder, DualEncoder):
        return DualImage(encoder, taps, image_layers), DualText(encoder, text_layers)
    raise ValueError(f"{encoder.spec.name}: export knows no graph of {type(encoder).__name__}")
