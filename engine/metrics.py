"""What the field's benchmarks count: group scores, multiple choice, recall, ties, margins and intervals.

Scores of one item are laid out ``scores[item, image, text]`` everywhere, the engine's order
``(n_images, n_texts)``. Comparisons are strict: a tie is never a win unless a rule named by the caller says
so. Scores of any dtype are compared in float64, which holds float32, float16 and bfloat16 exactly. A
non-finite score is an error that names its item.

Formulas: Winoground (Thrush et al., arXiv 2204.03162), BiVLC (Miranda et al., arXiv 2406.09952),
Wilson (1927), percentile bootstrap (Efron, 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

Scores: TypeAlias = ArrayLike | torch.Tensor
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Integers: TypeAlias = NDArray[np.int64]

TIE_RULES = ("wrong", "first", "share")
RECALL_TIES = ("wrong", "share")


@dataclass(frozen=True)
class GroupOutcomes:
    """Outcomes of ``n`` items of two images and two texts; text i belongs to image i.

    Attributes
    ----------
    ipos_2t, ineg_2t: bool ``(n,)``: image 0 (1) prefers its own text over the other.
    tpos_2i, tneg_2i: bool ``(n,)``: text 0 (1) prefers its own image over the other.
    text: bool ``(n,)``: both images right (Winoground's text score, BiVLC's I2T).
    image: bool ``(n,)``: both texts right (Winoground's image score, BiVLC's T2I).
    group: bool ``(n,)``: all four comparisons right.
    tied: bool ``(n,)``: one of the four comparisons is exactly equal.
    text_margin, image_margin, margin: float64 ``(n,)``: the smallest difference that decides ``text``,
        ``image``, ``group``; positive exactly where the outcome is right.
    """

    ipos_2t: Bools
    ineg_2t: Bools
    tpos_2i: Bools
    tneg_2i: Bools
    text: Bools
    image: Bools
    group: Bools
    tied: Bools
    text_margin: Floats
    image_margin: Floats
    margin: Floats


@dataclass(frozen=True)
class ChoiceOutcomes:
    """Outcomes of ``n`` multiple-choice items.

    Attributes
    ----------
    credit: float64 ``(n,)`` in 0..1: what the tie rule gives.
    picked: int64 ``(n,)``: index of the first option with the highest score.
    tied: bool ``(n,)``: the highest score is shared by several options.
    margin: float64 ``(n,)``: right option minus the best other one; positive exactly where it wins alone.
    """

    credit: Floats
    picked: Integers
    tied: Bools
    margin: Floats


@dataclass(frozen=True)
class RankCounts:
    """Where the best right candidate of each of ``n`` queries stands; all that recall needs.

    Attributes
    ----------
    greater: int64 ``(n,)``: wrong candidates with a higher score than the best right one.
    equal: int64 ``(n,)``: wrong candidates with exactly its score.
    right_equal: int64 ``(n,)``: right candidates with exactly its score, itself included (>= 1).
    margin: float64 ``(n,)``: best right minus best wrong score (+inf when every candidate is right).
    """

    greater: Integers
    equal: Integers
    right_equal: Integers
    margin: Floats


@dataclass(frozen=True)
class Interval:
    """A confidence interval ``low`` .. ``high`` around ``value``, at ``level``."""

    value: float
    low: float
    high: float
    level: float = 0.95


def as_scores(scores: Scores, *, who: str = "metrics", ids: Sequence[str] | None = None) -> Floats:
    """The scores as a float64 array on the CPU; ValueError naming the first item that is NaN or infinite.

    Arguments: ``scores`` of any shape, the first axis counting items; ``who`` calls (for the message);
    ``ids`` name the items (their numbers when None).

    >>> as_scores(torch.tensor([[1, 2]], dtype=torch.bfloat16)).tolist()
    [[1.0, 2.0]]
    """
    if isinstance(scores, torch.Tensor):
        scores = scores.detach().to("cpu", torch.float64).numpy()
    array = np.asarray(scores, dtype=np.float64)
    if ids is not None and (array.ndim == 0 or len(ids) != len(array)):
        raise ValueError(f"{who}: ids must name each of the {array.shape[:1]} items, got {len(ids)} ids")
    bad = ~np.isfinite(array)
    if bad.any():
        place = tuple(int(axis) for axis in np.argwhere(bad)[0])
        item = ids[place[0]] if ids is not None and place else (place[0] if place else 0)
        raise ValueError(
            f"{who}: scores must be finite, got {array[place]} for item {item!r} at {place[1:]} "
            f"({int(bad.sum())} such scores in all)"
        )
    return array


def group_scores(scores: Scores, *, ids: Sequence[str] | None = None) -> GroupOutcomes:
    """Winoground's and BiVLC's outcomes of two images against two texts, strict.

    With ``S = scores[item, image, text]``: Ipos_2T = S00 > S01, Ineg_2T = S11 > S10, Tpos_2I = S00 > S10,
    Tneg_2I = S11 > S01; text = both I, image = both T, group = all four. Independent random scores give
    1/4, 1/4 and 1/6; a constant gives 0.

    Arguments: ``scores (n, 2, 2)``, finite, text i belonging to image i; ``ids`` of the items, for messages.
    Raises ValueError for another shape or a non-finite score.

    >>> outcome = group_scores([[[2.0, 1.0], [1.0, 2.0]], [[2.0, 1.0], [3.0, 2.0]]])
    >>> outcome.text.tolist(), outcome.image.tolist(), outcome.group.tolist()
    ([True, False], [True, False], [True, False])
    """
    array = as_scores(scores, who="group_scores", ids=ids)
    if array.ndim != 3 or array.shape[1:] != (2, 2):
        raise ValueError(
            f"group_scores: scores must be (items, images, texts) = (n, 2, 2), got {tuple(array.shape)}"
        )
    right, other = array[:, (0, 1), (0, 1)], array[:, (0, 1), (1, 0)]  # (n, 2): own text; other text
    # Compared, not subtracted: where a library has told the CPU to flush subnormals to zero, the difference of two
    # close scores is 0 although they differ.
    ipos, ineg = (right > other).T
    tpos, tneg = (right > other[:, ::-1]).T  # text 0 against image 1, text 1 against image 0
    text, image = ipos & ineg, tpos & tneg
    tied = ((right == other) | (right == other[:, ::-1])).any(1)
    margins = (right - other).min(1), (right - other[:, ::-1]).min(1)
    return GroupOutcomes(
        ipos, ineg, tpos, tneg, text, image, text & image, tied, *margins, np.minimum(*margins)
    )


def multiple_choice(
    scores: Scores, right: Sequence[int] | Integers, *, ties: str = "wrong", ids: Sequence[str] | None = None
) -> ChoiceOutcomes:
    """Credit for choosing the right one of ``k`` options.

    Tie rules, for an item whose highest score is shared by ``m`` options: ``"wrong"`` gives 0 whenever
    ``m > 1`` (SugarCrepe, Winoground); ``"first"`` gives 1 if the right option is the first of them, as
    ``argmax`` does (ARO, NegBench, CLIP_benchmark); ``"share"`` gives 1/m if the right option is among them,
    the expectation of breaking ties at random.

    Arguments: ``scores (n, k)``, finite; ``right`` int ``(n,)``, the index of the right option; ``ties``, a
    rule; ``ids`` of the items, for messages. Raises ValueError for another shape, an index out of range, an
    unknown rule or a non-finite score.

    >>> [multiple_choice([[1.0, 1.0]], [0], ties=rule).credit.tolist() for rule in TIE_RULES]
    [[0.0], [1.0], [0.5]]
    """
    if ties not in TIE_RULES:
        raise ValueError(f"multiple_choice: ties must be one of {TIE_RULES}, got {ties!r}")
    array = as_scores(scores, who="multiple_choice", ids=ids)
    if array.ndim != 2 or array.shape[1] < 2:
        raise ValueError(
            f"multiple_choice: scores must be (items, options) with >= 2 options, got {array.shape}"
        )
    index = np.asarray(right, dtype=np.int64)
    if index.shape != array.shape[:1] or ((index < 0) | (index >= array.shape[1])).any():
        raise ValueError(
            f"multiple_choice: right must hold {len(array)} indices in 0..{array.shape[1] - 1}, "
            f"got shape {index.shape} with values {sorted(set(index.ravel().tolist()))[:8]}"
        )
    rows = np.arange(len(array))
    own = array[rows, index]
    others = array.copy()
    others[rows, index] = -np.inf
    best_other = others.max(1)
    at_top = (array == array.max(1, keepdims=True)).sum(1)
    picked = array.argmax(1)
    won = {"wrong": own > best_other, "first": picked == index, "share": own >= best_other}[ties]
    credit = np.where(won, 1.0 / at_top if ties == "share" else 1.0, 0.0)
    return ChoiceOutcomes(credit, picked, at_top > 1, own - best_other)


def rank_counts(
    scores: Scores, right: Sequence[Collection[int]], *, ids: Sequence[str] | None = None
) -> RankCounts:
    """Where the best right candidate of each query stands among all candidates.

    Arguments: ``scores (n, candidates)``, finite: some queries against *all* candidates (a block of rows);
    ``right``, the indices of each query's right candidates, at least one; ``ids`` of the queries, for
    messages. Raises ValueError for another shape, a query without a right candidate or a non-finite score.

    >>> counts = rank_counts([[0.1, 0.9, 0.9]], [[1]])
    >>> counts.greater.tolist(), counts.equal.tolist()
    ([0], [1])
    """
    array = as_scores(scores, who="rank_counts", ids=ids)
    if array.ndim != 2 or len(right) != len(array):
        raise ValueError(
            f"rank_counts: scores must be (queries, candidates) = ({len(right)}, N), got {array.shape}"
        )
    is_right = np.zeros(array.shape, dtype=bool)
    for row, indices in enumerate(right):
        chosen = np.asarray(sorted(indices), dtype=np.int64)
        if len(chosen) == 0 or chosen[0] < 0 or chosen[-1] >= array.shape[1]:
            raise ValueError(
                f"rank_counts: right candidates of query {ids[row] if ids else row!r} must be indices in "
                f"0..{array.shape[1] - 1}, got {chosen.tolist()[:8]}"
            )
        is_right[row, chosen] = True
    best = np.where(is_right, array, -np.inf).max(1, keepdims=True)
    best_wrong = np.where(is_right, -np.inf, array).max(1, initial=-np.inf)
    return RankCounts(
        ((array > best) & ~is_right).sum(1),
        ((array == best) & ~is_right).sum(1),
        ((array == best) & is_right).sum(1),
        best[:, 0] - best_wrong,
    )


def recall_credit(counts: RankCounts, k: int, *, ties: str = "wrong") -> Floats:
    """Credit ``(n,)`` of each query for having a right candidate among its first ``k``.

    ``"wrong"`` puts every tied wrong candidate in front; ``"share"`` is the chance that a random order of
    the tied ones brings a right one into the first ``k``: ``1 - C(equal, m) / C(equal + right_equal, m)``
    with ``m = k - greater`` places left. Raises ValueError for a ``k`` below 1 or another rule.

    >>> counts = rank_counts([[0.5, 0.5, 0.5, 0.1]], [[0]])
    >>> recall_credit(counts, 2).tolist(), recall_credit(counts, 2, ties="share").round(3).tolist()
    ([0.0], [0.667])
    """
    if k < 1 or ties not in RECALL_TIES:
        raise ValueError(f"recall_credit: wanted k >= 1 and ties of {RECALL_TIES}, got {k}, {ties!r}")
    if ties == "wrong":
        return (counts.greater + counts.equal < k).astype(np.float64)
    places = np.clip(k - counts.greater, 0, counts.equal + counts.right_equal)
    miss = np.ones(len(places), dtype=np.float64)
    # C(e, m) / C(e + r, m) = product over the r right ones of (e + r - m - j) / (e + r - j)
    for step in range(int(counts.right_equal.max(initial=0))):
        tied = counts.equal + counts.right_equal - step
        factor = np.clip(tied - places, 0, None) / np.maximum(tied, 1)
        miss *= np.where(step < counts.right_equal, factor, 1.0)
    return 1.0 - miss


def recall_at_k(
    block: Callable[[slice, slice], Scores],
    right: Sequence[Collection[int]],
    n_candidates: int,
    *,
    ks: Sequence[int] = (1, 5, 10),
    ties: str = "wrong",
    block_values: int = 1 << 22,
) -> dict[int, float]:
    """Recall at several ``k`` without ever holding the whole matrix.

    Arguments
    ---------
    block: gives the scores ``(rows, columns)`` of a slice of queries against a slice of candidates.
    right, n_candidates: the right candidates of each query, and how many candidates there are.
    ks, ties: the cut-offs, and ``"wrong"`` or ``"share"`` as in ``recall_credit``.
    block_values: how many scores are held at once (at least one row of all candidates).

    >>> scores = np.eye(3)
    >>> recall_at_k(lambda rows, columns: scores[rows, columns], [[0], [1], [0]], 3, ks=(1,))[1]
    0.6666666666666666
    """
    if n_candidates < 1 or not right:
        raise ValueError(f"recall_at_k: needs queries and candidates, got {len(right)} and {n_candidates}")
    height = max(1, block_values // n_candidates)
    width = min(n_candidates, block_values)
    credit = {k: 0.0 for k in ks}
    for top in range(0, len(right), height):
        rows = slice(top, min(top + height, len(right)))
        parts = [
            as_scores(block(rows, slice(left, min(left + width, n_candidates))), who="recall_at_k")
            for left in range(0, n_candidates, width)
        ]
        counts = rank_counts(np.concatenate(parts, axis=1), right[rows])
        for k in ks:
            credit[k] += float(recall_credit(counts, k, ties=ties).sum())
    return {k: total / len(right) for k, total in credit.items()}


def macro_average(
    values: ArrayLike, groups: Sequence[str], *, min_count: int = 1, exclude: Collection[str] = ()
) -> float:
    """Plain mean of the means of groups of >= ``min_count`` items, not excluded; ValueError if none is left.

    >>> macro_average([1, 0, 0, 0], ["a", "b", "b", "b"])
    0.5
    """
    means = group_means(values, groups)
    kept = [mean for name, (mean, count) in means.items() if count >= min_count and name not in exclude]
    if not kept:
        raise ValueError(
            f"macro_average: wanted a group of >= {min_count} items not excluded, got none among {len(means)}"
        )
    return float(np.mean(kept))


def group_means(values: ArrayLike, groups: Sequence[str]) -> Mapping[str, tuple[float, int]]:
    """Mean and count of each group, in order of first appearance; ValueError unless values ``(n,)`` fit groups."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (len(groups),):
        raise ValueError(f"group_means: values must be ({len(groups)},) like groups, got {array.shape}")
    members: dict[str, list[int]] = {}
    for row, name in enumerate(groups):
        members.setdefault(name, []).append(row)
    return {name: (float(array[rows].mean()), len(rows)) for name, rows in members.items()}


def bootstrap_interval(
    values: ArrayLike,
    *,
    groups: Sequence[str] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap over items of a mean, or of the plain mean of group means.

    Items of the same value and group are interchangeable, so a resample is one multinomial draw over the
    distinct values: the same distribution as drawing ``n`` items, without their ``resamples × n`` indices. A
    group that a resample misses is left out of its average. Outcomes that are all 0 or all 1 have a
    bootstrap interval of zero width, which says too much: they get Wilson's.

    Arguments: ``values (n,)``, finite, n >= 1; ``groups``, names ``(n,)`` when the statistic is the mean of
    the groups' means; ``level``, the coverage; ``resamples`` and ``seed`` of the draws (the same input gives
    the same interval). Raises ValueError for other values, a level outside 0..1 and fewer than 1 resamples.

    >>> 0.44 < bootstrap_interval([0.0, 1.0] * 200).low < 0.5
    True
    """
    array = as_scores(values, who="bootstrap_interval")
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"bootstrap_interval: values must be (n,) with n >= 1, got {array.shape}")
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"bootstrap_interval: wanted 0 < level < 1, resamples >= 1: {level}, {resamples}")
    names = ["all"] * len(array) if groups is None else groups
    value = macro_average(array, names)
    if array[0] in (0.0, 1.0) and (array == array[0]).all():
        return wilson_interval(int(array.sum()), len(array), level=level)
    codes = np.unique(np.asarray(names), return_inverse=True)[1].astype(np.float64)
    cells, counts = np.unique(np.stack([codes, array], 1), axis=0, return_counts=True)
    n_groups = int(cells[:, 0].max()) + 1
    membership = (cells[:, :1] == np.arange(n_groups)).astype(np.float64)  # (cells, groups)
    statistics = []
    rng = np.random.default_rng(seed)
    rows = max(1, (1 << 22) // len(cells))
    for done in range(0, resamples, rows):
        drawn = rng.multinomial(len(array), counts / counts.sum(), size=min(rows, resamples - done))
        size = drawn @ membership  # (resamples, groups)
        total = drawn @ (membership * cells[:, 1:])
        present = size > 0
        means = np.divide(total, size, out=np.zeros_like(total), where=present)
        statistics.append(means.sum(1) / present.sum(1))
    low, high = np.quantile(np.concatenate(statistics), [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), level)


def wilson_interval(successes: int, n: int, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion, wide even at 0 and 1; ValueError for what is no proportion or level.

    >>> round(wilson_interval(400, 400).low, 4)
    0.9905
    """
    if n < 1 or not 0 <= successes <= n or not 0 < level < 1:
        raise ValueError(
            f"wilson_interval: wanted 0 <= successes <= n, level in 0..1, got {successes}, {n}, {level}"
        )
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)), level)
