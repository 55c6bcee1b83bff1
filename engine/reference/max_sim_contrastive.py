"""The contract of the contrastive loss on max-sim scores, and its specification in plain torch.

    z  = logit_scale · scores,   z' = logit_scale · reverse_scores with `symmetric`, else z
    loss = 1/2n Σ_{i<n} (log Σ_j exp z[i, j] - z[i, i])  +  1/2n Σ_{j<n} (log Σ_i exp z'[i, j] - z'[j, j])

over all j and all i, with n = min(Nq, Nd): query i belongs to document i, and whatever one side has beyond n are
negatives of the other side alone (hard negative texts: 2B queries, B documents; hard negative images likewise).
Scores and reverse scores are those of `engine.reference.max_sim`, whose edges hold here too.

* A single pair has the loss 0 as long as its score is finite; no pair at all is refused.
* A negative with the score -inf counts for nothing, as in any softmax. NaN in a kept token gives NaN.
* The loss is float32, or float64 for float64 inputs.

The gradient of the scores is the softmax minus the target, p - y, times logit_scale / 2n. From there on the
backward is max-sim's. What is kept for it: scores `(Nq, Nd)`, and with the hard maximum the argmax in the narrowest
integers that hold it. No tensor of shape (Nq, Nd, Lq, Ld) is made, nor, with the soft one, (Nq, Nd, Lq).

The loss follows Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (CLIP, 2021),
on the token-wise similarities of Yao et al., "FILIP" (2021), where texts look for patches along one axis and patches
for words along the other: that is the symmetric form, with weights 1 / length.
"""

from __future__ import annotations

import torch
from torch import Tensor


def loss_of(scores: Tensor, reverse_scores: Tensor, logit_scale: Tensor) -> Tensor:
    """The loss of the module docstring; both scores `(Nq, Nd)`, one tensor twice without `symmetric`."""
    n = min(scores.shape)
    rows, columns = logit_scale * scores[:n], logit_scale * reverse_scores[:, :n]
    of_rows = rows.logsumexp(1) - rows.diagonal()  # (n,)
    of_columns = columns.logsumexp(0) - columns.diagonal()  # (n,)
    return (of_rows.mean() + of_columns.mean()) / 2


def score_gradients(scores: Tensor, reverse_scores: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the loss: of the scores `(Nq, Nd)`, of the reverse scores likewise, of logit_scale `()`."""
    n = min(scores.shape)
    along, across = torch.zeros_like(scores), torch.zeros_like(reverse_scores)
    along[:n] = (logit_scale * scores[:n]).softmax(1)
    # Along rows: down columns, torch's softmax rounds differently from one number of threads to another.
    across[:, :n] = (logit_scale * reverse_scores[:, :n]).T.contiguous().softmax(1).T
    for gradient in (along, across):
        gradient.diagonal().sub_(1)
        gradient.div_(2 * n)
    of_scale = (along * scores).sum() + (across * reverse_scores).sum()
    return along.mul_(logit_scale), across.mul_(logit_scale), of_scale


def argmax_dtype(others: int) -> torch.dtype:
    """The narrowest integers for places among `others` tokens and -1."""
    return next(dtype for dtype in (torch.int8, torch.int16, torch.int32) if others - 1 <= torch.iinfo(dtype).max)
