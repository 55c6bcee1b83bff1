"""PeakPatch on frozen features: the embedding correction (ECN), the score correction (SCN), or both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from engine.choices import check_numbers
from engine.features import ImageFeatures, Needs, TextFeatures, TextReadout
from engine.heads.base import EncoderFacts, Head, HeadConfig
from engine.heads.ecn import ECN, ECNConfig
from engine.heads.inputs import encoder_sizes
from engine.heads.scn import SCN, CorrectedScores, SCNConfig
from engine.reference.peak_patch import TokenNorm, at_end

PARTS = ("both", "ecn", "scn")
# Numbers of the widest tensor of the score correction that are held at once.
_BLOCK_VALUES = 1 << 24


@dataclass(frozen=True)
class PeakPatchConfig(ECNConfig, SCNConfig, HeadConfig):
    """Sizes, layers and parts of a `PeakPatch` head; fitted to ViT-B/32 they are those of the paper."""

    parts: str = "both"
    """The corrections there are: both, ecn (of captions) or scn (of scores)."""
    norm_eps: float = 1e-5
    """Of the encoder's final layer norm."""

    def __post_init__(self) -> None:
        ECNConfig.__post_init__(self)
        SCNConfig.__post_init__(self)
        check_numbers(self, at_least_zero=("norm_eps",))
        if self.parts not in PARTS:
            raise ValueError(f"PeakPatchConfig: parts must be one of {', '.join(map(repr, PARTS))}, got {self.parts!r}")

    def fitted(self, encoder: EncoderFacts) -> PeakPatchConfig:
        """Zeros filled in for this encoder.

        Widths grow with the encoder's as they do in the paper; layers stand where they stand among the twelve of
        ViT-B/32 (peak 8, anchor 6, low 7). `peaksim diagnose layers` says where an encoder's own contrasts peak.
        Raises ValueError for a layer the text tower does not have.
        """
        count, width, dim = encoder.text_layers, encoder.text_width, encoder.embed_dim
        if count < 1:
            raise ValueError(f"peakpatch: needs the layers of a text tower, {encoder.name} gives none")
        peak = self.peak or max(1, round(count * 8 / 12))
        anchor = self.anchor or max(1, round(peak * 6 / 8))
        found = {
            "hidden": 2 * width,
            "heads": _heads(width),
            "peak": peak,
            "anchor": anchor,
            "low": max(1, (peak + anchor) // 2),
            "score_hidden": max(1, dim // 2),
            "context": max(1, dim // 4),
        }
        filled: dict[str, Any] = {name: getattr(self, name) or value for name, value in found.items()}
        filled |= encoder_sizes(PeakPatch.name, encoder, self, {"width": width, "embed_dim": dim})
        config = replace(self, **filled)
        for name in ("peak", "anchor", "low"):
            if getattr(config, name) > count:
                raise ValueError(f"peakpatch: {name} must be a text layer, 1 to {count}, got {getattr(config, name)}")
        return config


def _heads(width: int) -> int:
    """Heads of 64 numbers each, as in CLIP, four at least; one where the width cannot be shared out so."""
    heads = max(4, width // 64)
    return 1 if width % heads else heads


class Captions(NamedTuple):
    """What the head makes of captions: embeddings `(B, D)` and, for the score correction, those of a lower layer."""

    text: Tensor
    low: Tensor | None


class PeakPatch(Head):
    """Scores corrected for what a text tower drops on its last layers, negation above all.

    With `ecn` a caption's embedding is corrected once and stays one vector, which can be indexed; with `scn` the
    cosine of each pair gets a bounded step. The text tower's final layer norm and projection are frozen copies
    (buffers), given by `take_readout`. Paper: Lu, Chen and Chaterji 2026, "PeakPatch", arXiv 2607.23271.
    """

    name: ClassVar[str] = "peakpatch"
    config_type: ClassVar[type[HeadConfig]] = PeakPatchConfig
    config: PeakPatchConfig
    norm_weight: Tensor
    norm_bias: Tensor
    projection: Tensor
    projection_bias: Tensor

    def __init__(self, config: PeakPatchConfig, *, encoder: str = "", fingerprint: str = "") -> None:
        super().__init__(config, encoder=encoder, fingerprint=fingerprint)
        self.ecn = None if config.parts == "scn" else ECN(config)
        self.scn = None if config.parts == "ecn" else SCN(config)
        # Not a number until they are given: a head that was never told them cannot be mistaken for one that was.
        shapes = {"norm_weight": (config.width,), "norm_bias": (config.width,),
                  "projection": (config.embed_dim, config.width), "projection_bias": (config.embed_dim,)}  # fmt: skip
        for name, shape in shapes.items():
            self.register_buffer(name, torch.full(shape, torch.nan))

    def take_readout(self, readout: TextReadout) -> None:
        """Copy the encoder's final layer norm and projection. Raises ValueError for those of another width."""
        width, dim = self.config.width, self.config.embed_dim
        projection = torch.eye(width) if readout.projection is None else readout.projection
        if tuple(projection.shape) != (dim, width):
            raise ValueError(
                f"peakpatch: the readout must map {width} numbers to {dim}, got {tuple(projection.shape)[::-1]}"
            )
        bias = projection.new_zeros(dim) if readout.projection_bias is None else readout.projection_bias
        with torch.no_grad():
            for name, value in (("norm_weight", readout.norm_weight), ("norm_bias", readout.norm_bias),
                                ("projection", projection), ("projection_bias", bias)):  # fmt: skip
                getattr(self, name).copy_(value)
        self.config = replace(self.config, norm_eps=readout.norm_eps)

    @property
    def readout(self) -> TextReadout:
        """The encoder's final layer norm and projection."""
        return TextReadout(
            self.norm_weight, self.norm_bias, self.projection, self.projection_bias, self.config.norm_eps
        )

    def needs(self) -> Needs:
        """Hidden states of the text layers that are read."""
        layers = set() if self.ecn is None else set(self.config.layers)
        if self.scn is not None:
            layers.add(self.config.low)
        return Needs(text_layers=tuple(sorted(layers)))

    def check(self, images: ImageFeatures, texts: TextFeatures) -> None:
        super().check(images, texts)
        self.check_texts(texts)

    def check_texts(self, texts: TextFeatures) -> None:
        """Raise ValueError for captions without mask or end, or a head that was never given its readout."""
        if bool(self.norm_weight.isnan().any()):
            raise ValueError("peakpatch: the head was not given its encoder's readout; call take_readout")
        for name, value in (("attention_mask", texts.attention_mask), ("end", texts.end)):
            if value is None:
                raise ValueError(f"peakpatch: texts must hold {name}, got None; encode them with encode_texts")

    def captions(self, texts: TextFeatures, *, backend: str | None = None) -> Captions:
        """What the scores are made of."""
        self.check_texts(texts)
        f = texts.embedding.float()
        if self.ecn is not None:
            f = self.ecn.correct(f, self.deltas(texts, backend=backend), backend=backend)
        if self.scn is None:
            return Captions(f, None)
        assert texts.end is not None  # `check_texts` has seen to it
        return Captions(f, self.readout.embed(at_end(texts.hidden[self.config.low], texts.end)))

    def deltas(self, texts: TextFeatures, *, backend: str | None = None) -> Tensor:
        """Corrections `(B, D)` of the embeddings, before α; zero without an embedding correction."""
        self.check_texts(texts)
        if self.ecn is None:
            return torch.zeros_like(texts.embedding, dtype=torch.float32)
        assert texts.attention_mask is not None and texts.end is not None  # `check_texts` has seen to it
        config = self.config
        norm = TokenNorm(self.norm_weight, self.norm_bias, config.norm_eps)
        peak = texts.hidden[config.peak]
        # Of the anchor the end tokens alone are read.
        anchor = at_end(texts.hidden[config.anchor], texts.end) if config.use_anchor else peak
        return self.ecn.delta(peak, anchor, norm, mask=texts.attention_mask, end=texts.end, backend=backend)

    def corrected(self, texts: TextFeatures, *, backend: str | None = None) -> TextFeatures:
        """The same captions with corrected embeddings, for an index or whatever else reads embeddings."""
        return replace(texts, embedding=self.captions(texts, backend=backend).text)

    def step(self, images: Tensor, captions: Captions, *, backend: str | None = None) -> CorrectedScores:
        """Scores of images `(N, D)` and their captions `(N, K, D)`, or of all with `(K, D)`."""
        image = images.float()
        if self.scn is None or captions.low is None:
            text = captions.text
            cosine = image @ text.T if text.ndim == 2 else torch.einsum("nd,nkd->nk", image, text)
            return CorrectedScores(cosine, torch.zeros_like(cosine))
        return self.scn(image, captions.text, captions.low, backend=backend)

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        return self.score_all(images, texts)

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        return self.score_pairs(images, texts)

    def score_all(self, images: ImageFeatures, texts: TextFeatures, *, backend: str | None = None) -> Tensor:
        """`matrix` with the backend of the ops named; images go through the score correction block by block."""
        self.check(images, texts)
        captions = self.captions(texts, backend=backend)
        if self.scn is None:
            return self.step(images.embedding, captions).scores
        # The widest tensors there are the products of image and caption and the hidden layer made of them.
        widest = max(self.config.embed_dim, self.config.score_hidden)
        rows = max(1, _BLOCK_VALUES // (len(texts) * widest))
        blocks = [self.step(block, captions, backend=backend).scores for block in images.embedding.split(rows)]
        return torch.cat(blocks)

    def score_pairs(self, images: ImageFeatures, texts: TextFeatures, *, backend: str | None = None) -> Tensor:
        """`pairs` with the backend of the ops named."""
        return self.correct_pairs(images, texts, backend=backend).scores[:, 0]

    def correct_pairs(
        self, images: ImageFeatures, texts: TextFeatures, *, backend: str | None = None
    ) -> CorrectedScores:
        """Cosines of image i and (corrected) text i, and what the score correction adds; both `(n, 1)`."""
        self.check_pairs(images, texts)
        text, low = self.captions(texts, backend=backend)
        own = Captions(text[:, None], None if low is None else low[:, None])
        return self.step(images.embedding, own, backend=backend)

    def scale(self) -> float:
        """The paper's."""
        return 100.0
