"""Which weights of a training decay, and which learn at a rate of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.heads.base import Trainable


def parameter_groups(
    head: Trainable, weight_decay: float, part_rates: Sequence[tuple[str, float]] = ()
) -> list[dict[str, Any]]:
    """Groups for an optimiser: matrices decay, biases and norms do not; `share` is that of the learning rate.

    Arguments: `part_rates`, pairs of how the names of a part's weights begin and the share of the rate at which they
    learn; the others learn at all of it. Raises ValueError for a part without a weight, or a share that is not a
    positive number.
    """
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    missing = {part for part, _ in part_rates}
    for part, share in part_rates:
        if not 0 < share < float("inf"):
            raise ValueError(f"train {head.name}: part_rates must be finite and above 0, got {share} for {part!r}")
    for name, weight in head.named_parameters():
        if not weight.requires_grad:
            continue
        own = [(part, share) for part, share in part_rates if name.startswith(part)]
        missing -= {part for part, _ in own}
        share, decays = own[0][1] if own else 1.0, weight.ndim >= 2
        decay = weight_decay if decays else 0.0
        group = groups.setdefault((share, decays), {"params": [], "weight_decay": decay, "share": share})
        group["params"].append(weight)
    if missing:
        raise ValueError(f"train {head.name}: part_rates name weights, and none begins with {sorted(missing)[0]!r}")
    return list(groups.values())
