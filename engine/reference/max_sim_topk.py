"""The contract of the best documents under max-sim, and its specification in plain torch.

    indices[i] = the k documents j with the greatest scores[i, j], best first

with the scores of `engine.reference.max_sim`, or of `engine.reference.max_sim_int8` for quantised tokens; either side
may be packed as in `engine.reference.max_sim_varlen`.

* Of equal scores the document with the lower index comes first; 0 and −0 are equal.
* NaN counts as the greatest score, as in `torch.topk`: documents that score NaN come first, lower indices before
  higher ones. They show that something is wrong with the tokens; a mask leaves such tokens out.
* A document without kept tokens scores 0, as everywhere, and may be among the best.
* Results always have k columns. With fewer than k documents the last ones hold score −inf and index −1.
* The op and its kernels never hold scores `(Nq, Nd)`, only those of a block of documents; here they are all made and
  sorted. There is no gradient: score the documents found by `max_sim` or `max_sim_pairs` where one is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.reference import max_sim as dense
from engine.reference.max_sim import Outputs
from engine.reference.max_sim_varlen import Items, max_sim_varlen


def max_sim_topk(
    q: Items,
    d: Items,
    k: int,
    *,
    temperature: float | None = None,
    precision: str = "ieee",
    scorer: Callable[..., Outputs] = dense.max_sim,
) -> tuple[Tensor, Tensor]:
    """The contract above, for arguments that the op has checked.

    Args:
        scorer: as in `engine.reference.max_sim_varlen.max_sim_varlen`; `score_codes` for int8 codes.

    Returns:
        scores `(Nq, k)`, indices `(Nq, k)` int64.
    """
    scores, *_ = max_sim_varlen(q, d, temperature=temperature, precision=precision, scorer=scorer)
    return best_of(scores, torch.arange(d.number, device=scores.device).expand(scores.shape), k)


def best_of(scores: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best k of scored documents `(Nq, n)`; of equals the one that stands first."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]  # NaN first
    missing = (0, k - order.shape[1])
    best = torch.nn.functional.pad(scores.gather(1, order), missing, value=-torch.inf)
    return best, torch.nn.functional.pad(indices.gather(1, order), missing, value=-1)
