"""The exact search of an index against brute force over what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.features import TextFeatures
from engine.ops.max_sim_int8 import max_sim_int8
from engine.ops.quantize import quantize
from engine.retrieval.candidates import asking_vectors
from engine.retrieval.index import Index
from engine.retrieval.queries import asked
from engine.retrieval.scan import Asking, scan
from engine.retrieval.stored import features_of
from engine.scorers.global_cosine import GlobalCosine
from engine.scorers.max_sim import MaxSim
from engine.scorers.sgi import SGI
from tests.index_cases import KINDS, SPACE, engine, images, index_at, names, texts

IDS = names(0, 60)


@pytest.fixture(scope="module", params=["int8", "bf16"])
def index(request, tmp_path_factory) -> Index:
    made = index_at(tmp_path_factory.mktemp("index") / request.param, store=request.param)
    made.add(images(IDS))
    assert len(made.snapshot.pieces) > 3
    made.delete([IDS[0], IDS[7], IDS[59]])
    return made


def brute_force(index: Index, queries, scorer, k: int) -> list[list[tuple[str, float]]]:
    """Scores of all rows by the scorer over the vectors that the index keeps, sorted; ties by row."""
    snapshot = index.snapshot
    rows = snapshot.alive.nonzero()[0]
    scores = scorer.matrix(features_of(snapshot, rows), queries).T
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    ids = snapshot.ids(rows)
    return [[(ids[j], float(scores[i, j])) for j in order[i]] for i in range(len(queries))]


@pytest.mark.parametrize("scorer", ["global", "sgi", "max_sim"])
@pytest.mark.parametrize("k", [1, 7, 57, 100])
def test_a_scan_equals_brute_force(index, scorer, k):
    chosen = index.recipe.scorer(scorer)
    queries = texts(5)
    found = index.search(queries, k, scorer=scorer, candidates=None)
    wanted = brute_force(index, queries, chosen, k)
    # Queries are rounded too where vectors are: the order may differ among scores that are nearly equal.
    tolerance = 1e-5 if scorer == "global" else 0.02
    for hits, expected in zip(found, wanted, strict=True):
        assert len(hits) == len(expected) == min(k, 57)
        np.testing.assert_allclose([h.score for h in hits], [score for _, score in expected], atol=tolerance)
        by_id = dict(brute_force(index, queries, chosen, 100)[found.index(hits)])
        for hit in hits:
            assert abs(by_id[hit.id] - hit.score) < tolerance


def test_codes_are_scored_bit_by_bit_as_by_the_op(tmp_path):
    index = index_at(tmp_path, vectors=(SPACE,))
    index.add(images(IDS))
    queries = texts(4)
    late = SPACE.late_queries(queries)
    mask = late.weights != 0
    q = quantize(torch.where(mask[:, :, None], late.vectors, 0.0))
    scores = []
    for row in range(60):
        packed = index.snapshot.gathered("windows", [row])
        bounds = packed.cu_seqlens
        scores.append(max_sim_int8(q, packed.tokens, d_cu_seqlens=bounds, q_mask=mask, q_weights=late.weights))
    wanted = torch.cat(scores, dim=1)
    order = wanted.sort(dim=1, descending=True, stable=True).indices
    for query, found in enumerate(scan(index.snapshot, Asking(late, "int8"), 60)):
        assert found.rows.tolist() == order[query].tolist()
        assert found.scores.tolist() == wanted[query][order[query]].tolist()


@pytest.mark.parametrize("store", ["int8", "bf16"])
def test_images_with_as_many_vectors_each_score_the_same_as_among_others(tmp_path, store):
    even, odd = (index_at(tmp_path / name, store=store) for name in ("even", "odd"))
    features = images(IDS[:20], ragged=False)
    even.add(features)
    odd.add(images(["other"], regions=4))
    odd.add(features)
    queries = texts(3)
    for one, other in zip(
        even.search(queries, 20, scorer="sgi"), odd.search(queries, 21, scorer="sgi"), strict=True
    ):
        assert [(h.id, h.score) for h in one] == [(h.id, h.score) for h in other if h.id != "other"]


@pytest.mark.parametrize("scorer", ["global", "sgi", "max_sim"])
def test_equal_scores_stand_in_the_order_of_insertion(tmp_path, scorer):
    index = index_at(tmp_path)
    same = images(["x"])
    for name in ("d", "b", "a", "c", "e"):
        index.add(same, ids=[name])
    assert [hit.id for hit in index.search(texts(1), 4, scorer=scorer)[0]] == ["d", "b", "a", "c"]
    assert [hit.margin for hit in index.search(texts(1), 4, scorer=scorer)[0]] == [0.0] * 4
    index.update(same, ids=["b"])
    index.compact()
    assert [hit.id for hit in index.search(texts(1), 9, scorer=scorer)[0]] == ["d", "a", "c", "e", "b"]


def test_margins_are_the_distance_to_the_next_also_to_one_that_is_not_shown(index):
    (all_hits,) = index.search(texts(1), 100)
    (few,) = index.search(texts(1), 3)
    assert [hit.id for hit in few] == [hit.id for hit in all_hits[:3]]
    for hit, following in zip(few, all_hits[1:], strict=False):
        assert hit.margin == pytest.approx(hit.score - following.score)
    assert all_hits[-1].margin is None


def test_rows_that_may_be_found_can_be_limited(index):
    allowed = np.zeros(index.snapshot.rows, dtype=bool)
    asking = Asking(SPACE.late_queries(texts(2)), index.recipe.manifest.store)
    for chosen in ([3], [3, 7, 20, 58], list(range(0, 60, 2)), list(range(60))):
        allowed[:] = False
        allowed[chosen] = True
        found = scan(index.snapshot, asking, 60, allowed=allowed)
        alive = [row for row in chosen if row not in (0, 7, 59)]
        full = scan(index.snapshot, asking, 60)
        for one, other in zip(found, full, strict=True):
            assert one.rows.tolist() == [row for row in other.rows.tolist() if row in alive]
            assert one.scores.tolist() == [
                score for row, score in zip(other.rows.tolist(), other.scores.tolist(), strict=True) if row in alive
            ]


def test_candidates_come_first_and_the_scorer_ranks_them(index):
    queries = texts(3)
    exact = index.search(queries, 60, scorer="sgi", candidates=None)
    for candidates in (12, 60):
        found = index.search(queries, 5, scorer="sgi", candidates=candidates)
        # One vector a query asks the global embeddings: the mean of the segments that count.
        pooled = TextFeatures(asking_vectors(asked(queries, SPACE, index.recipe, engine)))
        first = index.search(pooled, candidates, scorer="global", candidates=None)
        for hits, all_hits, one in zip(found, exact, first, strict=True):
            ranks = {hit.id: rank for rank, hit in enumerate(one)}
            wanted = [hit for hit in all_hits if hit.id in ranks][:5]
            assert [hit.id for hit in hits] == [hit.id for hit in wanted]
            # Sums of bfloat16 products may be in another order for one query than for several.
            assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in wanted], abs=1e-6)
            assert [h.stage_one_rank for h in hits] == [ranks[h.id] for h in hits]


@pytest.mark.parametrize("scorer", [SGI(crops="native", exclusive=True), MaxSim(direction="symmetric")])
def test_scorers_that_must_see_both_sides_are_asked_themselves(index, scorer):
    queries = texts(2)
    wanted = brute_force(index, queries, scorer, 5)
    for candidates in (None, 60):
        found = index.search(queries, 5, scorer=scorer, candidates=candidates)
        for hits, expected in zip(found, wanted, strict=True):
            assert [hit.id for hit in hits] == [name for name, _ in expected]
            np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in expected], atol=1e-5)


def test_an_explanation_sums_to_the_score(index):
    for scorer in ("sgi", "global", "max_sim"):
        (hits,) = index.search(texts(1), 3, scorer=scorer, explain=True)
        for hit in hits:
            assert hit.alignment
            assert abs(sum(match.score * match.weight for match in hit.alignment) - hit.score) < 0.02
    boxes = {match.box for hit in index.search(texts(1), 3, explain=True)[0] for match in hit.alignment}
    assert boxes <= {(row, row + 1, row + 2, row + 3) for row in range(4)}
    assert index.search(texts(1), 1)[0][0].alignment is None


def test_pictures_find_themselves(index):
    asking = images(IDS[10:12])
    for scorer in ("global", "sgi", "max_sim"):
        found = index.search(asking, 2, scorer=scorer, explain=True)
        assert [hits[0].id for hits in found] == IDS[10:12]
        assert all(abs(hits[0].score - 1) < 0.02 for hits in found)
        assert all(len(hits[0].alignment) >= 1 for hits in found)


def test_a_soft_maximum_is_scanned_over_bf16_and_refused_over_codes(index):
    soft = MaxSim(temperature=0.1)
    if index.recipe.manifest.store == "int8":
        with pytest.raises(ValueError, match="int8 vectors are scored with the hard maximum"):
            index.search(texts(1), scorer=soft)
        return
    found = index.search(texts(2), 5, scorer=soft)
    for hits, expected in zip(found, brute_force(index, texts(2), soft, 5), strict=True):
        np.testing.assert_allclose([h.score for h in hits], [score for _, score in expected], atol=0.02)


def test_what_is_not_kept_cannot_be_asked(tmp_path):
    bare = index_at(tmp_path / "bare", vectors=())
    bare.add(images(IDS[:3]))
    assert len(bare.search(texts(1), scorer=GlobalCosine())[0]) == 3
    with pytest.raises(ValueError, match=r"needs vectors of kind 'windows', the index was created with none"):
        bare.search(texts(1))
    other = index_at(tmp_path / "windows", vectors=(SPACE,))
    with pytest.raises(ValueError, match=r"keeps windows of the plan scenes/native.*got scenes/rescaled"):
        other.search(texts(1), scorer=SGI(crops="rescaled"))
    assert KINDS[0] == SPACE
