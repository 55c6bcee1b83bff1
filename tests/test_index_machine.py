"""Whatever is done to an index in whatever order, it answers as a plain dict would."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.retrieval.index import Index
from engine.scorers.global_cosine import GlobalCosine
from tests.index_cases import SPACE, engine, images, texts
from tests.index_faults import Steps, watched

POOL = [f"id {number}" for number in range(12)]
some_ids = st.lists(st.sampled_from(POOL), min_size=1, max_size=5, unique=True)
SCORERS = {"global": GlobalCosine(), "sgi": SPACE}


class IndexMachine(RuleBasedStateMachine):
    """`held` is the model: ids in the order of insertion with the seed of their features and their metadata."""

    @initialize(store=st.sampled_from(["int8", "bf16"]), segment_bytes=st.sampled_from([1, 500, 1 << 20]))
    def create(self, store, segment_bytes):
        self.folder = Path(tempfile.mkdtemp())
        self.waiting = watched(Steps(Path("/nowhere")))
        self.waiting.__enter__()
        self.index = Index.create(
            self.folder / "index", model=engine(), vectors=(SPACE,), store=store, segment_bytes=segment_bytes
        )
        self.held: dict[str, tuple[int, int | None]] = {}

    @rule(ids=some_ids, seed=st.integers(0, 3), tagged=st.booleans())
    def add(self, ids, seed, tagged):
        metadata = {"n": [seed] * len(ids)} if tagged else None
        if any(name in self.held for name in ids):
            with pytest.raises(ValueError, match="is there already"):
                self.index.add(images(ids, seed=seed), metadata=metadata)
            return
        assert self.index.add(images(ids, seed=seed), metadata=metadata).added == len(ids)
        self.held |= {name: (seed, seed if tagged else None) for name in ids}

    @rule(ids=some_ids, seed=st.integers(0, 3))
    def add_what_is_missing(self, ids, seed):
        self.index.add(images(ids, seed=seed), existing="skip")
        self.held |= {name: (seed, None) for name in ids if name not in self.held}

    @rule(ids=some_ids, seed=st.integers(0, 3), tagged=st.booleans())
    def update(self, ids, seed, tagged):
        metadata = {"n": [seed] * len(ids)} if tagged else None
        if any(name not in self.held for name in ids):
            with pytest.raises(KeyError, match="is not there"):
                self.index.update(images(ids, seed=seed), metadata=metadata)
            return
        self.index.update(images(ids, seed=seed), metadata=metadata)
        for name in ids:
            _, before = self.held.pop(name)
            self.held[name] = seed, seed if tagged else before

    @rule(ids=some_ids)
    def delete(self, ids):
        if any(name not in self.held for name in ids):
            with pytest.raises(KeyError, match="is not there"):
                self.index.delete(ids)
            return
        assert self.index.delete(ids) == len(ids)
        for name in ids:
            del self.held[name]

    @rule()
    def compact(self):
        self.index.compact()
        assert self.index.stats().deleted == 0

    @rule()
    def reopen(self):
        assert self.index.verify() == []
        self.index = Index.open(self.index.path, model=engine())

    @rule(scorer=st.sampled_from(sorted(SCORERS)), k=st.integers(1, 15), candidates=st.sampled_from(["auto", None, 50]))
    def search(self, scorer, k, candidates):
        queries = texts(2)
        found = self.index.search(queries, k, scorer=scorer, candidates=candidates)
        ids = list(self.held)
        for query, hits in enumerate(found):
            assert len(hits) == min(k, len(ids))
            if not ids:
                continue
            features = [images([name], seed=self.held[name][0]) for name in ids]
            scores = torch.cat([SCORERS[scorer].matrix(one, queries)[:, query] for one in features])
            wanted = dict(zip(ids, scores.tolist(), strict=True))
            # What is kept is rounded.
            assert all(abs(hit.score - wanted[hit.id]) < 0.03 for hit in hits)
            assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
            assert hits[-1].score >= sorted(wanted.values(), reverse=True)[len(hits) - 1] - 0.03
            for hit, following in itertools.pairwise(hits):
                if hit.score == following.score:
                    assert ids.index(hit.id) < ids.index(following.id)

    @invariant()
    def holds_the_same(self):
        if not hasattr(self, "held"):
            return
        ids = list(self.held)
        assert list(self.index.ids()) == ids and len(self.index) == len(ids)
        rows = self.index.snapshot.find(POOL)
        assert [name for name, row in zip(POOL, rows, strict=True) if row >= 0] == [n for n in POOL if n in self.held]
        if ids:
            own = self.index.snapshot.find(ids)
            wanted = torch.cat([images([name], seed=self.held[name][0]).embedding for name in ids])
            assert torch.equal(self.index.snapshot.embedding(own), wanted)
            if "n" in self.index.snapshot.schema.names:
                found = self.index.snapshot.metadata_of(own).column("n").to_pylist()
                assert found == [tag for _, tag in self.held.values()]

    def teardown(self):
        if hasattr(self, "folder"):
            self.waiting.__exit__(None, None, None)
            shutil.rmtree(self.folder)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
