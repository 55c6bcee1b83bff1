"""Heads exported beside the encoder whose features they read: the same scores, and whose head it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine
from engine.encoders.exported import ExportedEncoder
from engine.encoders.onnx_graph import Graph
from engine.export.folder import ExportSettings, export_model
from engine.export.heads import find_head, head_parts
from engine.heads.base import Head
from engine.heads.linear import LinearAlignment
from engine.heads.max_sim_head import MaxSimHead, MaxSimHeadConfig
from engine.heads.peak_patch import PeakPatch, PeakPatchConfig
from engine.heads.registry import load_head
from engine.heads.tfglobal import TFGlobal, TFGlobalConfig
from engine.heads.tflocal import TFLocal, TFLocalConfig
from engine.scenes.items import controlled_items
from engine.scorers.learned import HeadScorer
from engine.scorers.registry import get_scorer
from tests import tiny_scenes
from tests.head_cases import FACTS, make_images, make_texts

HEADS = ("max_sim_head", "peakpatch", "tflocal")


@pytest.fixture(scope="module")
def source() -> engine.Engine:
    return engine.load("scenes", device="cpu", segmenter="rules")


@pytest.fixture(scope="module")
def exported(exported_scenes: Path) -> engine.Engine:
    return engine.load(str(exported_scenes), device="cpu", segmenter="rules")


def items() -> tuple[list, list[str]]:
    made = controlled_items("color", 4, seed=3)
    captions = [caption for item in made for caption in item.captions]
    # Texts of other lengths: heads read as far as the longest reaches.
    return [picture for item in made for picture in item.images()], [*captions[:-1], "ring"]


def torch_scorer(name: str, folder: Path) -> HeadScorer:
    """The scorer with the head that lies in the folder, run by torch."""
    scorer = get_scorer(name)
    assert isinstance(scorer, HeadScorer)
    return replace(scorer, head=str(folder / "heads" / f"{name}.safetensors"))


@pytest.mark.parametrize("name", HEADS)
def test_scores_are_those_of_the_head(name, source, exported, exported_scenes, monkeypatch):
    pictures, captions = items()
    runs: list[str] = []
    plain = Graph.run

    def counted(self: Graph, *inputs: object, **options: object) -> dict[str, Tensor]:
        runs.append(self.signature.file)
        return plain(self, *inputs, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Graph, "run", counted)
    wanted = source.score(pictures, captions, scorer=torch_scorer(name, exported_scenes))
    assert not runs
    # By its name alone: an export brings its own.
    torch.testing.assert_close(exported.score(pictures, captions, scorer=name), wanted, rtol=1e-5, atol=2e-5)
    assert any(file.startswith(f"{name}_") for file in runs)
    pairs = exported.score(pictures, captions, scorer=name, pairs=True)
    torch.testing.assert_close(pairs, wanted.diag(), rtol=1e-5, atol=2e-5)
    for picture, caption in ((pictures[0], captions[0]), (pictures[3], "ring")):
        a = source.explain(picture, caption, scorer=torch_scorer(name, exported_scenes))
        b = exported.explain(picture, caption, scorer=name)
        assert [match.box for match in a.matches] == [match.box for match in b.matches]


def test_a_head_of_ones_own_and_a_named_backend_still_count(exported, exported_scenes, monkeypatch):
    pictures, captions = items()
    images, texts = (
        exported.encode_images(pictures, scorer="peakpatch"), exported.encode_texts(captions, scorer="peakpatch"),
    )  # fmt: skip
    wanted = exported.score(images, texts, scorer="peakpatch")
    monkeypatch.setattr(Graph, "run", lambda *_, **__: pytest.fail("a graph was run"))
    own = exported.score(images, texts, scorer=torch_scorer("peakpatch", exported_scenes))
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-5)
    named = replace(exported.scorer("peakpatch"), backend="reference")
    torch.testing.assert_close(exported.score(images, texts, scorer=named), wanted, rtol=0, atol=1e-5)


def test_without_a_head_in_the_folder_the_shipped_one_is_taken(exported):
    assert isinstance(exported.encoder, ExportedEncoder)
    scorer = exported.scorer("linear")
    assert isinstance(scorer, HeadScorer) and scorer.head is None
    own = exported.scorer("tflocal")
    assert isinstance(own, HeadScorer) and own is not exported.scorer("tflocal")
    assert own.head is exported.scorer("tflocal").head, "read once"


@pytest.mark.parametrize(
    "head",
    [
        TFGlobal.build(FACTS, TFGlobalConfig(layers=1)),
        TFLocal.build(FACTS, TFLocalConfig(layers=1)),
        TFLocal.build(FACTS, TFLocalConfig(layers=2, reach=1)),
        MaxSimHead.build(FACTS, MaxSimHeadConfig(width=8, dim=4, heads=2)),
        *(PeakPatch.build(FACTS, PeakPatchConfig(parts=parts)) for parts in ("both", "ecn", "scn")),
        PeakPatch.build(FACTS, PeakPatchConfig(use_anchor=False)),
        PeakPatch.build(FACTS, PeakPatchConfig(use_pool=False)),
    ],
    ids=lambda head: head.name,
)
def test_the_parts_of_every_head_give_its_scores(head: Head):
    head.eval()
    images, texts = make_images(3), make_texts(3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            # No layer at the start that hides it: PeakPatch begins as no correction at all.
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        if isinstance(head, PeakPatch):
            head.norm_weight.fill_(1.3), head.norm_bias.fill_(0.1), head.projection_bias.fill_(0.02)
            head.projection.copy_(torch.randn(head.projection.shape, generator=generator))
        parts = {part.name: part for part in head_parts("test", head, images, texts)}
        last = list(parts.values())[-1]
        found = dict(zip(last.outputs, last.module(*last.inputs.values()), strict=True))
        if isinstance(head, MaxSimHead):
            (vectors,) = parts["max_sim_head_image"].module(*parts["max_sim_head_image"].inputs.values())
            asking = found["vectors"], found["gates"], found["kept"]
            scores = head.compare(vectors, asking, head.temperature, pairs=True, backend="reference")
        elif isinstance(head, PeakPatch):
            own = (found["text"] * images.embedding).sum(1) if "text" in found else None
            scores = (found["cosine"] + found["correction"]).diag() if own is None else own
        else:
            scores = found["scores"]
        torch.testing.assert_close(scores, head.pairs(images, texts), rtol=1e-5, atol=1e-5)


def test_a_head_without_a_graph_or_of_another_encoder_is_refused(tmp_path, exported_scenes):
    linear = LinearAlignment.build(FACTS)
    with pytest.raises(ValueError, match="tflocal and tfglobal are exported, got linear, which needs no graph"):
        head_parts("test", linear, make_images(2), make_texts(2))
    name = tiny_scenes.write_folder(tmp_path / "tiny")
    with pytest.raises(ValueError, match="must come from the encoder the head was trained on"):
        export_model(name, tmp_path / "out", ExportSettings(heads=("peakpatch",)))
    with pytest.raises(FileNotFoundError, match="nothing: no head of this name is shipped"):
        find_head("nothing", "")
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors is missing"):
        find_head(str(tmp_path / "gone.safetensors"), "")
    # What lies in the folder is a head like any other.
    head = load_head(exported_scenes / "heads" / "tflocal.safetensors")
    assert head.fingerprint == engine.load(str(exported_scenes), device="cpu").spec.fingerprint
