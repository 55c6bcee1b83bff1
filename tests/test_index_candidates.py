"""Stage one: structures by FAISS find what a look at all embeddings finds, and never show what is not there."""

from __future__ import annotations

import builtins
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import engine
from engine.features import ImageFeatures
from engine.retrieval import ann, candidates
from engine.retrieval.ann import Structure, check_ann, factory_for
from engine.retrieval.index import Index
from tests.fake_encoder import WIDTH, FakeEncoder

DIM = 16


def clusters(rows: int, dim: int = DIM, seed: int = 0) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    centres = torch.randn(40, dim, generator=make)
    own = centres[torch.randint(40, (rows,), generator=make)] + 0.5 * torch.randn(rows, dim, generator=make)
    return functional.normalize(own, dim=1)


def built(factory: str, vectors: torch.Tensor) -> Structure:
    return Structure.build(factory, *vectors.shape, lambda rows: vectors[torch.from_numpy(rows)])


@pytest.mark.parametrize("factory", ["Flat", "IVF32,SQ8", "IVF32,PQ8x4fs", "HNSW16", "PCA8,IVF16,Flat"])
def test_a_structure_says_what_it_finds_and_finds_it_again_from_its_file(factory: str, tmp_path: Path):
    vectors = clusters(3000)
    made = built(factory, vectors)
    assert made.facts.recall["100"] >= (0.97 if "PCA" not in factory else 0.5)
    assert set(made.facts.recall) == {"10", "100", "1000"} and made.facts.sample == ann.SAMPLE
    made.save(tmp_path)
    data = torch.from_file(str(tmp_path / ann.FILE), size=(tmp_path / ann.FILE).stat().st_size, dtype=torch.uint8)
    again = Structure.load(data, made.facts.as_dict())
    queries = clusters(5, seed=3).numpy()
    for one, other in zip(made.search(queries, 20), again.search(queries, 20), strict=True):
        assert one.tolist() == other.tolist() and len(one) >= 20
    allowed = np.arange(3000) % 9 == 0
    for rows in again.search(queries, 20, allowed=allowed):
        assert len(rows) and allowed[rows].all()


def test_fewer_than_wanted_are_shown_without_minus_one():
    found = built("IVF4,Flat", clusters(200)).search(clusters(2, seed=1).numpy(), 1000)
    assert all((rows >= 0).all() and len(set(rows.tolist())) == len(rows) for rows in found)


class FaissWithGpu:
    """FAISS as a build for GPUs has it; the GPU is the CPU."""

    def __init__(self, knows: bool) -> None:
        import faiss

        self._faiss, self._knows, self.trained = faiss, knows, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._faiss, name)

    def StandardGpuResources(self) -> str:
        return "resources"

    def get_num_gpus(self) -> int:
        return 1

    def index_cpu_to_gpu(self, resources: str, device: int, index: object) -> object:
        assert (resources, device) == ("resources", 0)
        if not self._knows:
            raise RuntimeError("This index type is not implemented on GPU.")
        self.trained += 1
        return index

    def index_gpu_to_cpu(self, index: object) -> object:
        return index


@pytest.mark.parametrize("knows", [True, False])
def test_training_goes_to_a_gpu_where_faiss_finds_one_and_knows_the_kind(knows: bool, monkeypatch):
    module = FaissWithGpu(knows)
    monkeypatch.setattr(ann, "load_faiss", lambda: module)
    vectors = clusters(1000)
    found = built("IVF8,Flat", vectors)
    assert module.trained == int(knows) and found.facts.recall["10"] > 0.9


def test_the_choice_goes_by_size_and_training_is_bounded(monkeypatch: pytest.MonkeyPatch):
    assert factory_for("auto", ann.EXACT_ROWS, 512) is None
    assert factory_for("auto", ann.EXACT_ROWS + 1, 512) == "IVF894,SQ8"
    assert factory_for("auto", 10**9, 100) == "IVF3276,PQ50x4fs"
    assert factory_for("HNSW32", 5, 512) == "HNSW32"
    monkeypatch.setattr(ann, "TRAINING_ROWS", 500)
    assert built("IVF8,Flat", clusters(2000)).facts.trained_rows == 500


def test_a_factory_string_that_faiss_does_not_know_is_refused():
    check_ann("auto", 16)
    with pytest.raises(ValueError, match=r"ann must be 'auto' or a FAISS factory string, got 'IVFFF'"):
        check_ann("IVFFF", 16)
    with pytest.raises(ValueError, match=r"'IVF64,Flat' cannot be trained on 10 rows"):
        built("IVF64,Flat", clusters(10))


def test_without_faiss_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *rest: object, **named: object) -> object:
        if name == "faiss":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'peaksim\[cpu\]'"):
        ann.load_faiss()


def index_of(vectors: torch.Tensor, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> Index:
    """An index of embeddings alone, in which stage one begins at 500 rows."""
    for module in (ann, candidates):
        for name in ("EXACT_ROWS", "FEW_ROWS"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, 500)
    index = Index.create(folder, model=engine.Engine(FakeEncoder()), vectors=(), **options)
    add(index, vectors, 0)
    return index


def add(index: Index, vectors: torch.Tensor, first: int) -> None:
    ids = [f"i{row}" for row in range(first, first + len(vectors))]
    part = [row % 100 for row in range(first, first + len(vectors))]
    index.add(ImageFeatures(vectors, ids=tuple(ids)), metadata={"part": part})


def asked(vectors: torch.Tensor) -> ImageFeatures:
    return ImageFeatures(vectors)


def ids(index: Index, query: torch.Tensor, **options: object) -> list[str]:
    return [hit.id for hit in index.search(asked(query), scorer="global", **options)[0]]


def test_an_index_finds_through_its_structure_what_it_finds_by_looking_at_all(tmp_path, monkeypatch):
    vectors = clusters(2000, WIDTH)
    index = index_of(vectors, tmp_path, monkeypatch)
    facts = index.stats().extras["candidates"]
    assert facts["factory"].startswith("IVF") and facts["recall"]["100"] >= 0.97
    query = clusters(1, WIDTH, seed=9)
    exact = ids(index, query, candidates=None)
    assert ids(index, query, candidates=50) == exact
    # A look into the structure that finds nothing would be made good by looking at all: it must not come to that.
    monkeypatch.setattr(candidates, "scan", None)
    assert ids(index, query, candidates=50) == exact
    assert [hit.stage_one_rank for hit in index.search(asked(query), 3, scorer="global", candidates=50)[0]] == [0, 1, 2]


def test_rows_added_later_and_deleted_ones_are_known(tmp_path, monkeypatch):
    vectors = clusters(2000, WIDTH)
    index = index_of(vectors, tmp_path, monkeypatch)
    query = functional.normalize(vectors[7:8] + 0.01, dim=1)
    assert ids(index, query, candidates=20)[0] == "i7"
    add(index, query, 2000)
    assert index.stats().extras["candidates"]["rows"] == 2000
    assert ids(index, query, candidates=20)[:2] == ["i2000", "i7"]
    index.delete(["i2000", "i7"])
    assert not {"i2000", "i7"} & set(ids(index, query, candidates=20))
    again = Index.open(tmp_path, model=engine.Engine(FakeEncoder()))
    assert ids(again, query, candidates=20) == ids(index, query, candidates=20)
    add(index, clusters(600, WIDTH, seed=5), 3000)
    assert index.stats().extras["candidates"]["rows"] == 2601
    index.compact()
    assert index.stats().extras["candidates"]["rows"] == 2599
    assert ids(index, query, candidates=20) == ids(again, query, candidates=20)


@pytest.mark.parametrize("where", ["part = 3", "part < 60", "part < 2", "id = 'i11'", "part > 100", "true"])
def test_conditions_find_as_many_as_there_are(where, tmp_path, monkeypatch):
    index = index_of(clusters(2000, WIDTH), tmp_path, monkeypatch)
    vectors = clusters(2000, WIDTH)
    query = functional.normalize(vectors[3:4] + vectors[900:901], dim=1)
    found = ids(index, query, k=30, candidates=60, where=where)
    assert len(set(found) - set(ids(index, query, k=30, candidates=None, where=where))) <= 1
    passing = {"part = 3": 20, "part < 2": 40, "id = 'i11'": 1, "part > 100": 0}.get(where, 30)
    assert len(found) == min(30, passing)


@pytest.mark.parametrize("ann", ["PQ4x4fs", "IVF2,Flat,RFlat"])
def test_a_structure_that_cannot_leave_rows_out_is_not_kept_and_is_told(ann, tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match=rf"'{ann}' cannot hold and search 200 rows .*looking at all rows"):
        index = index_of(clusters(200, WIDTH), tmp_path, monkeypatch, ann=ann)
    assert not index.stats().extras
    index.delete(["i3"])
    query = clusters(200, WIDTH)[3:4]
    assert ids(index, query, k=5, candidates=20) == ids(index, query, k=5, candidates=None)


def test_a_named_structure_waits_for_rows_to_train_on_and_says_so(tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match=r"'IVF64,Flat' cannot be trained on 10 rows.*looking at all rows"):
        index = index_of(clusters(10, WIDTH), tmp_path, monkeypatch, ann="IVF64,Flat")
    assert "candidates" not in index.stats().extras
    add(index, clusters(990, WIDTH, seed=2), 10)
    assert index.stats().extras["candidates"]["factory"] == "IVF64,Flat"
    with pytest.raises(ValueError, match="FAISS factory string, got 'nonsense'"):
        Index.create(tmp_path / "other", model=engine.Engine(FakeEncoder()), ann="nonsense")


def test_a_damaged_structure_is_found(tmp_path, monkeypatch):
    index = index_of(clusters(1000, WIDTH), tmp_path, monkeypatch)
    (file,) = (tmp_path / "extras").rglob(ann.FILE)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert any("structure.faiss" in fault for fault in index.verify())
    with pytest.raises(ValueError, match=r"structure\.faiss is damaged"):
        Index.open(tmp_path, model=engine.Engine(FakeEncoder())).search(
            asked(clusters(1, WIDTH)), scorer="global", candidates=20
        )


def test_eight_threads_ask_one_structure(tmp_path, monkeypatch):
    index = index_of(clusters(2000, WIDTH), tmp_path, monkeypatch)
    queries = [clusters(1, WIDTH, seed=seed) for seed in range(20, 36)]
    wanted = [ids(index, query, candidates=20, where="part < 90") for query in queries]
    fresh = Index.open(tmp_path, model=engine.Engine(FakeEncoder()))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: ids(fresh, query, candidates=20, where="part < 90"), queries))
    assert found == wanted


def _in_child(index: Index, query: torch.Tensor, results: object) -> None:
    results.put(ids(index, query, candidates=20))  # type: ignore[attr-defined]


def test_a_forked_child_searches_after_the_parent_used_threads(tmp_path, monkeypatch):
    torch.set_num_threads(2)
    index = index_of(clusters(2000, WIDTH), tmp_path, monkeypatch)
    query = clusters(1, WIDTH, seed=9)
    mine = ids(index, query, candidates=20)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(index, query, results))
    child.start()
    try:
        assert results.get(timeout=60) == mine
    finally:
        child.kill()
        child.join()
        torch.set_num_threads(1)
