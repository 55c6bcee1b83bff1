"""Runs ``peaksim`` in this process, for tests; the model is a small fake."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from engine.benchmarks.official import OFFICIAL
from engine.cli import main
from engine.datasets.sugarcrepe import SUBSETS
from tests.fake_encoder import FakeEncoder, picture

COLOURS = ("red", "green", "blue")


class Shell:
    """Runs commands and keeps what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str | Path) -> int:
        code = main([str(argument) for argument in arguments])
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *arguments: str | Path) -> dict:
        assert self(*arguments, "--json") == 0, self.err
        return json.loads(self.out)


def fake_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A shell in which `--model fake` is the fake encoder."""

    def load_encoder(name: str, *, device: str, dtype: str) -> FakeEncoder:
        if name != "fake":
            raise ValueError(f"load: name must be 'fake', got {name!r}")
        return FakeEncoder()

    monkeypatch.setattr("engine.engine.load_encoder", load_encoder)
    return Shell(capsys)


def _write_winoground(folder: Path) -> None:
    """Two items, of which the fake encoder gets both right."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for number, (first, second) in enumerate((("red", "blue"), ("green", "red"))):
        picture(first).save(folder / "images" / f"ex_{number}_img_0.png")
        picture(second).save(folder / "images" / f"ex_{number}_img_1.png")
        captions = {"caption_0": first, "caption_1": second}
        rows.append({"id": number, **captions, "num_main_preds": 1, "collapsed_tag": "Object"})
    (folder / "examples.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def write_data(root: Path) -> Path:
    """Winoground, SugarCrepe (three items a subset) and NegBench's choices, at the usual places of a data folder."""
    _write_winoground(root / "winoground")
    coco = root / "coco" / "val2017"
    coco.mkdir(parents=True)
    for number, colour in enumerate(COLOURS):
        picture(colour).save(coco / f"{number}.jpg", quality=95)
    (root / "sugarcrepe").mkdir()
    for subset in SUBSETS:
        rows = {
            str(key): {"filename": f"{key}.jpg", "caption": colour, "negative_caption": f"{COLOURS[key - 1]} cube"}
            for key, colour in enumerate(COLOURS)
        }
        (root / "sugarcrepe" / f"{subset}.json").write_text(json.dumps(rows), encoding="utf-8")
    (root / "negbench").mkdir()
    with open(root / OFFICIAL["negbench_mcq"].annotations, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("image_path", "correct_answer", "caption_0", "caption_1", "correct_answer_template"))
        writer.writerow(("data/coco/images/val2017/0.jpg", 0, "red", "no red", "positive"))
    return root
