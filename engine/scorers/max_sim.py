"""Max-sim over patches and word pieces: every token of one side finds its best partner on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from engine.choices import Backend, check_choice
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.ops.checks import check_temperature
from engine.ops.max_sim import max_sim, max_sim_pairs
from engine.scorers.base import Match, Scorer
from engine.scorers.late import LateQueries

Direction = Literal["text_to_image", "image_to_text", "symmetric"]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class MaxSim(Scorer):
    """`score(I, T) = Σ_u w_u · max_p ⟨t_u, v_p⟩` over word pieces u and patches p, both in the shared space.

    Start, end and padding positions of the text carry no word and take no part. Late interaction after
    Khattab and Zaharia 2020 (ColBERT), the symmetric form after Yao et al. 2021 (FILIP).

    Attributes:
        direction: `"text_to_image"` (every word piece finds its best patch), `"image_to_text"` (every patch
            its best word piece) or `"symmetric"` (the mean of both).
        reduction: `"mean"` over the kept tokens of the asking side, a cosine again; or their `"sum"`, which
            grows with the length of the caption (or the number of patches).
        temperature: None for the maximum, τ > 0 for the soft one, `τ·logsumexp(s/τ)`, which lies above it.
        tap: the patch tap to read, None takes the encoder's first aligned one.
        backend: of the op; None chooses by device, `"reference"` is the plain torch form.

    Raises:
        ValueError: an option that is none of its choices; from its methods unaligned patches, or a text without a
            word.
        TypeError: an option of another type.
    """

    name: ClassVar[str] = "max_sim"
    direction: Direction = "text_to_image"
    reduction: Reduction = "mean"
    temperature: float | None = None
    tap: str | None = None
    backend: Backend | None = None

    def __post_init__(self) -> None:
        check_choice(self.name, "direction", self.direction, get_args(Direction))
        check_choice(self.name, "reduction", self.reduction, get_args(Reduction))
        if self.backend is not None:
            check_choice(self.name, "backend", self.backend, get_args(Backend))
        check_temperature(self.name, self.temperature)
        if self.tap is not None and not isinstance(self.tap, str):
            raise TypeError(f"{self.name}: tap must be a name or None, got {type(self.tap).__name__}")

    def needs(self) -> Needs:
        """Patches and word pieces in one space."""
        return Needs(patches=True, aligned=True, tap=self.tap, tokens=True)

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Similarities `(n_images, n_texts)`, float32."""
        self.check(images, texts)
        scores = self._scores(images, texts, pairs=False)
        # The op asks with its rows: patches stand there already when the image asks.
        return scores if self.direction == "image_to_text" else scores.T

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Similarities `(n,)` of image i with text i, float32."""
        self.check_pairs(images, texts)
        return self._scores(images, texts, pairs=True)

    def late_queries(self, texts: TextFeatures) -> LateQueries | None:
        """The word pieces with their weights; None where the image asks."""
        if self.direction != "text_to_image":
            return None
        if texts.tokens is None:
            raise ValueError(f"{self.name}: needs text tokens; encode the texts with scorer={self.name!r}")
        weights = _mean_weights(texts.tokens, texts.token_mask)
        if self.reduction == "sum":
            weights = (weights != 0).float()
        return LateQueries("patches", texts.tokens, weights, self.temperature)

    def matches(self, images: ImageFeatures, texts: TextFeatures) -> list[Match]:
        """Every word piece with its best patch, every patch with its best word piece, or both by halves."""
        self.check_pairs(images, texts)
        tokens, patches, token_mask, patch_mask = self._sides(images, texts)
        similarity = tokens[0].float() @ patches[0].float().T  # (T, P)
        if patch_mask is not None:
            similarity = similarity.masked_fill(~patch_mask[0], -torch.inf)
        if token_mask is not None:
            similarity = similarity.masked_fill(~token_mask[0, :, None], -torch.inf)
        words = _words(texts)
        kept_tokens = _kept(token_mask, len(similarity))
        kept_patches = _kept(patch_mask, similarity.shape[1])
        found: list[Match] = []
        half = 0.5 if self.direction == "symmetric" else 1.0
        if self.direction != "image_to_text":
            weight = half / len(kept_tokens) if self.reduction == "mean" else half
            best = similarity.argmax(dim=1).tolist()
            found += [
                Match(words[u], patch_box(images, best[u]), float(similarity[u, best[u]]), weight) for u in kept_tokens
            ]
        if self.direction != "text_to_image":
            weight = half / len(kept_patches) if self.reduction == "mean" else half
            best = similarity.argmax(dim=0).tolist()
            found += [
                Match(words[best[p]], patch_box(images, p), float(similarity[best[p], p]), weight) for p in kept_patches
            ]
        return found

    def _sides(self, images: ImageFeatures, texts: TextFeatures) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Tokens and patches with their masks, and a check that every side has something to match."""
        assert texts.tokens is not None and images.patches is not None  # `check` has seen to it
        for who, mask, labels in (
            ("text", texts.token_mask, texts.texts),
            ("image", images.patch_mask, images.ids),
        ):
            if mask is None or bool(mask.any(dim=1).all()):
                continue
            row = int((~mask.any(dim=1)).nonzero()[0])
            shown = f" ({labels[row]!r})" if labels else ""
            raise ValueError(f"{self.name}: every {who} needs something to match, got none in {who} {row}{shown}")
        return texts.tokens, images.patches, texts.token_mask, images.patch_mask

    def _scores(self, images: ImageFeatures, texts: TextFeatures, *, pairs: bool) -> Tensor:
        """Scores `(n_asking, n_answering)`, or `(n,)` of pairs; the text asks in the symmetric form."""
        q, d, q_mask, d_mask = self._sides(images, texts)
        if self.direction == "image_to_text":
            q, d, q_mask, d_mask = d, q, d_mask, q_mask
        symmetric = self.direction == "symmetric"
        mean = self.reduction == "mean"
        found = (max_sim_pairs if pairs else max_sim)(
            q,
            d,
            q_mask=q_mask,
            d_mask=d_mask,
            q_weights=_mean_weights(q, q_mask) if mean else None,
            d_weights=_mean_weights(d, d_mask) if mean and symmetric else None,
            temperature=self.temperature,
            symmetric=symmetric,
            backend=self.backend,
        )
        if isinstance(found, Tensor):
            return found
        assert found.reverse_scores is not None  # the symmetric form was asked for
        return (found.scores + found.reverse_scores) / 2


def _mean_weights(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Weights `(N, L)` that turn a sum over the kept tokens into their mean."""
    kept = tokens.new_ones(tokens.shape[:2], dtype=torch.float32) if mask is None else mask.float()
    return kept / kept.sum(dim=1, keepdim=True)


def patch_box(images: ImageFeatures, patch: int) -> tuple[int, int, int, int]:
    """Pixel rectangle of one patch in the upright image; empty when grid or view are not known."""
    if images.grid is None or images.views is None:
        return 0, 0, 0, 0
    rows, columns = images.grid
    row, column = divmod(patch, columns)
    left, top, right, bottom = images.views[0].tolist()
    width, height = right - left, bottom - top
    return (
        left + round(column * width / columns),
        top + round(row * height / rows),
        left + round((column + 1) * width / columns),
        top + round((row + 1) * height / rows),
    )


def _kept(mask: Tensor | None, length: int) -> list[int]:
    return list(range(length)) if mask is None else mask[0].nonzero().flatten().tolist()


def _words(texts: TextFeatures) -> list[str]:
    """The word piece at each position, or a name for it."""
    assert texts.tokens is not None
    length = texts.tokens.shape[1]
    if texts.token_texts is None:
        return [f"token {position}" for position in range(length)]
    words = list(texts.token_texts[0][:length])
    return words + [""] * (length - len(words))
