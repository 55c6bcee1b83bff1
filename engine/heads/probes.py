"""Probes: what can be read off frozen vectors, by a linear classifier or by the nearest class centroid.

A probe classifies; it scores no image against a text and is no `Head`. Which vectors it reads is named by a tap:

    embedding          the global embedding
    patches, tokens    mean over the patches or words in the shared space
    hidden.6           mean over patches (or the words of texts) of block 6
    hidden.6.class     the class token of block 6 (for texts: the end token)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.features import ImageFeatures, TextFeatures
from engine.heads.inputs import kept_tokens
from engine.ops.centroid import centroid


def probe_vectors(features: ImageFeatures | TextFeatures, tap: str, *, patches: int = 0) -> Tensor:
    """Vectors `(B, D)`, float32, that a tap names.

    `patches`: number of patches of the image encoder, for `hidden.<layer>` of images: what stands before the
    patches is no patch. Raises ValueError for an unknown tap or one that the features do not hold.
    """
    name, _, rest = tap.partition(".")
    layer, _, place = rest.partition(".")
    if tap == "embedding":
        return features.embedding.float()
    if tap == "patches" and isinstance(features, ImageFeatures) and features.patches is not None:
        return _mean(features.patches, features.patch_mask)
    if tap == "tokens" and isinstance(features, TextFeatures) and features.tokens is not None:
        return _mean(features.tokens, kept_tokens(features)[1])
    if name == "hidden" and layer.isdigit() and int(layer) in features.hidden and place in ("", "class"):
        states = features.hidden[int(layer)]
        if isinstance(features, ImageFeatures):
            if place == "class":
                return states[:, 0].float()
            if not 0 < patches <= states.shape[1]:
                raise ValueError(
                    f"probe: tap {tap!r} of images needs their number of patches, 1 to {states.shape[1]}, got {patches}"
                )
            return _mean(states[:, -patches:], None)
        if place == "":
            return _mean(states, kept_tokens(features)[1])
        if features.end is not None:
            return states[torch.arange(len(states), device=states.device), features.end].float()
    raise ValueError(
        f"probe: the features must hold what tap {tap!r} names (embedding, patches, tokens, hidden.<layer>)"
    )


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier of standardised vectors, `argmax_c ⟨W_c, (x - mean) / deviation⟩ + b_c`.

    Attributes:
        weight, bias: `(C, D)` and `(C,)`.
        mean, deviation: `(D,)` of the vectors it was fitted on.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def fit(cls, x: Tensor, labels: Tensor, n_classes: int, *, decay: float = 1e-3, steps: int = 100) -> LinearProbe:
        """Multinomial logistic regression by L-BFGS from zero: no randomness, no learning rate.

        Arguments: `x (N, D)`; `labels` int64 `(N,)` in 0..C-1; `decay` times the squared weights is added to
        the mean cross-entropy. Raises ValueError for what does not fit together.
        """
        _check("LinearProbe", x, labels, n_classes)
        x = x.detach().float()
        mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0).clamp(min=1e-6)
        z = (x - mean) / deviation
        weight = torch.zeros(n_classes, x.shape[1], device=x.device, requires_grad=True)
        bias = torch.zeros(n_classes, device=x.device, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(functional.linear(z, weight, bias), labels) + decay * weight.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        return cls(weight.detach(), bias.detach(), mean, deviation)

    def scores(self, x: Tensor) -> Tensor:
        """Logits `(N, C)`."""
        return functional.linear((x.float() - self.mean) / self.deviation, self.weight, self.bias)

    def accuracy(self, x: Tensor, labels: Tensor) -> float:
        """Share of vectors whose best class is their label."""
        return _accuracy(self.scores(x), labels)


@dataclass(frozen=True)
class CentroidProbe:
    """The class whose mean vector has the largest cosine (Vompa, Tammet and Vaishnav 2025), by `engine.ops.centroid`.

    Attributes:
        x: vectors `(N, D)` it was fitted on.
        labels: int64 `(N,)`.
        n_classes: number of classes C.
    """

    x: Tensor
    labels: Tensor
    n_classes: int

    @classmethod
    def fit(cls, x: Tensor, labels: Tensor, n_classes: int) -> CentroidProbe:
        """Nothing is fitted but the means. Raises ValueError for what does not fit together."""
        _check("CentroidProbe", x, labels, n_classes)
        return cls(x.detach().float(), labels, n_classes)

    def scores(self, x: Tensor) -> Tensor:
        """Cosines `(N, C)`; a class without a vector has 0."""
        bounds = torch.arange(len(self.x) + 1, device=self.x.device)
        return centroid(x.float(), self.x, bounds, classes=self.labels, n_classes=self.n_classes)

    def accuracy(self, x: Tensor, labels: Tensor) -> float:
        """Share of vectors whose best class is their label."""
        return _accuracy(self.scores(x), labels)


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(dim=1) == labels).float().mean())


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the kept positions, `(B, L, D)` to `(B, D)`; zero where none is kept."""
    if mask is None:
        return x.float().mean(dim=1)
    kept = mask[..., None].float()
    return (x.float() * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1.0)


def _check(who: str, x: Tensor, labels: Tensor, n_classes: int) -> None:
    if x.ndim != 2 or labels.shape != x.shape[:1] or labels.dtype != torch.int64 or not len(x):
        raise ValueError(
            f"{who}: wants vectors (N, D) with N >= 1 and int64 labels (N,), got {tuple(x.shape)} and "
            f"{str(labels.dtype).removeprefix('torch.')} {tuple(labels.shape)}"
        )
    if n_classes < 2 or int(labels.min()) < 0 or int(labels.max()) >= n_classes:
        raise ValueError(
            f"{who}: labels must be in 0..{n_classes - 1} of at least two classes, got {int(labels.min())} to "
            f"{int(labels.max())}"
        )
