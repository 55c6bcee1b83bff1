"""What an index asks its stored vectors with: the text's side of a score that is a weighted sum of maxima."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["global", "windows", "patches", "head"]


@dataclass(frozen=True)
class LateQueries:
    """`B` queries: `score(I, T) = Σ_u weights[u] · max_v ⟨vectors[u], v⟩` over the vectors v of an image.

    Attributes:
        kind: the image's vectors: its one `"global"` embedding, embeddings of its `"windows"`, its aligned
            `"patches"`, or patches projected by a trained `"head"`.
        vectors: `(B, L, D)` floating.
        weights: float32 `(B, L)`; 0 = takes no part.
        temperature: None for the maximum, τ > 0 for the soft one, `τ·logsumexp(s/τ)`.
    """

    kind: Kind
    vectors: Tensor
    weights: Tensor
    temperature: float | None = None

    def __len__(self) -> int:
        return self.vectors.shape[0]
