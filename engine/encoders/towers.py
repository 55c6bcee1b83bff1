"""Dual encoders read through their own modules: what open_clip and transformers models have in common.

The model's own forward runs unchanged, so that the global embedding is the source library's by construction.
Hooks keep the states of the blocks that a call asks for; patch and token vectors are made from those.

A position is read *alone* by giving the model's module a sequence of that one position: softmax over a single
key is 1, so attention returns exactly its value path, whatever its normalisations, rotations or scalings.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.encoders.base import Encoder, EncoderSpec, Tokens
from engine.encoders.pixels import PixelRules
from engine.features import ImageFeatures, TextFeatures, TextReadout

# CUDA's memory-efficient attention launches one grid row for each sequence, 65,535 at most.
_ROWS_AT_ONCE = 16384
_LAST_INPUT = 0

TAPS = {
    "projected": True,
    "value": True,
    "hidden": False,
}
"""Patch taps of a transformer tower, and whether each lies in the text's space.

`projected`: the last block's output at a patch, through the tower's final normalisation, pooling (where the
tower pools by attention: the pool's output when that patch is all it sees) and projection.
`value`: the same, from the value path of the last block in place of its output: normalisation, value and
output projections of its attention, without residual and MLP. Dense features that stay local (Zhou et al.
2022, "Extract Free Dense Labels from CLIP", arXiv:2112.01071; without the residual as Lan et al. 2024,
arXiv:2407.12442).
`hidden`: the last block's output as it is; not in the text's space.
"""


@dataclass(frozen=True)
class Tower:
    """One tower of a frozen model.

    Attributes:
        blocks: its transformer blocks in order; empty when only the global embedding can be read.
        width: width W of its hidden states.
        project: states after the last block `(..., W)` to the shared space `(..., D)`, each position alone.
        attend: attention branch of the last block on sequences of one position `(n, 1, W)`, or None.
        prefix: positions before the first patch (class token, registers).
        grid: rows and columns of the patch grid, None where images differ or there are no patches.
        windows: pixels `(B, 3, S, S)` and windows `(B, W, 4)` in cells of the grid to `(B, W, D)`, not
            normalised; None for towers without. See `Encoder.encode_windows`.
        readout: makes what `Encoder.text_readout` gives, from the weights as they then are; text towers only.
    """

    blocks: Sequence[nn.Module] = ()
    width: int = 0
    project: Callable[[Tensor], Tensor] | None = None
    attend: Callable[[Tensor], Tensor] | None = None
    prefix: int = 0
    grid: tuple[int, int] | None = None
    windows: Callable[[Tensor, Tensor], Tensor] | None = None
    readout: Callable[[], TextReadout] | None = None
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "recorder", Recorder(self.blocks))

    @property
    def taps(self) -> Mapping[str, bool]:
        """The patch taps this tower offers; see `TAPS`."""
        offered = {"projected": self.project, "value": self.attend and self.project, "hidden": self.blocks}
        return {name: aligned for name, aligned in TAPS.items() if offered[name]}


class Recorder:
    """Keeps the outputs of blocks for the thread that asks, while it asks."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._calls = threading.local()
        for layer, block in enumerate(blocks, start=1):
            block.register_forward_hook(partial(self._keep_output, layer))
        if blocks:
            blocks[-1].register_forward_pre_hook(self._keep_input, with_kwargs=True)

    @contextmanager
    def recording(self, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
        """States by 1-indexed layer; 0 is the input of the last block."""
        kept: dict[int, Tensor] = {}
        self._calls.wanted, self._calls.kept = frozenset(layers), kept
        try:
            yield kept
        finally:
            self._calls.wanted, self._calls.kept = frozenset(), {}

    def _keep_output(self, layer: int, _block: nn.Module, _inputs: Any, output: Any) -> None:
        if layer in getattr(self._calls, "wanted", ()):
            # Blocks of older transformers return a tuple whose first entry is the state.
            self._calls.kept[layer] = output[0] if isinstance(output, tuple) else output

    def _keep_input(self, _block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if _LAST_INPUT in getattr(self._calls, "wanted", ()):
            self._calls.kept[_LAST_INPUT] = inputs[0] if inputs else next(iter(named.values()))


def each_alone(function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Apply a function of sequences `(n, L, W)` to each position of `(..., W)` as its own sequence."""
    flat = states.reshape(-1, 1, states.shape[-1])
    if torch.jit.is_tracing():
        # A trace would keep the number of parts that these states happen to have.
        return function(flat).reshape(*states.shape[:-1], -1)
    outputs = torch.cat([function(part) for part in flat.split(_ROWS_AT_ONCE)])
    return outputs.reshape(*states.shape[:-1], outputs.shape[-1])


class DualEncoder(Encoder):
    """An encoder whose towers are transformers of another library.

    A family sets `spec`, `device` and the attributes below, and implements `preprocess`, `tokenize`
    and the two calls into the model.
    """

    _model: Any
    _image: Tower
    _text: Tower
    _dtype: torch.dtype
    _pixels: PixelRules
    _tuned: bool = False

    def unfreeze(self) -> nn.Module:
        """The model with weights that want gradients, for a fine-tuning that has this encoder to itself.

        The fingerprint is that of the weights before: a folder saved from now on states none, and loading it finds its
        own. Raises ValueError for an encoder of half precision, which cannot be saved.
        """
        self._check_savable()
        self._tuned = True
        model: nn.Module = self._model.requires_grad_(True)
        return model

    def embed(self, pixels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of both sides as the source library computes them, with gradients and not normalised.

        Arguments: `pixels` as `preprocess` makes them, in a batch; `ids` of `tokenize`.
        """
        return self._embed_pixels(pixels), self._embed_ids(ids)

    @abstractmethod
    def _embed_pixels(self, pixels: Tensor) -> Tensor:
        """Global image embeddings `(B, D)` as the source library computes them, not normalised.

        `pixels` come in float32; the family casts them.
        """

    @abstractmethod
    def _embed_ids(self, ids: Tensor) -> Tensor:
        """Global text embeddings `(B, D)` as the source library computes them, not normalised."""

    def _check_savable(self) -> None:
        """Raise ValueError unless the weights are those of the checkpoint, bit for bit."""
        if self._dtype != torch.float32:
            raise ValueError(f"{self.spec.name}: save wants an encoder of dtype float32, got {self._dtype}")

    def _stated(self) -> dict[str, str]:
        """What a saved folder says about itself; see `refuse_changed_files`."""
        facts = {} if self._tuned else {"fingerprint": self.spec.fingerprint}
        return facts | {"resize": self._pixels.mode}

    def _patch_mask(self, pixels: Tensor) -> Tensor | None:
        """Bool `(B, P)`, True = a real patch; None when every patch is real."""
        return None

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor, *, tap: str | None = None, layers: Sequence[int] = ()) -> ImageFeatures:
        self._check_tap(tap)
        tower = self._image
        self._check_layers("image", layers, len(tower.blocks))
        pixels = pixels.to(self.device)
        wanted = {*layers}
        if tap is not None:
            wanted.add(_LAST_INPUT if tap == "value" else len(tower.blocks))
        with tower.recorder.recording(wanted) as states:
            embedding = self._embed_pixels(pixels)
        patches = None if tap is None else self._read_patches(tap, states)
        return ImageFeatures(
            embedding=functional.normalize(embedding.float(), dim=-1),
            patches=patches,
            patch_mask=None if tap is None else self._patch_mask(pixels),
            grid=None if tap is None else tower.grid,
            aligned=tap is not None and self.spec.taps[tap],
            tap=tap or "",
            hidden={layer: states[layer].float() for layer in layers},
            fingerprint=self.spec.fingerprint,
        )

    @torch.no_grad()
    def encode_windows(self, pixels: Tensor, windows: Tensor) -> Tensor:
        if self._image.windows is None:
            return super().encode_windows(pixels, windows)
        found = self._image.windows(pixels.to(self.device, self._dtype), windows.to(self.device))
        return functional.normalize(found.float(), dim=-1)

    def text_readout(self) -> TextReadout:
        return super().text_readout() if self._text.readout is None else self._text.readout()

    def _read_patches(self, tap: str, states: Mapping[int, Tensor]) -> Tensor:
        """Patch vectors `(B, P, Dp)` of one tap, unit norm where the tap is aligned."""
        tower = self._image
        if tap == "value":
            assert tower.attend is not None
            patches = each_alone(tower.attend, states[_LAST_INPUT][:, tower.prefix :])
        else:
            patches = states[len(tower.blocks)][:, tower.prefix :]
        if tap == "hidden":
            return patches.float()
        assert tower.project is not None
        return functional.normalize(tower.project(patches).float(), dim=-1)

    @torch.no_grad()
    def encode_tokens(self, tokens: Tokens, *, token_vectors: bool = False, layers: Sequence[int] = ()) -> TextFeatures:
        tower = self._text
        self._check_layers("text", layers, len(tower.blocks))
        if token_vectors and tower.project is None:
            raise ValueError(
                f"{self.spec.name}: token vectors were wanted, but this text tower can only be read at its end"
            )
        last = {len(tower.blocks)} if token_vectors else set()
        with tower.recorder.recording({*layers, *last}) as states:
            embedding = self._embed_ids(tokens.ids.to(self.device))
        vectors = None
        if token_vectors:
            assert tower.project is not None
            vectors = functional.normalize(tower.project(states[len(tower.blocks)]).float(), dim=-1)
        return TextFeatures(
            embedding=functional.normalize(embedding.float(), dim=-1),
            tokens=vectors,
            token_mask=tokens.word_mask.to(self.device),
            attention_mask=tokens.attention_mask.to(self.device),
            end=tokens.end.to(self.device),
            hidden={layer: states[layer].float() for layer in layers},
            truncated=tokens.truncated.to(self.device),
            token_texts=tokens.token_texts,
            texts=tokens.texts,
            fingerprint=self.spec.fingerprint,
        )


def readout_of(norm: nn.LayerNorm, projection: nn.Module | Tensor | None) -> TextReadout:
    """A text tower's readout; a projection that is a plain tensor is ``(W, D)``, as CLIP keeps it."""
    weight = bias = None
    if isinstance(projection, nn.Linear):
        weight, bias = projection.weight.detach(), None if projection.bias is None else projection.bias.detach()
    elif isinstance(projection, Tensor):
        weight = projection.detach().T
    norm_bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    return TextReadout(norm.weight.detach(), norm_bias.detach(), weight, bias, norm.eps)


def refuse_changed_files(spec: EncoderSpec, file: str, stated: Mapping[str, Any], resize: str | None) -> None:
    """Raise ValueError when a folder states another fingerprint in `file` than its encoder has.

    Where the user chose another `resize` than the folder was saved with, the two must differ and say nothing.
    """
    saved = stated.get("fingerprint")
    if saved is not None and resize in (None, stated.get("resize")) and saved != spec.fingerprint:
        raise ValueError(
            f"{spec.name}: the files were changed since they were saved: {file} states fingerprint {saved}, weights "
            f"and settings have {spec.fingerprint}"
        )


def freeze(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model for inference: evaluation mode, no parameter wants a gradient, on its device in its dtype."""
    return model.eval().requires_grad_(False).to(device, dtype)
