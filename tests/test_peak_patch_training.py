"""PeakPatch is trained: losses by hand, true and false denials, a run that stops and goes on, a frozen encoder."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from engine.datasets.base import ImageRef
from engine.datasets.captioned import CaptionedItem
from engine.encoders.scenes import ScenesEncoder
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine
from engine.features import Needs
from engine.heads.peak_patch import PeakPatch, PeakPatchConfig
from engine.heads.registry import load_head
from engine.heads.scn import CorrectedScores
from engine.scorers.peak_patch import PeakPatchScorer
from engine.training.heads import HeadTrainConfig
from engine.training.negation_data import (
    PHOTO_DENIALS,
    NegationRow,
    deny,
    photo_rows,
    scene_rows,
)
from engine.training.peak_patch import (
    SCENES,
    JointObjective,
    NegationData,
    head_for,
    negation_data,
    regression_objective,
    train_peak_patch,
)
from engine.training.peak_patch_losses import choice_loss, keep_loss, regression_loss
from engine.training.scenes import VOCABULARY


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(0)
    sizes = ScenesModelConfig(width=32, heads=2, image_layers=1, text_layers=3, stem_width=8, embed_dim=16)
    return Engine(ScenesEncoder(ScenesModel(sizes), VOCABULARY, name="tiny", device=torch.device("cpu")))


@pytest.fixture(scope="module")
def rows() -> list[NegationRow]:
    return scene_rows(48, seed=5)


def new_head(engine: Engine, **options: object) -> PeakPatch:
    head = PeakPatch.build(engine.spec, PeakPatchConfig(heads=2, **options), seed=3)
    head.take_readout(engine.encoder.text_readout())
    return head


def settings(folder: Path, steps: int = 10, **changes: object) -> HeadTrainConfig:
    small = HeadTrainConfig(output=folder, steps=steps, batch_size=16, learning_rate=2e-3, warmup_steps=2, log_every=1)
    return replace(small, **changes)


def loss_of(head: PeakPatch, data: NegationData) -> float:
    """The loss of all rows at once, without dropout."""
    torch.manual_seed(0)
    with torch.no_grad():
        return float(SCENES(head.eval(), *data.batch(torch.arange(len(data)))))


def test_regression_loss_by_hand():
    found = regression_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
    assert float(found) == pytest.approx((1 + 4) / 2 + 1)


def test_keep_loss_by_hand():
    found = keep_loss(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    assert float(found) == pytest.approx((1 - math.sqrt(0.5)) / 2)


@torch.no_grad()
def test_regression_objective_by_hand(engine, rows, tmp_path):
    head = new_head(engine).eval()
    torch.manual_seed(4)
    for weight in head.ecn.parameters():
        # The last layer starts near zero: the direction of its corrections would be that of noise.
        weight.add_(0.2 * torch.randn(weight.shape))
    data = negation_data(engine, head.needs(), rows[:3], tmp_path)
    wanted = 0.0
    for row in rows[:3]:
        plain, denied = (engine.encode_texts([text], scorer=head.needs()) for text in row.texts[:2])
        delta = head.deltas(denied)[0].tolist()
        # From the caption with a true denial back to the caption without it.
        target = (plain.embedding[0] - denied.embedding[0]).tolist()
        dot = sum(a * b for a, b in zip(delta, target, strict=True))
        wanted += sum((a - b) ** 2 for a, b in zip(delta, target, strict=True)) / len(delta) / 3
        wanted += (1 - dot / math.hypot(*delta) / math.hypot(*target)) / 3
    found = float(regression_objective(head, *data.batch(torch.arange(3))))
    assert found == pytest.approx(wanted, rel=2e-3)


@torch.no_grad()
def test_joint_objective_by_hand(engine, rows, tmp_path):
    head = new_head(engine).eval()
    data = negation_data(engine, head.needs(), rows[:3], tmp_path)
    images, texts = data.batch(torch.arange(3))
    objective = JointObjective(scale=7, temperature=0.5, penalty=0.3, keep=2, whole_score=True)
    torch.manual_seed(8)
    found = float(objective(head, images, texts))
    torch.manual_seed(8)
    denied = (torch.rand(3) < 0.5).tolist()
    scores = head.matrix(images, texts)
    true = [i + 3 * denied[i] for i in range(3)]
    wanted = 0.0
    for i in range(3):
        logits = [7 * float(scores[i, j]) for j in (*true, 6, 7, 8)]
        wanted += (math.log(sum(map(math.exp, logits))) - logits[i]) / 6
        logits = [7 * float(scores[j, true[i]]) for j in range(3)]
        wanted += (math.log(sum(map(math.exp, logits))) - logits[i]) / 6
        places = [9 + i, 12 + i, 15 + i, 18 + i]
        answers = [float(scores[i, j]) / 0.5 for j in places]
        wanted += (math.log(sum(map(math.exp, answers))) - answers[0]) / 3
        steps = [float(head.correct_pairs(images[i], texts[j]).correction) for j in places]
        wanted += 0.3 * sum(step**2 for step in steps) / 12
        wanted += 2 * (1 - float(head.corrected(texts[true[i]]).embedding[0] @ texts.embedding[i])) / 3
    assert found == pytest.approx(wanted, rel=1e-4)
    torch.manual_seed(8)
    plain = float(replace(objective, whole_score=False)(head, images, texts))
    assert plain != pytest.approx(found, rel=1e-6)


def test_choice_loss_by_hand():
    scores = CorrectedScores(torch.tensor([[0.1, 0.3]]), torch.tensor([[0.2, -0.1]]))
    wanted = -math.log(1 / (1 + math.exp((0.2 - 0.3) / 0.5))) + 0.3 * (0.04 + 0.01) / 2
    assert float(choice_loss(scores, torch.tensor([0]), temperature=0.5, penalty=0.3)) == pytest.approx(wanted)


def test_data_puts_the_right_answer_first(engine, rows, tmp_path):
    data = negation_data(engine, new_head(engine).needs(), rows, tmp_path)
    images, texts = data.batch(torch.tensor([5, 2]))
    assert len(data) == 48 and len(images) == 2 and len(texts) == 14
    right = [rows[row].texts[3 + rows[row].correct] for row in (5, 2)]
    wanted = engine.encode_texts([rows[5].texts[0], rows[2].texts[0], *right])
    torch.testing.assert_close(texts.embedding[:2], wanted.embedding[:2], atol=1e-3, rtol=0)
    torch.testing.assert_close(texts.embedding[6:8], wanted.embedding[2:], atol=1e-3, rtol=0)
    with pytest.raises(ValueError, match="texts must come 7 an image, got 48 for 48"):
        NegationData(data.images, data.images)


def test_a_store_is_filled_once(engine, rows, tmp_path):
    told: list[tuple[str, int, int]] = []
    negation_data(engine, new_head(engine).needs(), rows, tmp_path, told=lambda *what: told.append(what))
    assert told == [("images", 48, 48), ("texts", 336, 336)]
    same = new_head(engine, use_pool=False).needs()
    negation_data(engine, same, rows, tmp_path, told=lambda *what: told.append(what))
    assert len(told) == 2


def test_pictures_and_texts_have_stores_of_their_own(engine, tmp_path):
    def photos(folder: Path, *colors: str) -> list[NegationRow]:
        folder.mkdir()
        for number, color in enumerate(colors):
            Image.new("RGB", (8, 8), color).save(folder / f"{number}.bmp")
        texts = ("a ring", "no ring", "a red ring", "a ring", "no ring", "a star", "no star")
        return [NegationRow(folder / f"{number}.bmp", texts, 0, "positive") for number in range(len(colors))]

    def encoded(rows: list[NegationRow], needs: Needs | None = None) -> tuple[list[str], NegationData]:
        told: list[str] = []
        needs = needs or new_head(engine).needs()
        return told, negation_data(engine, needs, rows, tmp_path / "features", told=lambda what, *_: told.append(what))

    rows = photos(tmp_path / "a", "red", "blue")
    assert encoded(rows)[0] == ["images", "texts"]
    # Other layers of the texts are nothing to the pictures.
    assert encoded(rows, Needs(text_layers=(1,)))[0] == ["texts"]
    # The same captions in front of others, of the same names and sizes.
    told, other = encoded(photos(tmp_path / "b", "green", "blue"))
    assert told == ["images"] and not torch.equal(other.images[[0]].embedding, encoded(rows)[1].images[[0]].embedding)
    content, path = (tmp_path / "a" / "1.bmp").read_bytes(), tmp_path / "a" / "1.bmp"
    path.write_bytes(b"broken")
    told, broken = encoded(rows)
    assert told == ["images"] and len(broken) == 1 and [problem.path for problem in broken.problems] == [str(path)]
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    told, repaired = encoded(rows)
    assert told == ["images"] and len(repaired) == 2 and repaired.problems == ()


def test_items_are_the_readable_rows_and_those_are_looked_for_once(engine, rows, tmp_path):
    whole = negation_data(engine, new_head(engine).needs(), rows[:5], tmp_path)
    data = replace(whole, unread=frozenset({0, 3}))
    assert len(data) == 3 and data.readable.tolist() == [1, 2, 4] and data.readable is data.readable
    images, texts = data.batch(torch.tensor([2, 0]))
    wanted, said = whole.batch(torch.tensor([4, 1]))
    assert torch.equal(images.embedding, wanted.embedding) and torch.equal(texts.embedding, said.embedding)


@pytest.mark.parametrize("parts", ["both", "ecn", "scn"])
def test_training_lowers_the_loss_and_leaves_the_encoder_alone(parts, engine, rows, tmp_path):
    before = {name: tensor.clone() for name, tensor in engine.encoder._model.state_dict().items()}
    head = new_head(engine, parts=parts)
    frozen = head.projection.clone()
    data = negation_data(engine, head.needs(), rows, tmp_path / "features")
    first = loss_of(head, data)
    path = train_peak_patch(
        head,
        data,
        settings(tmp_path / "run", 30, learning_rate=1e-2),
        pretraining=settings(tmp_path / "first", 20),
        objective=SCENES,
    )
    assert loss_of(head, data) < first - 0.1
    assert (tmp_path / "first").exists() == (parts != "scn")
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.encoder._model.state_dict().items())
    assert torch.equal(head.projection, frozen)
    trained = load_head(path, fingerprint=engine.spec.fingerprint)
    assert trained.config.parts == parts
    scores = engine.score([rows[0].source()], list(rows[0].texts), scorer=PeakPatchScorer(str(path)))
    assert scores.shape == (1, 7) and (scores != engine.score([rows[0].source()], list(rows[0].texts))).all()


def test_a_stopped_run_goes_on_to_the_same_weights(engine, rows, tmp_path):
    data = negation_data(engine, new_head(engine).needs(), rows, tmp_path / "features")

    def run(name: str) -> tuple[HeadTrainConfig, HeadTrainConfig]:
        return (
            settings(tmp_path / name, 6, checkpoint_every=2),
            settings(tmp_path / name / "first", 4, checkpoint_every=2),
        )

    def stop(words: str, step: int, steps: int) -> None:
        if (step, steps) == (3, 6):
            raise KeyboardInterrupt

    config, first = run("whole")
    whole = load_head(train_peak_patch(new_head(engine), data, config, pretraining=first))
    config, first = run("stopped")
    with pytest.raises(KeyboardInterrupt):
        train_peak_patch(new_head(engine), data, config, pretraining=first, report=stop)
    again = load_head(train_peak_patch(new_head(engine), data, config, pretraining=first))
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
    with pytest.raises(ValueError, match="was written with other settings"):
        train_peak_patch(new_head(engine), data, config, pretraining=first, objective=SCENES)
    with pytest.raises(ValueError, match="pretraining needs a folder of its own"):
        train_peak_patch(new_head(engine), data, config, pretraining=config)


def test_measured_layers_are_for_the_embedded_model_alone(engine):
    assert head_for(engine.spec, PeakPatchConfig()) == PeakPatchConfig()
    embedded = replace(engine.spec, text_layers=8)
    assert head_for(embedded, PeakPatchConfig(anchor=3)) == PeakPatchConfig(peak=2, anchor=3, low=4)
    assert head_for(replace(embedded, family="clip"), PeakPatchConfig()) == PeakPatchConfig()


def test_explanations_add_up(engine, rows):
    scorer = PeakPatchScorer(new_head(engine).eval())
    found = engine.explain(rows[0].source(), rows[0].texts[1], scorer=scorer)
    assert [match.text for match in found.matches][1:] == ["correction of the caption", "correction of the score"]
    assert sum(match.score * match.weight for match in found.matches) == pytest.approx(found.total, abs=1e-5)


def labelled(name: str, captions: tuple[str, ...], *present: str) -> CaptionedItem:
    return CaptionedItem(name, ImageRef(name, Path(name)), captions, present=present)


def test_photo_rows_tell_true_from_false():
    pictures = [
        labelled("1.jpg", ("Two dogs chase a ball.", "Dogs at play."), "dog", "sports ball"),
        labelled("2.jpg", ("An umbrella over a cat.",), "cat", "umbrella"),
        labelled("3.jpg", ("A lonely bench.",), "bench"),
    ]
    rows, problems = photo_rows(pictures, seed=1)
    assert [str(problem) for problem in problems] == ["3.jpg: two categories must be in it, got 1"]
    assert [str(row.image) for row in rows] == ["1.jpg", "1.jpg", "2.jpg"]
    assert [row.kind for row in rows] == ["positive", "negative", "hybrid"]
    assert [row.correct for row in rows] == [0, 1, 2]
    for row, present in zip(rows, (("dog", "ball"), ("dog", "ball"), ("cat", "umbrella")), strict=True):
        caption, denied, contradicted = row.texts[:3]
        extra = denied.lower().replace(caption.lower().rstrip("."), "")
        assert not any(name in extra for name in present)
        assert any(name in contradicted.lower().replace(caption.lower().rstrip("."), "") for name in present)
    both = ("This image features a dog and a sports ball.", "This image features a sports ball and a dog.")
    assert rows[0].texts[3] in both
    with pytest.raises(ValueError, match="needs a picture of two categories and a caption that others lack"):
        photo_rows(pictures[2:])


def test_photos_and_captions_that_are_left_out_are_named():
    pictures = [
        labelled("1.jpg", ("A dog.", "A ball.", "Play.", "Fun."), "dog", "sports ball"),
        labelled("2.jpg", ("A bench, a dog and a sports ball.",), "bench", "dog"),
        labelled("3.jpg", ("A bench.", "Wood."), "bench", "bench"),
    ]
    rows, problems = photo_rows(pictures, captions_per_image=2)
    assert [str(row.image) for row in rows] == ["1.jpg", "1.jpg"]
    assert [str(problem) for problem in problems] == [
        "captions after the first 2 of a picture: 2 of them",
        "2.jpg: no category is absent from it",
        "3.jpg: two categories must be in it, got 1",
    ]


@pytest.mark.parametrize("template", PHOTO_DENIALS)
def test_denials_of_photos_read_well(template):
    text = deny("A man rides a horse.", "umbrella", template)
    assert text.endswith(".") and ".." not in text and text[0].isupper() and "umbrella" in text.lower()


def test_a_row_has_seven_texts():
    with pytest.raises(ValueError, match="texts must be 7, got 1"):
        NegationRow(Path("x"), ("one",), 0, "positive")
