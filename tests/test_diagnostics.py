"""Curves by layer, on features and weights made so that the answer is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.diagnostics.changes import CHANGES, CONTROLS, Change, ChangeSet, read_changes, scene_changes
from engine.diagnostics.layers import (
    alignments,
    diagnose_layers,
    layer_distances,
    layer_embeddings,
    make_curve,
    other_pictures,
)
from engine.diagnostics.plots import plot_layers
from engine.encoders.scenes import ScenesEncoder
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine
from engine.features import TextFeatures, TextReadout
from engine.training.scenes import VOCABULARY
from tests.command_line import Shell

# Orthogonal, of mean 0 and variance 1: a layer norm leaves them, and what turns between them, as they are.
U, V = torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
IDENTITY = TextReadout(torch.ones(4), torch.zeros(4), None, norm_eps=0.0)
LAYERS = 5


def turned(angle: float) -> torch.Tensor:
    return math.cos(angle) * U + math.sin(angle) * V


def captions(angles: list[list[float]]) -> TextFeatures:
    """One caption a row of `angles`, its end state at layer l + 1 turned by the l-th of them."""
    states = torch.stack([torch.stack([turned(a) for a in row]) for row in angles])  # (n, layers, 4)
    noise = torch.randn(len(angles), 2, 4)
    hidden = {layer + 1: torch.cat([noise, states[:, layer, None]], dim=1) for layer in range(states.shape[1])}
    return TextFeatures(states[:, -1] / 2, end=torch.full((len(angles),), 2), hidden=hidden)


def tiny(late: float = 0.0) -> Engine:
    """A random model; from layer 4 on every state is drowned by `late` times one and the same vector."""
    torch.manual_seed(0)
    sizes = ScenesModelConfig(
        width=32, heads=2, image_layers=1, text_layers=LAYERS, stem_width=8, embed_dim=16
    )
    model = ScenesModel(sizes)
    with torch.no_grad():
        for weight in model.text.parameters():
            if weight.ndim >= 2:
                weight.mul_(4)
        same = torch.randn(32)
        for block in model.text.blocks[3:]:
            block.down.bias.copy_(late * same)
        if late:
            # Pictures all look like that one vector.
            model.image.projection.weight.zero_()
            direction = model.text.projection(model.text.norm(same))
            model.image.projection.weight[:, 0] = direction
            model.image.norm.weight.zero_()
            model.image.norm.bias.fill_(1.0)
    return Engine(ScenesEncoder(model, VOCABULARY, name="tiny", device=torch.device("cpu")))


def test_distances_are_those_of_the_turns():
    first = captions([[0.0, 0.0, 0.0], [0.4, 0.4, 0.4]])
    second = captions([[0.2, 0.9, 0.1], [0.6, 1.3, 0.5]])
    sides = (layer_embeddings(side, IDENTITY, (1, 2, 3)) for side in (first, second))
    wanted = torch.tensor([[1 - math.cos(a)] * 2 for a in (0.2, 0.9, 0.1)])
    torch.testing.assert_close(layer_distances(*sides), wanted, atol=1e-6, rtol=0)


def test_alignment_is_with_ones_own_picture_and_over_another():
    texts = layer_embeddings(captions([[0.0], [1.0]]), IDENTITY, (1,))
    images = torch.stack([turned(0.5), turned(1.0)]) / 2
    own, gap = alignments(texts, images, [1, 0])
    torch.testing.assert_close(own, torch.tensor([[math.cos(0.5), 1.0]]))
    torch.testing.assert_close(gap, torch.tensor([[math.cos(0.5) - math.cos(1.0), 1 - math.cos(0.5)]]))
    own, gap = alignments(texts, images, [-1, 0])
    assert own.shape == (1, 2)
    torch.testing.assert_close(gap, torch.tensor([[1 - math.cos(0.5)]]))


def test_chance_is_with_another_picture_that_the_caption_does_not_have():
    one, two, three = Path("1"), Path("2"), Path("3")
    assert other_pictures("abcd", [one, one, two, two]) == [2, 2, 0, 0]
    # Caption a has two pictures, b and c have the third one both.
    assert other_pictures("aabc", [one, two, three, three]) == [2, 2, 0, 0]
    assert other_pictures("ab", [one, one]) == [-1, -1]
    assert other_pictures("aab", [one, two, one]) == [-1, -1, 1]
    pixels = np.zeros((2, 2, 3), np.uint8)
    assert other_pictures("abc", [pixels, pixels, pixels]) == [1, 2, 0]


def test_the_end_token_alone_is_read():
    features = captions([[0.3, 0.7]])
    copied = {layer: state.clone() for layer, state in features.hidden.items()}
    other = TextFeatures(features.embedding, end=features.end, hidden=copied)
    for state in other.hidden.values():
        state[:, :2] = 9
    both = [layer_embeddings(side, IDENTITY, (1, 2)) for side in (features, other)]
    torch.testing.assert_close(*both)
    with pytest.raises(ValueError, match="texts must hold end, got None"):
        layer_embeddings(TextFeatures(features.embedding), IDENTITY, ())


def test_intervals_hold_the_mean_and_widen_with_spread():
    torch.manual_seed(0)
    found = make_curve("negation", "change", torch.stack([0.5 + 0.01 * torch.randn(50), 0.5 + torch.randn(50)]))
    narrow, wide = found.values
    assert narrow.low < narrow.value < narrow.high < narrow.low + 0.02
    assert wide.high - wide.low > 20 * (narrow.high - narrow.low) and found.count == 50
    assert make_curve("a", "change", torch.tensor([[0.1, 0.1], [0.4, 0.4], [0.2, 0.2]])).top == 2


def test_a_tower_whose_last_layers_drown_the_words_is_found_out():
    data = scene_changes(24, seed=1)
    found = diagnose_layers(tiny(late=200.0), data)
    contrast = found.curve("negation").means
    assert found.peak <= 3 and found.collapse.low > 0
    assert contrast[-1] < 0.1 * contrast[found.peak - 1]
    aligned = found.curve("visual alignment").means
    assert aligned[-1] > 0.95 and aligned[-1] > max(aligned[:3]) + 0.1
    assert abs(found.curve("alignment over chance").means[-1]) < 0.05
    assert f"peaks at layer {found.peak} and loses" in found.verdict()


def test_a_tower_that_keeps_them_is_not_accused():
    found = diagnose_layers(tiny(), scene_changes(24, seed=1))
    assert found.peak == LAYERS and found.collapse.value == 0 and found.anchor == round(LAYERS * 6 / 8)
    assert "not lost by the end" in found.verdict()
    json.dumps(found.to_dict(), allow_nan=False)
    with pytest.raises(KeyError, match="no curve of 'rhyme'"):
        found.curve("rhyme")


def test_scene_changes_change_what_they_say():
    data = scene_changes(12, seed=3)
    assert set(data.kinds) == {*CHANGES, *CONTROLS} and data.kinds[-len(CONTROLS) :][0] in CONTROLS
    by_kind = {kind: [c for c in data.changes if c.kind == kind] for kind in data.kinds}
    assert all(len(pairs) == 12 for pairs in by_kind.values()) and len(data.images) == 12

    def words(text: str) -> list[str]:
        return sorted(text.split())

    for kind in ("color swap", "size swap", "material swap", "word order"):
        assert all(c.text != c.changed and words(c.text) == words(c.changed) for c in by_kind[kind])
    for kind in ("negation", "existence"):
        assert all(len(c.text.split()) == len(c.changed.split()) for c in by_kind[kind])
        assert all(" no " in c.changed and " no " not in c.text for c in by_kind[kind])
    for denial, filler in zip(by_kind["denial"], by_kind["filler"], strict=True):
        assert denial.text == filler.text and len(denial.changed.split()) == len(filler.changed.split())
    assert all(c.text != c.changed for c in data.changes)
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    for c in by_kind["relation"]:
        assert [opposite.get(word, word) for word in c.text.split()] == c.changed.split()
    with pytest.raises(ValueError, match="n must be at least 2, got 1"):
        scene_changes(1)


def test_changes_of_ones_own(tmp_path):
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    file = tmp_path / "pairs.csv"
    file.write_text('kind,text,changed,image\nnegation,"a red circle","no red circle",red.png\nrhyme,a ring,a moon,\n')
    data = read_changes(file)
    assert data.changes == (Change("negation", "a red circle", "no red circle"), Change("rhyme", "a ring", "a moon"))
    assert data.images == (tmp_path / "red.png",) and data.captions == ("a red circle",)
    found = diagnose_layers(tiny(), data)
    assert [(curve.name, curve.role) for curve in found.curves][:2] == [("negation", "change"), ("rhyme", "change")]
    file.write_text("kind,text\nnegation,a\n")
    with pytest.raises(ValueError, match=r"pairs\.csv must have columns \['kind', 'text', 'changed'\], got"):
        read_changes(file)
    file.write_text("kind,text,changed\nnegation,a,b\nnegation,a,\n")
    with pytest.raises(ValueError, match=r"read_changes: .*pairs\.csv row 2: changed is empty"):
        read_changes(file)
    file.write_bytes(b"kind,text,changed\nnegation,caf\xe9,b\n")
    with pytest.raises(ValueError, match=r"pairs\.csv line 2 must be UTF-8, got byte 0xe9"):
        read_changes(file)
    file.write_bytes(b"\xef\xbb\xbfkind,text,changed\nnegation,a,b\n")
    assert read_changes(file).changes == (Change("negation", "a", "b"),)
    file.write_text("kind,text,changed\n")
    with pytest.raises(ValueError, match="must hold at least one pair"):
        read_changes(file)
    file.write_text("kind,text,changed\nrhyme,a ring,a moon\n")
    quiet = diagnose_layers(tiny(), read_changes(file))
    assert quiet.peak == 0 and quiet.collapse is None and "no layers are proposed" in quiet.verdict()
    with pytest.raises(ValueError, match="captions and images must be as many, got 1 and 0"):
        ChangeSet((Change("a", "b", "c"),), ("b",))
    with pytest.raises(ValueError, match="at least one pair of captions, got none"):
        ChangeSet(())


def test_pictures_of_several_kinds_of_change_count_once(tmp_path):
    for name, color in (("red", "red"), ("blue", "blue")):
        Image.new("RGB", (8, 8), color).save(tmp_path / f"{name}.png")
    file = tmp_path / "pairs.csv"
    rows = [f"{kind},a {name} circle,no {name} circle,{name}.png" for name in ("red", "blue") for kind in "abc"]
    file.write_text("\n".join(["kind,text,changed,image", *rows]))
    data = read_changes(file)
    assert data.captions == ("a red circle", "a blue circle") and len(data.changes) == 6
    engine = tiny()
    found = diagnose_layers(engine, data)
    gap = found.curve("alignment over chance")
    assert (found.curve("visual alignment").count, gap.count) == (2, 2)
    scores = engine.score(list(data.images), list(data.captions))
    wanted = float(scores[0, 0] + scores[1, 1] - scores[0, 1] - scores[1, 0]) / 2
    assert gap.means[-1] == pytest.approx(wanted, abs=1e-5) and abs(wanted) > 1e-4
    # Of one picture there is no other.
    file.write_text("\n".join(["kind,text,changed,image", *rows[:3]]))
    alone = diagnose_layers(engine, read_changes(file))
    assert [curve.name for curve in alone.curves if curve.role == "alignment"] == ["visual alignment"]


def test_a_plot_that_is_stopped_leaves_the_old_one(tmp_path, monkeypatch):
    found = diagnose_layers(tiny(), scene_changes(4))
    (tmp_path / "layers.png").write_bytes(b"old")

    def full(figure: object, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as context:
        context.setattr("matplotlib.figure.Figure.savefig", full)
        with pytest.raises(OSError, match="no space left"):
            plot_layers(found, tmp_path / "layers.png")
    assert [path.name for path in tmp_path.iterdir()] == ["layers.png"]
    assert (tmp_path / "layers.png").read_bytes() == b"old"
    with pytest.raises(ValueError, match="'xyz' is not supported"):
        plot_layers(found, tmp_path / "layers.xyz")
    with Image.open(plot_layers(found, tmp_path / "plain")) as picture:
        assert picture.format == "PNG"


def test_the_plot_shows_every_curve(tmp_path):
    found = diagnose_layers(tiny(), scene_changes(4))
    path = plot_layers(found, tmp_path / "layers.png")
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert pixels.shape[1] > pixels.shape[0] and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    plot_layers(found, tmp_path / "layers.svg")
    text = (tmp_path / "layers.svg").read_text()
    assert "<svg" in text


def test_the_command_prints_a_table_json_and_a_plot(tmp_path, capsys):
    shell = Shell(capsys)
    assert shell("diagnose", "layers", "--items", "4", "--plot", tmp_path / "p.png") == 0
    assert "color swap" in shell.out and "paraphrase (control)" in shell.out and "saved" in shell.out
    assert (tmp_path / "p.png").exists()
    told = shell.json("diagnose", "layers", "--items", "4")
    assert told["model"] == "scenes" and len(told["curves"][0]["values"]) == 8 and told["drawn"] is None
    (tmp_path / "pairs.csv").write_text("kind,text,changed\nnegation,a red circle,no red circle\n")
    assert shell("diagnose", "layers", "--pairs", tmp_path / "pairs.csv") == 0
    assert "pairs.csv" in shell.out
    for option in (("--items", "4"), ("--split", "held_out"), ("--seed", "1")):
        assert shell("diagnose", "layers", "--pairs", tmp_path / "pairs.csv", *option) == 2
        assert shell.err == f"peaksim: diagnose layers --pairs: has no use for {option[0]}\n"
