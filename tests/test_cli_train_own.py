"""`peaksim train` on one's own pictures: each format, each kind of negatives, models of other libraries, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.heads.registry import load_head
from tests import tiny_open_clip, tiny_transformers
from tests.captioned_files import sample, write_coco, write_shard, write_trohn
from tests.command_line import Shell

# The tiny tokenizer of transformers knows letters alone: captions are longer than the context.
pytestmark = pytest.mark.filterwarnings("ignore:encode_texts. longer than the model's context")


@pytest.fixture(scope="module")
def open_clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"open_clip:{tiny_open_clip.write_folder(tmp_path_factory.mktemp('tiny') / 'clip', 'clip')}"


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{tiny_transformers.write_folder(tmp_path_factory.mktemp('tiny') / 'siglip2', 'siglip2')}"


class Own:
    """Calls of `peaksim train` with small settings in one folder."""

    def __init__(self, shell: Shell, folder: Path) -> None:
        self.shell, self.folder = shell, folder
        captions, images, instances = write_coco(folder / "coco", 12)
        rows, pictures, others = write_trohn(folder / "trohn", 12)
        self.coco = ("--data", f"coco:{captions}", "--images", images)
        self.labelled = (*self.coco, "--instances", instances)
        self.trohn = ("--data", f"trohn:{rows}", "--images", pictures, "--negative-images", others)
        write_shard(folder / "shards" / "1.tar", {k: v for row in range(6) for k, v in sample(str(row), row).items()})
        self.shards = ("--data", f"webdataset:{folder / 'shards' / '*.tar'}")

    def call(self, kind: str, model: str, *more: str | Path) -> list[str | Path]:
        small = ("--steps", "2", "--batch-size", "2", "--log-every", "1", "--warmup-steps", "0")
        folders = ("--features", self.folder / "features", "--output", self.folder / "run")
        return ["train", kind, "--model", model, *small, *folders, *more]

    def train(self, kind: str, model: str, *more: str | Path) -> list[dict[str, float]]:
        """The lines of the log."""
        told = self.shell.json(*self.call(kind, model, *more))
        assert load_head(told["head"]).name == told["scorer"]
        return [json.loads(line) for line in (self.folder / "run" / "log.jsonl").read_text().splitlines()][1:]

    def refused(self, kind: str, model: str, *more: str | Path) -> str:
        assert self.shell(*self.call(kind, model, *more)) == 2
        return self.shell.err.splitlines()[-1]


@pytest.fixture
def own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Own:
    return Own(Shell(capsys), tmp_path)


@pytest.mark.parametrize("kind", ["max_sim_head", "tflocal", "tfglobal", "linear"])
def test_every_head_is_trained_on_pairs_of_pictures(own, open_clip, kind):
    log = own.train(kind, open_clip, *own.trohn)
    assert [line["step"] for line in log] == [1, 2]
    # One of twelve is held out.
    assert {"found", "over_negative", "group"} <= set(log[-1]) and "peaksim: 12 items" in own.shell.err
    assert "features of images: 24/24" in own.shell.err
    assert f"loss: {'captions' if kind == 'linear' else 'quads'}" in own.shell.err
    # A second call finds everything done.
    own.train(kind, open_clip, *own.trohn)
    assert "features of" not in own.shell.err


@pytest.mark.parametrize(
    ("data", "more", "figures"),
    [
        ("coco", ("--loss", "auto"), {"found"}),
        ("coco", ("--loss", "captions", "--negatives", "swaps"), {"found", "over_negative"}),
        ("coco", ("--loss", "captions", "--negatives", "negation"), {"found", "over_negative"}),
        ("labelled", ("--loss", "captions", "--negatives", "negation"), {"found", "over_negative"}),
        ("trohn", ("--loss", "batch", "--negatives", "none"), {"found"}),
        ("trohn", ("--loss", "pairs"), {"found", "over_negative", "group"}),
        ("shards", ("--loss", "batch"), set()),
    ],
)
def test_data_and_negatives_go_with_their_losses(own, transformers, data, more, figures):
    log = own.train("linear", transformers, *getattr(own, data), *more)
    plain = {"loss", "gradient", "rate", "scale", "step", "items", "seconds"}
    assert set(log[-1]) - plain == figures


def test_scenes_with_denials(own):
    log = own.train("linear", "scenes", "--negatives", "negation", "--items", "24", "--loss", "captions")
    assert "over_negative" in log[-1] and "features of images: 24/24" in own.shell.err
    other = ("--negatives", "negation", "--items", "24", "--loss", "captions", "--wordings", "held_out")
    assert "was written with other settings" in own.refused("linear", "scenes", *other)


def test_no_denial_need_be_held_out(own):
    small = ("--negatives", "negation", "--items", "24", "--loss", "captions", "--figure-items", "0")
    assert "over_negative" not in own.train("linear", "scenes", *small)[-1]


def test_broken_pictures_are_named_and_left_out(own, open_clip):
    images = own.folder / "coco" / "images"
    for key in (3, 4):
        (images / f"{key:012d}.png").write_bytes(b"broken")
    (images / "000000000005.png").unlink()
    own.train("linear", open_clip, *own.coco, "--loss", "batch", "--skip-figures")
    said = own.shell.err
    assert "11 items" in said and f"left out {images}/000000000005.png: there is no such file" in said
    assert f"left out {images / '000000000003.png'}: this is not an image in a format that can be read" in said
    # Nine pictures are left: more than that make no batch.
    again = own.call("linear", open_clip, *own.coco, "--loss", "batch", "--skip-figures")
    again[again.index("--batch-size") + 1] = "11"
    again[again.index("--output") + 1] = own.folder / "again"
    assert own.shell(*again) == 2 and "a batch of 11 needs as many items, got 9" in own.shell.err


def test_ecn_and_scn_are_trained_on_models_of_other_libraries(own, open_clip, transformers):
    for kind, model in (("ecn", open_clip), ("scn", transformers), ("peakpatch", transformers)):
        call = own.call(kind, model, *own.labelled, "--skip-figures", "--pretraining-steps", "1")
        call[call.index("--output") + 1] = own.folder / kind
        assert load_head(own.shell.json(*call)["head"]).name == "peakpatch"


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        ("coco", ("--loss", "quads"), "needs 2 images and 2 texts an item, got 1 and 1; these data fit auto"),
        ("coco", ("--negatives", "file"), "there must be at least one item to train on, got none"),
        ("shards", ("--images", "x"), "--images: webdataset has no use for it"),
        ("trohn", ("--instances", "x"), "--instances: trohn has no use for it"),
        ("none", ("--data", "coco:x.json"), "--images: coco needs the folder of its pictures"),
        ("none", ("--data", "coco"), "--data: must be scenes, coco:FILE.json, trohn:FILE.csv or webdataset:PATTERN"),
        ("none", ("--images", "x"), "--images: goes with data of your own"),
        ("none", ("--negatives", "swaps"), "--negatives: scenes have auto (their quads) or negation, got swaps"),
    ],
)
def test_what_does_not_go_together_is_one_line(own, data, more, message):
    assert message in own.refused("max_sim_head", "scenes", *getattr(own, data, ()), *more)
