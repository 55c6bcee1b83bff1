"""Scorers that read what an index does not keep: their candidates are encoded again from the pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import engine
from engine.heads.tflocal import TFLocal, TFLocalConfig
from engine.retrieval.index import Index
from engine.retrieval.reencoding import must_encode_again, pictures
from engine.retrieval.sources import Files
from engine.scenes.items import controlled_items
from engine.scorers.max_sim import MaxSim
from engine.scorers.peak_patch import PeakPatchScorer
from engine.scorers.tflocal import TFLocalScorer

CAPTIONS = ["a red circle and a green star", "no large ring"]


@pytest.fixture(scope="module")
def peaksim() -> engine.Engine:
    return engine.load("scenes", segmenter="rules")


@pytest.fixture(scope="module")
def head(peaksim: engine.Engine) -> TFLocal:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = TFLocalConfig(layers=1, width=16, heads=2, mlp=16).fitted(peaksim.spec)
        return TFLocal(config, fingerprint=peaksim.spec.fingerprint).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    root.mkdir()
    for number, item in enumerate(controlled_items("color", 3, seed=1)):
        for side, pixels in enumerate(item.images()):
            Image.fromarray(pixels).save(root / f"{number}{'ab'[side]}.png")
    return root


@pytest.fixture
def index(tmp_path: Path, folder: Path, peaksim: engine.Engine) -> Index:
    made = Index.create(tmp_path / "index", model=peaksim, vectors=())
    made.add(Files.of_folder(folder).batches())
    return made


def expected(peaksim, folder, scorer, caption):
    files = sorted(folder.iterdir())
    scores = peaksim.score(files, [caption], scorer=scorer)[:, 0]
    order = scores.argsort(descending=True, stable=True).tolist()
    return [files[place].name for place in order], scores[order].tolist()


@pytest.mark.parametrize("kind", ["tflocal", "patches", "peakpatch"])
def test_candidates_are_ranked_as_the_engine_ranks_the_pictures(kind, index, folder, peaksim, head):
    scorer = {"tflocal": TFLocalScorer(head=head), "patches": MaxSim(direction="symmetric"),
              "peakpatch": PeakPatchScorer()}[kind]  # fmt: skip
    assert must_encode_again(scorer, index.recipe) == (kind != "peakpatch")
    for caption, hits in zip(CAPTIONS, index.search(CAPTIONS, 6, scorer=scorer, explain=True), strict=True):
        names, scores = expected(peaksim, folder, scorer, caption)
        assert [hit.id for hit in hits] == names
        assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-5)
        wanted = peaksim.explain(folder / names[0], caption, scorer=scorer)
        assert [match.text for match in hits[0].alignment] == [match.text for match in wanted.matches]
        assert [match.box for match in hits[0].alignment] == [match.box for match in wanted.matches]


def test_as_many_candidates_are_looked_at_as_are_asked_for(index, peaksim, head):
    (hits,) = index.search(CAPTIONS[0], 6, scorer=TFLocalScorer(head=head), candidates=2, where="id <> '0a.png'")
    # k more than candidates: as many as were found.
    assert len(hits) == 5
    (hits,) = index.search(CAPTIONS[0], 1, scorer=TFLocalScorer(head=head), candidates=2)
    assert len(hits) == 1 and hits[0].stage_one_rank in (0, 1)


def test_what_cannot_be_encoded_again_is_named(index, folder, peaksim, head):
    scorer = TFLocalScorer(head=head)
    with pytest.raises(ValueError, match=r"tflocal: reads of images what the index does not keep; .*candidates="):
        index.search(CAPTIONS[0], scorer=scorer, candidates=None)
    other = (folder / "0a.png").read_bytes()
    Image.fromarray(np.full((96, 96, 3), 255, dtype=np.uint8)).save(folder / "0a.png")
    with pytest.raises(ValueError, match=r"'0a\.png' is another than the one that was added \(cosine"):
        index.search(CAPTIONS[0], scorer=scorer)
    (folder / "0a.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"reads layer \d+ of the images.*cannot be read any more"):
        index.search(CAPTIONS[0], scorer=scorer)
    (folder / "0a.png").unlink()
    with pytest.raises(ValueError, match=r"the picture of '0a\.png' is not where its column 'path' or its id says"):
        index.search(CAPTIONS[0], scorer=scorer)
    assert [found is None for found in pictures(index.snapshot, [0, 1])] == [True, False]
    (folder / "0a.png").write_bytes(other)
    assert len(index.search(CAPTIONS[0], scorer=scorer)[0]) == 6


def test_features_alone_have_no_pictures(tmp_path, peaksim, head):
    index = Index.create(tmp_path / "features", model=peaksim, vectors=())
    index.add(peaksim.encode_images([Image.new("RGB", (96, 96), "red")], ids=["a thing"]))
    with pytest.raises(ValueError, match="the picture of 'a thing' is not where"):
        index.search("red", scorer=TFLocalScorer(head=head))
