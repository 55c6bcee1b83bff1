"""The small generator of scenes: its shapes, what it learns, its file, and whose embeddings it takes; and its judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.encoders.scenes import save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine, load
from engine.heads.peak_patch import PeakPatch, PeakPatchConfig
from engine.heads.scene_generator import SceneGenerator, SceneGeneratorConfig, load_generator
from engine.heads.scene_judge import SceneJudge, SceneJudgeConfig, load_judge
from engine.results import generator as results
from engine.results.generator import (
    ALONE,
    BOTH,
    PLAIN,
    SEEN,
    SIDES,
    Files,
    Parts,
    asks_for_x,
    denies,
    draw,
    prompts,
    table,
    train_generator,
)
from engine.scenes.world import COLORS, SHAPES
from engine.training.heads import HeadTrainConfig, train_head
from engine.training.scene_generator import (
    GeneratorData,
    SmallScenes,
    flow_objective,
)
from engine.training.scenes import VOCABULARY
from tests.command_line import Shell

TINY = SceneGeneratorConfig(16, side=32, patch=8, width=32, depth=1, heads=2, context=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = ScenesModelConfig(width=32, heads=2, image_layers=1, text_layers=2, stem_width=8, embed_dim=16)
    save_scenes(folder, ScenesModel(sizes), VOCABULARY)
    return f"scenes:{folder}"


@pytest.fixture(scope="module")
def engine(model: str) -> Engine:
    return load(model)


@pytest.fixture
def generator(engine: Engine) -> SceneGenerator:
    torch.manual_seed(1)
    return SceneGenerator(TINY, encoder=engine.spec.name, fingerprint=engine.spec.fingerprint)


@pytest.fixture
def parts(engine: Engine, generator: SceneGenerator) -> Parts:
    head = PeakPatch.build(engine.spec, PeakPatchConfig(heads=2)).eval()
    head.take_readout(engine.encoder.text_readout())
    torch.manual_seed(2)
    with torch.no_grad():
        for module in (generator, head):
            for weight in module.parameters():
                weight.add_(0.1 * torch.randn(weight.shape))
    return Parts(generator.eval(), SceneJudge(SceneJudgeConfig((4, 4, 4))).eval(), head)


def unit(n: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(n, 16), dim=1)


def settings(folder: Path, steps: int = 10) -> HeadTrainConfig:
    return HeadTrainConfig(output=folder, steps=steps, batch_size=16, learning_rate=5e-3, warmup_steps=2, log_every=1)


def test_ten_steps_lower_the_loss_and_go_on_to_the_same_weights(engine, generator, tmp_path, monkeypatch):
    data = GeneratorData(engine, SmallScenes(48), tmp_path / "features")
    with monkeypatch.context() as context:
        # What was drawn and encoded once is found again.
        context.setattr(SmallScenes, "picture", None)
        context.setattr(engine, "encode_texts", None)
        same = GeneratorData(engine, SmallScenes(48), tmp_path / "features")
    assert torch.equal(same.pictures, data.pictures) and torch.equal(same.embeddings, data.embeddings)
    before = engine.encode_texts(["a red star"]).embedding
    start = {name: value.clone() for name, value in generator.state_dict().items()}

    def loss() -> float:
        torch.manual_seed(5)
        with torch.no_grad():
            return float(np.mean([float(flow_objective(generator, *data.batch(torch.arange(48)))) for _ in range(8)]))

    first = loss()
    path = train_head(generator, data, settings(tmp_path / "run"), objective=flow_objective)
    assert loss() < 0.95 * first
    assert torch.equal(before, engine.encode_texts(["a red star"]).embedding)
    # A run that stopped after four steps goes on to what one run gives.
    again = SceneGenerator(TINY, encoder=generator.encoder, fingerprint=generator.fingerprint)
    again.load_state_dict(start)
    cut = replace(settings(tmp_path / "cut"), checkpoint_every=4)

    def stop(words: str, step: int, steps: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_head(again, data, cut, objective=flow_objective, report=stop)
    with torch.no_grad():
        for weight in again.parameters():
            weight.zero_()
    train_head(again, data, cut, objective=flow_objective)
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), generator.state_dict().values(), strict=True)
    )
    stored = load_generator(path, fingerprint=engine.spec.fingerprint)
    for name, value in generator.state_dict().items():
        torch.testing.assert_close(stored.state_dict()[name], value, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "damage",
    [lambda held: b"", lambda held: held[:-100], lambda held: held[:9], lambda held: b"junk", lambda held: b"PK\3\4"],
)
def test_damaged_pictures_are_drawn_anew(engine, tmp_path, damage):
    data = GeneratorData(engine, SmallScenes(4), tmp_path)
    (path,) = tmp_path.glob("*/pictures.npy")
    path.write_bytes(damage(whole := path.read_bytes()))
    assert torch.equal(GeneratorData(engine, SmallScenes(4), tmp_path).pictures, data.pictures)
    assert path.read_bytes() == whole


def test_the_file_says_whose_embeddings_it_takes(generator, tmp_path):
    path = generator.save(tmp_path / "deep" / "g.safetensors", facts={"steps": 3})
    held = load_generator(path)
    assert held.config == TINY and held.fingerprint == generator.fingerprint and not held.training
    with pytest.raises(ValueError, match=r"belongs to the encoder .*, wanted one for another"):
        load_generator(path, fingerprint="another")
    with pytest.raises(FileNotFoundError, match=r"no\.safetensors is missing; `peaksim train generator`"):
        load_generator(tmp_path / "no.safetensors")
    judge = SceneJudge().save(tmp_path / "judge.safetensors")
    with pytest.raises(ValueError, match="must hold a scene_generator, got 'scene_judge'"):
        load_generator(judge)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_generator(path)


DAMAGED = {
    "no object": (lambda plain: 3, "is not a whole safetensors file of peaksim's"),
    "no fingerprint": (lambda plain: without(plain, "fingerprint"), r"header that cannot be read \(no fingerprint\)"),
    "no config": (lambda plain: without(plain, "config"), r"header that cannot be read \(no config\)"),
    "a list": (lambda plain: plain | {"config": [1]}, "has a header that cannot be read"),
    "another field": (lambda plain: plain | {"config": {"length": 3}}, "has a header that cannot be read"),
    "words": (lambda plain: plain | {"config": dict.fromkeys(plain["config"], "x")}, "a header that cannot be read"),
}


def without(plain: dict, name: str) -> dict:
    return {key: value for key, value in plain.items() if key != name}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_told_with_the_file(generator, tmp_path, case):
    change, message = DAMAGED[case]
    for module, read in ((generator, load_generator), (SceneJudge(), load_judge)):
        path = module.save(tmp_path / f"{module.name}.safetensors")
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["peaksim"])
        save_file(load_file(path), path, metadata={"peaksim": json.dumps(change(header))})
        with pytest.raises(ValueError, match=rf"{read.__name__}: .*{module.name}\.safetensors .*{message}"):
            read(path)


def test_a_sheet_that_is_stopped_leaves_the_old_one(engine, parts, tmp_path, monkeypatch):
    path = tmp_path / "sheet.png"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=r"sheet: .*sheet\.xyz must end in \.png or like another picture, got '\.xyz'"):
        results.sheet(engine, parts, prompts(1), tmp_path / "sheet.xyz")

    def full(picture: Image.Image, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as context:
        context.setattr(Image.Image, "save", full)
        with pytest.raises(OSError, match="no space left"):
            results.sheet(engine, parts, prompts(1), path)
    assert path.read_bytes() == b"old"
    with Image.open(results.sheet(engine, parts, prompts(1), tmp_path / "deep" / "sheet.bmp")) as found:
        assert found.format == "BMP"


def test_drawing_refuses_embeddings_of_another_encoder(engine, parts):
    parts.generator.fingerprint = "another"
    with pytest.raises(ValueError, match=r"the generator must belong to .*, got one of .* \(another\)"):
        draw(engine, parts, prompts(2), noises=1)
    with pytest.raises(ValueError, match="noises must be at least 1, got 0"):
        draw(engine, parts, prompts(2), noises=0)


def test_loading_random_weights_leaves_random_numbers_alone(generator, tmp_path):
    path = generator.save(tmp_path / "g.safetensors")
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    load_generator(path)
    assert torch.equal(torch.rand(3), wanted)


def test_samples_follow_embedding_noise_and_guidance_and_no_neighbour(parts):
    generator = parts.generator
    two = unit(2)
    made = generator.sample(two, seed=3, steps=3)
    assert made.shape == (2, 3, 32, 32) and float(made.abs().max()) <= 1
    torch.testing.assert_close(generator.sample(two[:1], seed=3, steps=3), made[:1], atol=1e-5, rtol=0)
    for other in (
        generator.sample(two.flip(0), seed=3, steps=3),
        generator.sample(two, seed=4, steps=3),
        generator.sample(two, seed=3, steps=3, guidance=1),
        generator.sample(two, seed=3, steps=2),
    ):
        assert float((other - made).abs().max()) > 1e-3
    with pytest.raises(ValueError, match=r"embeddings must have shape \(B, 16\) and steps be at least 1, got \(2, 8\)"):
        generator.sample(two[:, :8], seed=0)


def test_a_perfect_velocity_ends_at_the_picture():
    target = torch.rand(1, 3, 32, 32) * 2 - 1

    class Knowing(SceneGenerator):
        def forward(self, x: torch.Tensor, t: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
            return (target - x) / (1 - t[:, None, None, None])

    made = Knowing(TINY).sample(unit(1), seed=0, steps=4)
    torch.testing.assert_close(made, target, atol=1e-5, rtol=0)



def test_generator_and_judge_are_trained_where_the_encoder_is(engine, tmp_path, monkeypatch):
    places: dict[str, str] = {}

    def train(head: torch.nn.Module, *given: object, **more: object) -> Path:
        places[head.name] = next(head.parameters()).device.type
        return tmp_path

    monkeypatch.setattr(results, "train_head", train)
    monkeypatch.setattr(results, "GeneratorData", lambda *given, **more: None)
    monkeypatch.setattr(engine.encoder, "device", torch.device("meta"))
    train_generator(engine, tmp_path, scenes=SmallScenes(8))
    assert places == {"scene_judge": "meta", "scene_generator": "meta"}


def test_prompts_ask_for_one_thing_and_deny_another():
    asked = prompts(30, seed=2)
    assert asked == prompts(40, seed=2)[:30] and asked != prompts(30, seed=3)
    for prompt in asked:
        assert not set(prompt.kept) & set(prompt.other)
        assert prompt.kept[0] in COLORS and prompt.other[1] in SHAPES
        for condition, text in prompt.texts.items():
            assert (" ".join(prompt.other) in text) == (condition != PLAIN)
            assert (" ".join(prompt.kept) in text) == asks_for_x(condition)
            words = set(text.lower().replace(".", "").replace(",", "").split())
            assert denies(condition) == bool(words & {"no", "not", "without", "absent", "excluded"}), text
    assert [denies(name) for name in (PLAIN, BOTH, ALONE)] == [False] * 3
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        prompts(0)


def test_shares_are_of_what_the_judge_sees(engine, parts, monkeypatch):
    class OneColor(SceneJudge):
        def seen(self, pictures: torch.Tensor) -> torch.Tensor:
            return torch.tensor([color == "red" for color in COLORS]).expand(len(pictures), -1)

    asked = prompts(6)
    told: list[str] = []
    monkeypatch.setattr(results, "JUDGED", 10)
    found = draw(engine, parts._replace(judge=OneColor()), asked, noises=1, told=lambda what, *_: told.append(what))
    assert told == list(asked[0].texts) == list(found["seen"])
    for sides in found["seen"].values():
        for side in SIDES:
            shares = {name: sides[side][name]["value"] for name in SEEN}
            assert shares["X's color"] == pytest.approx(np.mean([prompt.kept[0] == "red" for prompt in asked]))
            assert shares["Y's color"] == pytest.approx(np.mean([prompt.other[0] == "red" for prompt in asked]))
    text = table(json.loads(json.dumps(found)), 6, 1)
    row = next(line for line in text.splitlines() if line.startswith("| there is no Y, as the benchmark denies | cor"))
    honoured = 1 - found["seen"]["there is no Y, as the benchmark denies"]["corrected"]["Y's color"]["value"]
    assert f"| {100 * honoured:.1f} ± " in row.rpartition(" | ")[0] + row and "|  |" in row


def test_corrected_embeddings_are_what_is_drawn(engine, parts):
    vanilla, corrected = results._embeddings(engine, parts, ["a red star", "no ring"])
    norms = torch.cat([vanilla, corrected]).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(4))
    wanted = engine.encode_texts(["a red star", "no ring"], scorer=parts.head.needs())
    torch.testing.assert_close(vanilla, wanted.embedding)
    torch.testing.assert_close(corrected, parts.head.corrected(wanted).embedding.detach())


def test_files_refuse_a_head_without_correction_of_captions(engine, parts, tmp_path):
    alone = PeakPatch.build(engine.spec, PeakPatchConfig(heads=2, parts="scn"))
    files = Files(
        parts.generator.save(tmp_path / "g.safetensors"),
        parts.judge.save(tmp_path / "j.safetensors"),
        alone.save(tmp_path / "h.safetensors"),
    )
    with pytest.raises(ValueError, match="must hold a peakpatch with an embedding correction, got peakpatch"):
        files.load(engine.spec.fingerprint, torch.device("cpu"))


def test_the_command_trains_as_what_is_shipped_was_trained(model, tmp_path, capsys, monkeypatch):
    asked: dict[str, object] = {}

    def train(engine: Engine, folder: Path, **more: object) -> tuple[Path, Path]:
        asked.update(more)
        return folder / "generator", folder / "judge"

    monkeypatch.setattr(results, "train_generator", train)
    shell = Shell(capsys)
    assert shell("train", "generator", "--model", model, "--output", tmp_path) == 0
    use = f"--model {model} --generator {tmp_path / 'generator'} --judge {tmp_path / 'judge'}"
    assert f"use them as {use}\n" in shell.out
    assert asked["scenes"] == results.SCENES
    assert (asked["training"], asked["judging"]) == (results.GENERATOR_TRAINING, results.JUDGE_TRAINING)


def test_the_commands(model, engine, parts, tmp_path, capsys):
    shell = Shell(capsys)
    options = ("--items", "8", "--steps", "1", "--judge-steps", "1", "--batch-size", "8", "--output", tmp_path / "run")
    told = shell.json("train", "generator", "--model", model, *options)
    assert load_generator(told["generator"], fingerprint=engine.spec.fingerprint).config.embed_dim == 16
    one = {"steps": 1, "batch_size": 8}
    training, judging = (replace(held, **one) for held in (results.GENERATOR_TRAINING, results.JUDGE_TRAINING))
    again = train_generator(engine, tmp_path / "run", scenes=SmallScenes(8), training=training, judging=judging)
    assert [str(path) for path in again] == [told["generator"], told["judge"]]
    head = parts.head.save(tmp_path / "head.safetensors")
    asked = (
        *("diagnose", "generator", "--model", model, "--generator", told["generator"], "--judge", told["judge"]),
        *("--head", head, "--prompts", "2", "--noises", "1", "--sheet", tmp_path / "sheet.png"),
    )
    assert shell(*asked) == 0
    assert "| X and a Y | vanilla | " in shell.out
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (2 * 32 * 3, 8 * 32 * 3)
