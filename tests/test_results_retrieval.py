"""The collection behind the retrieval table: what is right for a caption, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from engine.benchmarks.scenes import percent
from engine.metrics import wilson_interval
from engine.results.retrieval import KINDS, SAID, WORDS, Collection, _table, said_of
from engine.results.scorers import RETRIEVAL, _words_table
from engine.scenes.world import Group


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection(images=64, queries=8, seed=3)


def holds(scene, said, words) -> bool:
    return any(said_of(group, words) == said for group in scene.groups)


def test_a_group_is_what_is_said_of_it():
    group = Group("ring", "red", "small", "glass", 2)
    assert said_of(group, ("color",)) == ("ring", 2, "", "red", "")
    assert said_of(group) == ("ring", 2, "small", "red", "glass")


def test_pictures_and_queries_are_as_many_as_asked_for_and_have_names_of_their_own(collection):
    names = [name for name, *_ in collection.scenes]
    assert len(set(names)) == 64 and {len(queries) for queries in collection.asked().values()} == {8}
    assert tuple(collection.asked()) == KINDS
    first, again = collection.pictures(names[-2:]), Collection(64, 8, seed=3).pictures(names[-2:])
    assert [np.asarray(one).tobytes() for one in first] == [np.asarray(one).tobytes() for one in again]
    assert np.asarray(first[0]).tobytes() != np.asarray(first[1]).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_right_is_a_picture_that_the_caption_is_true_of(collection, kind):
    queries = collection.asked()[kind]
    for query, right in zip(queries, collection.right(queries), strict=True):
        words = next(w for w in (*SAID.values(), WORDS) if sum(map(bool, query.groups[0][2:])) == len(w)
                     and all(query.groups[0][2 + WORDS.index(word)] for word in w))  # fmt: skip
        wanted = {
            name
            for name, scene, *_ in collection.scenes
            if all(holds(scene, said, words) for said in query.groups)
            and not any((group.color, group.shape) == query.absent for group in scene.groups)
        }
        assert right == wanted and right
        assert all(str(said[0]) in query.caption for said in query.groups)


def test_a_pairs_other_picture_is_wrong(collection):
    names = {name for name, *_ in collection.scenes}
    queries = collection.asked()["binding"]
    for query, right in zip(queries, collection.right(queries), strict=True):
        own = [name for name in right if name.endswith(" a")]
        assert any(name[:-1] + "b" in names - right for name in own), query.caption


def test_every_share_has_its_interval():
    shares = {kind: {"first": 20, "ten": 60, "of": 80} for kind in KINDS}
    found = {
        "images": 400, "queries": 80, "segmenter": "rules", "rows": {"sgi": {"shares": shares, "ms": 1.25}},
        "recall": {kind: {"candidates": 0.5, "default": 1.0, "bfloat16": 0.9} for kind in KINDS},
    }  # fmt: skip
    text = _table(found)
    cells = [percent(wilson_interval(count, 80)) for _ in KINDS for count in (20, 60)]
    assert cells[0].startswith("25.0 ± ") and f"| sgi | {' | '.join(cells)} | 1.2 |" in text
    assert "80 captions of each kind" in text and "95 % Wilson interval" in text


def test_recall_of_the_model_has_its_interval_and_its_queries():
    look = {"shape": {"value": 0.5, "low": 0.4, "high": 0.6, "level": 0.95}}
    words = {"seen in training": look, "retrieval": {"image_to_text_r1": 0.994, "text_to_image_r1": 0.986}}
    both = [percent(wilson_interval(count, RETRIEVAL)) for count in (497, 493)]
    text = _words_table(words)
    assert text.endswith(f": {both[0]} image→text, {both[1]} text→image.") and "500 queries each way" in text


def test_a_denial_is_said_and_counts(collection):
    for query in collection.asked()["denial"]:
        assert query.absent is not None and " ".join(query.absent) in query.caption
