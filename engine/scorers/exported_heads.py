"""Heads of an exported model: their arithmetic runs through ONNX Runtime, beside the encoder whose features they read.

Each is a head of its kind like any other. Where a caller names a backend of our ops, or wants to see attention, the
head's own weights are used, which lie in the folder too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from engine.encoders.exported import ExportedEncoder
from engine.encoders.onnx_graph import Graph
from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import Head, read_head
from engine.heads.inputs import kept_tokens, patch_states, shortened, token_states
from engine.heads.max_sim_head import MaxSimHead
from engine.heads.pair_transformer import PairTransformer, Side
from engine.heads.peak_patch import Captions, PeakPatch
from engine.heads.scn import CorrectedScores
from engine.heads.tfglobal import TFGlobal
from engine.heads.tflocal import TFLocal

Graphs = Mapping[str, Graph]


class GraphPairs(PairTransformer):
    """A `PairTransformer` whose sides and pairs are graphs; its attention is looked at with its own weights."""

    def __init__(self, inner: PairTransformer, graphs: Graphs, name: str) -> None:
        # Not the parent's: that would draw weights which `inner` has already.
        nn.Module.__init__(self)
        self.sizes = inner.sizes
        self._modules.update(inner._modules)
        self._parameters.update(inner._parameters)
        self._graphs = {side: graphs[f"{name}_{side}"] for side in ("image", "text", "pairs")}

    def image_side(self, x: Tensor, kept: Tensor) -> Side:
        return self._read("image", x, kept)

    def text_side(self, x: Tensor, kept: Tensor) -> Side:
        return self._read("text", x, kept)

    def pairs(self, images: Side, texts: Side) -> Tensor:
        sides = (("image", images), ("text", texts))
        inputs = {f"{name}.{part}": getattr(side, part) for name, side in sides for part in Side._fields}
        return self._graphs["pairs"].run(inputs)["scores"]

    def _read(self, side: str, x: Tensor, kept: Tensor) -> Side:
        found = self._graphs[side].run({"states": x})
        return Side(found["x"], found["qkv"], kept)


class ExportedMaxSimHead(MaxSimHead):
    """A max-sim head whose two sides are graphs."""

    graphs: Graphs

    def encode_images(self, images: ImageFeatures) -> Tensor:
        states = patch_states(images, self.config.image_layers, self.patches, self.gate.weight)
        return self.graphs[f"{self.name}_image"].run({"states": states})["vectors"]

    def encode_texts(self, texts: TextFeatures) -> tuple[Tensor, Tensor, Tensor]:
        texts = shortened(texts)
        seen, words = kept_tokens(texts)
        states = token_states(texts, self.config.text_layers, self.gate.weight)
        found = self.graphs[f"{self.name}_text"].run({"states": states, "seen": seen, "words": words})
        return found["vectors"], found["gates"], found["kept"]


class ExportedPeakPatch(PeakPatch):
    """A PeakPatch head whose captions and score correction are graphs."""

    graphs: Graphs

    def captions(self, texts: TextFeatures, *, backend: str | None = None) -> Captions:
        if backend is not None:
            return super().captions(texts, backend=backend)
        self.check_texts(texts)
        assert texts.attention_mask is not None and texts.end is not None  # `check_texts` has seen to it
        inputs = {"embedding": texts.embedding, "mask": texts.attention_mask, "end": texts.end}
        inputs |= {f"hidden.{layer}": texts.hidden[layer] for layer in self.needs().text_layers}
        found = self.graphs[f"{self.name}_text"].run(inputs)
        return Captions(found["text"], found.get("low"))

    def step(self, images: Tensor, captions: Captions, *, backend: str | None = None) -> CorrectedScores:
        if backend is not None or self.scn is None or captions.low is None:
            return super().step(images, captions, backend=backend)
        text, low = (x[None] if x.ndim == 2 else x for x in (captions.text, captions.low))
        found = self.graphs[f"{self.name}_pairs"].run({"image": images, "text": text, "low": low})
        return CorrectedScores(found["cosine"], found["correction"])


_KINDS: dict[str, type[Head]] = {
    kind.name: kind for kind in (ExportedMaxSimHead, ExportedPeakPatch, TFLocal, TFGlobal)
}


def exported_head(encoder: ExportedEncoder, name: str) -> Head | None:
    """The head of this kind in an exported folder, beside the encoder's features; None where there is none."""
    stated: Mapping[str, Any] | None = encoder.manifest.heads.get(name)
    if stated is None:
        return None
    encoder.check_unchanged()
    path = encoder.folder / stated["file"]
    # It belongs to this export whatever its precision.
    stored = replace(read_head(path), encoder=encoder.spec.name, fingerprint=encoder.spec.fingerprint)
    head = stored.make(_KINDS[name], path)
    graphs = {key: encoder.graphs[key] for key in stated["graphs"]}
    if isinstance(head, TFLocal | TFGlobal):
        head.transformer = GraphPairs(head.transformer, graphs, name)
        if isinstance(head, TFLocal):
            # The image's graph begins with it.
            head.around = None
    else:
        assert isinstance(head, ExportedMaxSimHead | ExportedPeakPatch)
        head.graphs = graphs
    return head.requires_grad_(False).to(encoder.device)
