"""What PeakPatch is trained on: a regression that gives the embedding correction a start, a contrast, a choice.

Source: Lu, Chen and Chaterji 2026, "PeakPatch"; temperatures and weights are those of the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.heads.scn import CorrectedScores

SCALE = 100.0
TEMPERATURE = 0.07
PENALTY = 0.1


def regression_loss(delta: Tensor, target: Tensor) -> Tensor:
    """Mean squared error plus one minus the cosine, of corrections ``(B, D)`` and what they should be.

    The target of a caption with a denial is the embedding of the caption without it minus its own: a true denial of
    something absent changes nothing of the picture.
    """
    cosine = functional.cosine_similarity(delta, target, dim=-1)
    return functional.mse_loss(delta, target) + (1 - cosine).mean()


def contrast_loss(images: Tensor, true: Tensor, false: Tensor, *, scale: float = SCALE) -> Tensor:
    """Symmetric contrastive loss with a false caption for each image among the captions.

        (CE over [images · trueᵀ | images · falseᵀ], each image to its own true caption
         + CE over true · imagesᵀ, each true caption to its image) / 2

    Arguments: unit-norm embeddings ``(B, D)`` of images, and of one true and one false caption of each; ``scale``
    multiplies cosines.
    """
    own = torch.arange(len(images), device=images.device)
    right = scale * images @ true.T
    wrong = scale * images @ false.T
    to_text = functional.cross_entropy(torch.cat([right, wrong], dim=1), own)
    return (to_text + functional.cross_entropy(right.T, own)) / 2


def choice_loss(
    found: CorrectedScores, right: Tensor, *, temperature: float = TEMPERATURE, penalty: float = PENALTY
) -> Tensor:
    """Cross-entropy of the right one among each image's captions, plus the mean square of the corrections.

    Arguments: scores ``(B, K)``; ``right`` int64 ``(B,)``, the place of the right caption; ``temperature`` divides the
    scores, ``penalty`` weighs the second term.
    """
    chosen = functional.cross_entropy(found.scores / temperature, right)
    return chosen + penalty * found.correction.square().mean()
