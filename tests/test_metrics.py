"""Metrics against plain loops, hand-made cases, and laws."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.metrics import (
    TIE_RULES,
    as_scores,
    bootstrap_interval,
    group_means,
    group_scores,
    macro_average,
    multiple_choice,
    rank_counts,
    recall_at_k,
    recall_credit,
    wilson_interval,
)

# Few values, so that ties come up.
small = st.integers(-2, 2).map(float)
quads = st.lists(st.tuples(small, small, small, small), min_size=1, max_size=20)


def as_quads(rows: list[tuple[float, float, float, float]]) -> np.ndarray:
    return np.array(rows, dtype=np.float64).reshape(-1, 2, 2)


@given(quads)
def test_group_scores_equal_the_definition_written_out(rows):
    scores = as_quads(rows)
    outcome = group_scores(scores)
    for row, s in enumerate(scores):  # s[image, text]
        ipos, ineg = s[0, 0] > s[0, 1], s[1, 1] > s[1, 0]
        tpos, tneg = s[0, 0] > s[1, 0], s[1, 1] > s[0, 1]
        assert outcome.ipos_2t[row] == ipos and outcome.ineg_2t[row] == ineg
        assert outcome.tpos_2i[row] == tpos and outcome.tneg_2i[row] == tneg
        assert outcome.text[row] == (ipos and ineg) and outcome.image[row] == (tpos and tneg)
        assert outcome.group[row] == (ipos and ineg and tpos and tneg)
        assert outcome.tied[row] == (s[0, 0] in (s[0, 1], s[1, 0]) or s[1, 1] in (s[1, 0], s[0, 1]))


@given(quads)
def test_margins_are_positive_exactly_where_the_outcome_is_right(rows):
    outcome = group_scores(as_quads(rows))
    assert ((outcome.text_margin > 0) == outcome.text).all()
    assert ((outcome.image_margin > 0) == outcome.image).all()
    assert ((outcome.margin > 0) == outcome.group).all()


@given(quads)
def test_group_score_does_not_care_which_pair_comes_first(rows):
    scores = as_quads(rows)
    assert (group_scores(scores).group == group_scores(scores[:, ::-1, ::-1]).group).all()


@given(quads)
def test_transposing_swaps_text_and_image_score(rows):
    scores = as_quads(rows)
    outcome, turned = group_scores(scores), group_scores(scores.transpose(0, 2, 1))
    assert (outcome.text == turned.image).all() and (outcome.image == turned.text).all()


def test_chance_is_a_quarter_a_quarter_and_a_sixth_over_all_orders():
    orders = np.array(list(permutations(range(4))), dtype=np.float64).reshape(-1, 2, 2)
    outcome = group_scores(orders)
    assert outcome.text.mean() == outcome.image.mean() == 1 / 4
    assert outcome.group.mean() == 1 / 6


def test_constant_scores_win_nothing_and_tie_everywhere():
    outcome = group_scores(torch.full((5, 2, 2), 0.25))
    assert not outcome.group.any() and not outcome.text.any() and not outcome.image.any()
    assert outcome.tied.all() and (outcome.margin == 0).all()


def test_a_coarse_dtype_keeps_its_ties_and_a_fine_one_its_differences():
    fine = torch.tensor([[[0.2501, 0.25], [0.25, 0.2501]]], dtype=torch.float32)
    assert group_scores(fine).group.all()
    assert group_scores(fine.to(torch.bfloat16)).tied.all()


@pytest.mark.parametrize("shape", [(2, 2), (3, 2, 3), (0,)])
def test_group_scores_refuse_another_shape(shape):
    with pytest.raises(ValueError, match=r"group_scores: scores must be .* \(n, 2, 2\), got"):
        group_scores(np.zeros(shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_not_finite_names_its_item(value):
    scores = np.zeros((3, 2, 2))
    scores[1, 0, 1] = value
    with pytest.raises(ValueError, match=r"scores must be finite, got .* for item 'b' at \(0, 1\)"):
        group_scores(scores, ids=["a", "b", "c"])
    with pytest.raises(ValueError, match="for item 1 at"):
        group_scores(scores)


def test_ids_must_fit_the_scores():
    with pytest.raises(ValueError, match="ids must name each of"):
        as_scores([1.0, 2.0], ids=["a"])


@given(st.lists(st.lists(small, min_size=4, max_size=4), min_size=1, max_size=20), st.data())
def test_choice_equals_the_rules_written_out(rows, data):
    right = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    outcomes = {rule: multiple_choice(rows, right, ties=rule) for rule in TIE_RULES}
    for row, (scores, index) in enumerate(zip(rows, right, strict=True)):
        top = [option for option, score in enumerate(scores) if score == max(scores)]
        assert outcomes["wrong"].credit[row] == (top == [index])
        assert outcomes["first"].credit[row] == (top[0] == index)
        assert outcomes["share"].credit[row] == pytest.approx((index in top) / len(top))
        assert outcomes["wrong"].picked[row] == top[0]
        assert outcomes["wrong"].tied[row] == (len(top) > 1)
        assert (outcomes["wrong"].margin[row] > 0) == (top == [index])


def test_choice_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match="ties must be one of"):
        multiple_choice([[1.0, 2.0]], [0], ties="random")
    with pytest.raises(ValueError, match="with >= 2 options"):
        multiple_choice([[1.0]], [0])
    with pytest.raises(ValueError, match=r"right must hold 1 indices in 0\.\.1, got .* \[2\]"):
        multiple_choice([[1.0, 2.0]], [2])
    with pytest.raises(ValueError, match="item 'x'"):
        multiple_choice([[1.0, float("nan")]], [0], ids=["x"])


def recall_by_loop(scores: np.ndarray, right: list[list[int]], k: int) -> float:
    """Share of rows whose best right candidate has fewer than k wrong ones at or above it."""
    hits = 0
    for row, own in enumerate(right):
        best = max(scores[row, column] for column in own)
        ahead = [c for c in range(scores.shape[1]) if c not in own and scores[row, c] >= best]
        hits += len(ahead) < k
    return hits / len(right)


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**32 - 1), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_blocked_recall_equals_the_loop_over_the_full_matrix(rows, columns, seed, block_values):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (rows, columns)).astype(np.float64)
    right = [sorted(set(rng.integers(0, columns, rng.integers(1, 4)).tolist())) for _ in range(rows)]
    largest = []

    def block(r: slice, c: slice) -> np.ndarray:
        largest.append(scores[r, c].size)
        return scores[r, c]

    found = recall_at_k(block, right, columns, ks=(1, 2, 5), block_values=block_values)
    assert found == {k: pytest.approx(recall_by_loop(scores, right, k)) for k in (1, 2, 5)}
    assert max(largest) <= max(block_values, 1)


@given(st.lists(small, min_size=2, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_shared_recall_is_the_mean_over_all_orders_of_the_tied(scores, data):
    right = data.draw(st.sets(st.integers(0, len(scores) - 1), min_size=1))
    k = data.draw(st.integers(1, 6))
    hits = []
    for order in permutations(range(len(scores))):
        ranked = sorted(order, key=lambda column: -scores[column])  # stable: ties in this order
        hits.append(any(column in right for column in ranked[:k]))
    counts = rank_counts([scores], [right])
    assert recall_credit(counts, k, ties="share")[0] == pytest.approx(np.mean(hits))


def test_recall_of_a_constant_is_nothing_and_its_share_is_k_in_n():
    counts = rank_counts(np.zeros((3, 20)), [[0], [7], [19]])
    assert recall_credit(counts, 5).tolist() == [0, 0, 0]
    assert recall_credit(counts, 5, ties="share") == pytest.approx([0.25] * 3)
    assert counts.margin.tolist() == [0, 0, 0]


def test_recall_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match=r"candidates of query 'q' must be indices in 0\.\.1, got \[\]"):
        rank_counts([[1.0, 2.0]], [[]], ids=["q"])
    with pytest.raises(ValueError, match=r"must be \(queries, candidates\) = \(2, N\)"):
        rank_counts([[1.0, 2.0]], [[0], [1]])
    with pytest.raises(ValueError, match="wanted k >= 1"):
        recall_credit(rank_counts([[1.0, 2.0]], [[0]]), 0)
    with pytest.raises(ValueError, match="needs queries and candidates"):
        recall_at_k(lambda r, c: np.zeros((1, 1)), [], 1)


def test_macro_average_leaves_out_small_and_excluded_groups():
    values, groups = [1, 1, 0, 0, 0, 1], ["a", "a", "b", "b", "c", "d"]
    assert macro_average(values, groups) == pytest.approx((1 + 0 + 0 + 1) / 4)
    assert macro_average(values, groups, min_count=2) == pytest.approx(1 / 2)
    assert macro_average(values, groups, exclude={"a", "d"}) == 0
    assert next(iter(group_means(values, groups).items())) == ("a", (1.0, 2))
    with pytest.raises(ValueError, match="wanted a group of >= 3 items"):
        macro_average(values, groups, min_count=3)
    with pytest.raises(ValueError, match=r"values must be \(2,\) like groups"):
        macro_average([1], ["a", "b"])


def test_bootstrap_has_the_spread_of_the_mean_and_repeats_itself():
    rng = np.random.default_rng(3)
    values = (rng.random(400) < 0.3).astype(float)
    found = bootstrap_interval(values, resamples=4000)
    half = 1.96 * np.sqrt(values.mean() * (1 - values.mean()) / 400)
    assert found.value == values.mean()
    assert found.high - found.low == pytest.approx(2 * half, rel=0.08)
    assert found == bootstrap_interval(values, resamples=4000)
    few = [bootstrap_interval(values, resamples=20, seed=seed) for seed in range(5)]
    assert len(set(few)) > 1


def test_bootstrap_by_distinct_values_equals_drawing_the_items():
    rng = np.random.default_rng(0)
    values = rng.choice([0.0, 0.5, 1.0], 60)
    groups = rng.choice(["a", "b", "c"], 60).tolist()
    drawn = []
    for _ in range(4000):
        rows = rng.integers(0, 60, 60)
        drawn.append(macro_average(values[rows], [groups[row] for row in rows]))
    found = bootstrap_interval(values, groups=groups, resamples=4000)
    assert found.value == pytest.approx(macro_average(values, groups))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.02)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(11)
    inside = 0
    for trial in range(200):
        found = bootstrap_interval((rng.random(150) < 0.4).astype(float), resamples=400, seed=trial)
        inside += found.low <= 0.4 <= found.high
    assert 0.88 <= inside / 200 <= 0.99


def test_outcomes_without_variation_get_an_interval_with_width():
    assert bootstrap_interval(np.ones(30)) == wilson_interval(30, 30)
    assert bootstrap_interval(np.zeros(30), groups=["a", "b"] * 15).high == wilson_interval(0, 30).high


def test_wilson_known_values_and_bounds():
    found = wilson_interval(7, 20)  # Wilson 1927 by hand: (0.1812, 0.5671)
    assert (found.low, found.high) == pytest.approx((0.1812, 0.5671), abs=1e-4)
    assert wilson_interval(0, 5).low == 0.0 and wilson_interval(5, 5).high == 1.0
    with pytest.raises(ValueError, match="wanted 0 <= successes <= n"):
        wilson_interval(6, 5)


def test_bootstrap_refuses_what_has_no_interval():
    with pytest.raises(ValueError, match=r"values must be \(n,\) with n >= 1"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="wanted 0 < level < 1"):
        bootstrap_interval([1.0], level=1.0)
    with pytest.raises(ValueError, match="must be finite"):
        bootstrap_interval([float("nan")])
