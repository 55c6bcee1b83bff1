"""What PeakPatch is trained on beside a contrastive loss: a regression to start with, a choice, and what to keep.

Source: Lu, Chen and Chaterji 2026, "PeakPatch"; temperature and penalty are those of the authors' code.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from engine.heads.scn import CorrectedScores

TEMPERATURE = 0.07
PENALTY = 0.1


def regression_loss(delta: Tensor, target: Tensor) -> Tensor:
    """Mean squared error plus one minus the cosine, of corrections `(B, D)` and what they should be.

    The target of a caption with a denial is the embedding of the caption without it minus its own: a true denial of
    something absent changes nothing of the picture.
    """
    cosine = functional.cosine_similarity(delta, target, dim=-1)
    return functional.mse_loss(delta, target) + (1 - cosine).mean()


def keep_loss(corrected: Tensor, plain: Tensor) -> Tensor:
    """One minus the cosine of corrected captions `(B, D)` and the encoder's embeddings of them without a denial.

    Ours: what denies nothing should stay where it is, and what denies something absent should come back to it.
    """
    return (1 - functional.cosine_similarity(corrected, plain, dim=-1)).mean()


def choice_loss(
    found: CorrectedScores, right: Tensor, *, temperature: float = TEMPERATURE, penalty: float = PENALTY
) -> Tensor:
    """Cross-entropy of the right one among each image's captions, plus the mean square of the corrections.

    Arguments: scores `(B, K)`; `right` int64 `(B,)`, the place of the right caption; `temperature` divides the
    scores, `penalty` weighs the second term.
    """
    chosen = functional.cross_entropy(found.scores / temperature, right)
    return chosen + penalty * found.correction.square().mean()
