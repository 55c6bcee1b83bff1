"""The section on a frozen generator: whether pictures made of an embedding honour what the caption denies.

A generator of small scenes was trained once on the encoder's own embeddings and frozen. It is given embeddings of
captions, as they are and as the embedding correction of PeakPatch leaves them, on the same noise; a judge trained on
real renders says which colors its pictures show. (Shapes it does not draw well enough to be judged.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.atomic_files import written_whole
from engine.benchmarks.scenes import percent
from engine.engine import Engine, load
from engine.heads.base import check_belongs, shipped_head
from engine.heads.peak_patch import PeakPatch
from engine.heads.registry import load_head
from engine.heads.scene_generator import SceneGenerator, SceneGeneratorConfig, load_generator
from engine.heads.scene_judge import SceneJudge, load_judge
from engine.metrics import Floats, Interval, bootstrap_interval
from engine.results.figures import Figure, check_figures, renew_figures, write_figures
from engine.results.run import Progress, Run, silent
from engine.scenes.captions import phrase, with_article
from engine.scenes.wordings import DENIALS, WORDINGS, with_denial
from engine.scenes.world import COLORS, SHAPES, pick, sample_scene
from engine.training.heads import HeadTrainConfig, Report, train_head
from engine.training.scene_generator import (
    GENERATOR_TRAINING,
    JUDGE_TRAINING,
    GeneratorData,
    JudgeData,
    SmallScenes,
    flow_objective,
    judge_objective,
    judge_scenes,
)

NAME = "generator"
SCENES = SmallScenes()
PROMPTS, NOISES = 100, 2
QUICK_PROMPTS = 12
JUDGED = 1000
# Captions that ask for X, for Y, or for both.
PLAIN, BOTH, ALONE = "X", "X and a Y", "there is Y"
# How a denial is worded, by the set of `engine.scenes.wordings`.
SETS = {"training": "as trainings deny", "benchmark": "as the benchmark denies", "held_out": "as no training does"}
SEEN = ("X's color", "Y's color")
SIDES = ("vanilla", "corrected")
# Conditions of the picture of pictures.
SHEET = (BOTH, "X, no Y, as the benchmark denies", ALONE, "there is no Y, as the benchmark denies")
SCALE = 3


@dataclass(frozen=True)
class Prompt:
    """One thing to be drawn, another to be left out, and the captions that say so.

    Attributes:
        kept, other: color and shape of X and of Y.
        texts: the caption of each condition.
    """

    kept: tuple[str, str]
    other: tuple[str, str]
    texts: Mapping[str, str]


def prompts(n: int, *, seed: int = 0) -> list[Prompt]:
    """`n` prompts; neither color nor shape of Y is X's. Raises ValueError for `n` below 1.

    >>> prompts(1)[0].texts["X and a Y"]
    'a red triangle and a green star'
    """
    if n < 1:
        raise ValueError(f"prompts: n must be at least 1, got {n}")
    rng = np.random.default_rng((seed, 501))
    found = []
    for row in range(n):
        (group,) = sample_scene(rng, split="in_domain", max_groups=1).groups
        mine = group.color, group.shape
        colors, shapes = ([word for word in words if word not in mine] for words in (COLORS, SHAPES))
        other = colors[pick(rng, len(colors))], shapes[pick(rng, len(shapes))]
        name, text = " ".join(other), phrase(replace(group, count=1), ["color"])
        found.append(Prompt(mine, other, _texts(text, " ".join(mine), name, row)))
    return found


def _texts(text: str, x: str, y: str, row: int) -> dict[str, str]:
    """The caption of each condition; wordings take turns from row to row."""
    (benchmark,) = WORDINGS["benchmark"]
    texts = {PLAIN: text, BOTH: f"{text} and {with_article(y)}", ALONE: benchmark.affirm(y)}
    for held, how in SETS.items():
        templates, wordings = DENIALS[held], WORDINGS[held]
        wording = wordings[row % len(wordings)]
        texts[f"X, no Y, {how}"] = with_denial(text, y, templates[row % len(templates)])
        texts[f"there is X, not Y, {how}"] = wording.affirm_and_deny(x, y)
        texts[f"there is no Y, {how}"] = wording.deny(y)
    return texts


def denies(condition: str) -> bool:
    """Whether captions of this condition deny Y."""
    return condition not in (PLAIN, BOTH, ALONE)


def asks_for_x(condition: str) -> bool:
    """Whether captions of this condition ask for X."""
    return "X" in condition


class Parts(NamedTuple):
    """What draws and judges, in evaluation mode."""

    generator: SceneGenerator
    judge: SceneJudge
    head: PeakPatch


class Files(NamedTuple):
    """Where the three are stored."""

    generator: Path
    judge: Path
    head: Path

    @classmethod
    def of(cls, generator: Path | None = None, judge: Path | None = None, head: Path | None = None) -> Files:
        """These files, those shipped for scenes where None is given."""
        return cls(
            generator or shipped_head(SceneGenerator.name),
            judge or shipped_head(SceneJudge.name),
            head or shipped_head(PeakPatch.name),
        )

    def load(self, fingerprint: str, device: torch.device) -> Parts:
        """All three; raises what their readers raise, and ValueError for a head of another kind or encoder."""
        head = load_head(self.head, fingerprint=fingerprint)
        if not isinstance(head, PeakPatch) or head.ecn is None:
            raise ValueError(f"draw: {self.head} must hold a peakpatch with an embedding correction, got {head.name}")
        generator = load_generator(self.generator, fingerprint=fingerprint)
        return Parts(generator.to(device), load_judge(self.judge).to(device), head.to(device))


def draw(
    engine: Engine, parts: Parts, asked: Sequence[Prompt], *, noises: int = NOISES, told: Progress = silent
) -> dict[str, Any]:
    """Pictures of all prompts under all conditions, judged, as plain values for JSON.

    `"seen"` holds for each condition what `drawn` gives, `"judge"` what `judged` does. `told` gets (condition, how many
    are done, of how many). Raises what `drawn` raises.
    """
    seen = {}
    conditions = list(asked[0].texts)
    for done, condition in enumerate(conditions):
        told(condition, done, len(conditions))
        seen[condition] = drawn(engine, parts, asked, condition, noises=noises)
    return {"seen": seen, "judge": judged(parts.judge, JUDGED)}


def drawn(
    engine: Engine, parts: Parts, asked: Sequence[Prompt], condition: str, *, noises: int = NOISES
) -> dict[str, dict[str, dict[str, float]]]:
    """For each of `SIDES` and of `SEEN` the share of the condition's pictures with its 95 % interval over prompts.

    Raises ValueError for a generator or a head of another encoder, or no noise.
    """
    if noises < 1:
        raise ValueError(f"draw: noises must be at least 1, got {noises}")
    sides = _embeddings(engine, parts, [prompt.texts[condition] for prompt in asked])
    return {side: _shown(parts, embeddings, asked, noises) for side, embeddings in zip(SIDES, sides, strict=True)}


def sheet(engine: Engine, parts: Parts, asked: Sequence[Prompt], path: Path) -> Path:
    """A picture of pictures: a row for each of a few conditions and embeddings, a column for each prompt.

    The format follows the suffix. Raises ValueError for one of no format that can be written.
    """
    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind not in Image.SAVE:
        raise ValueError(f"sheet: {path} must end in .png or like another picture, got {path.suffix!r}")
    rows = []
    for condition in SHEET:
        for embeddings in _embeddings(engine, parts, [prompt.texts[condition] for prompt in asked]):
            made = parts.generator.sample(embeddings, seed=0).cpu().permute(0, 2, 3, 1)
            rows.append(np.concatenate(list(((made + 1) * 127.5).round().byte().numpy()), axis=1))
    pixels = np.concatenate(rows).repeat(SCALE, axis=0).repeat(SCALE, axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        Image.fromarray(pixels).save(unfinished, format=kind)
    return path


def _embeddings(engine: Engine, parts: Parts, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Unit embeddings as they are, and corrected. Raises ValueError for a generator or a head of another encoder."""
    features = engine.encode_texts(list(texts), scorer=parts.head.needs())
    check_belongs("draw: the texts", parts.head, features.fingerprint)
    if parts.generator.fingerprint != features.fingerprint:
        raise ValueError(
            f"draw: the generator must belong to {engine.spec.name} ({features.fingerprint}), got one of "
            f"{parts.generator.encoder} ({parts.generator.fingerprint})"
        )
    with torch.no_grad():
        return features.embedding.float(), parts.head.corrected(features).embedding.float()


def _shown(parts: Parts, embeddings: Tensor, asked: Sequence[Prompt], noises: int) -> dict[str, dict[str, float]]:
    pictures = [parts.generator.sample(embeddings, seed=noise) for noise in range(noises)]
    marks = torch.stack([parts.judge.seen(made) for made in pictures]).cpu()
    found = {}
    for name, words in zip(
        SEEN, zip(*((prompt.kept[0], prompt.other[0]) for prompt in asked), strict=True), strict=True
    ):
        columns = torch.tensor([COLORS.index(word) for word in words])
        values = marks[:, torch.arange(len(asked)), columns].double().mean(dim=0)
        found[name] = _cell(values.numpy())
    return found


def judged(judge: SceneJudge, n: int, *, seed: int = 403) -> dict[str, dict[str, float]]:
    """How often the judge sees a color that is there, and does not see one that is not, on `n` real renders."""
    pictures, colors = JudgeData(SmallScenes(n, seed=seed)).batch(torch.arange(n))
    device = next(judge.parameters()).device
    seen, there = judge.seen(pictures.to(device)).cpu().numpy(), colors.numpy() > 0.5
    return {
        "sensitivity": _cell(seen[there].astype(np.float64)),
        "specificity": _cell(1 - seen[~there].astype(np.float64)),
    }


def _cell(values: Floats) -> dict[str, float]:
    interval = bootstrap_interval(values)
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def section(run: Run) -> str:
    """The table, of what was trained in this work folder, else of what is shipped.

    The first prompts are drawn once more with what is shipped: a quick run draws them alone, and raises ResultsDiffer
    where it sees something else. So does a full run where what was trained does not meet the committed figures, with
    the new ones written.
    """
    engine = load("scenes", device="cpu")
    first = _figures(_values(run, engine, Files.of(), QUICK_PROMPTS, 1), QUICK_PROMPTS)
    quick = run.figures / f"{NAME}-quick.jsonl"
    if run.quick:
        check_figures(quick, first)
        return ""
    trained = [run.folder / NAME / part / f"{part}.safetensors" for part in (SceneGenerator.name, SceneJudge.name)]
    renewed = all(path.is_file() for path in trained)
    files = Files.of(*trained) if renewed else Files.of()
    values = _values(run, engine, files, PROMPTS, NOISES)
    values["judge"] = judged(load_judge(files.judge), JUDGED)
    write_figures(quick, first)
    (renew_figures if renewed else write_figures)(run.figures / f"{NAME}.jsonl", _figures(values, PROMPTS))
    return table(values, PROMPTS, NOISES)


def _values(run: Run, engine: Engine, files: Files, count: int, noises: int) -> dict[str, Any]:
    """What `drawn` gives of so many prompts and noises for each condition, condition after condition."""
    hashes = [sha256(path.read_bytes()).hexdigest() for path in files]
    made_by = f"{engine.spec.fingerprint} {hashes} {count} {noises}"
    parts, asked = files.load(engine.spec.fingerprint, engine.encoder.device), prompts(count)
    seen = {}
    for done, condition in enumerate(asked[0].texts):
        run.progress(condition, done, len(asked[0].texts))
        make = partial(drawn, engine, parts, asked, condition, noises=noises)
        seen[condition] = run.part(f"{NAME}-{count}-{done}", f"{made_by} {condition}", make)
    return {"seen": seen}


def _figures(values: Mapping[str, Any], count: int) -> list[Figure]:
    return [
        Figure(f"{condition}, {side}: {name}", count, cell["value"], cell["low"], cell["high"])
        for condition, sides in values["seen"].items()
        for side, cells in sides.items()
        for name, cell in cells.items()
    ]


def train(run: Run) -> None:
    """Train the judge, then the generator; the files lie below `run.folder`."""
    train_generator(
        load("scenes", device="cpu"),
        run.folder / NAME,
        scenes=SCENES,
        training=GENERATOR_TRAINING,
        judging=JUDGE_TRAINING,
        told=run.progress,
    )


def train_generator(
    engine: Engine,
    folder: Path,
    *,
    scenes: SmallScenes = SCENES,
    training: HeadTrainConfig = GENERATOR_TRAINING,
    judging: HeadTrainConfig = JUDGE_TRAINING,
    told: Progress = silent,
) -> tuple[Path, Path]:
    """Files of a generator for this engine's encoder and of a judge; what was trained before is not trained again.

    Arguments: `folder`, below which runs and embeddings lie; `scenes` of the generator; `training` and `judging`,
    whose folders are replaced; `told` gets (what is being done, how much of it, of how much).
    """

    def reporting(what: str) -> Report:
        return lambda line, step, steps: told(f"{what}: {line}", step, steps)

    judging = replace(judging, output=folder / SceneJudge.name)
    training = replace(training, output=folder / SceneGenerator.name)
    config = SceneGeneratorConfig(engine.spec.embed_dim, side=scenes.side)
    # First weights are those of the seed, whatever the caller drew before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        judge = SceneJudge()
        generator = SceneGenerator(config, encoder=engine.spec.name, fingerprint=engine.spec.fingerprint)
    # Drawn on the CPU, so that every device begins with the same ones.
    judge, generator = judge.to(engine.encoder.device), generator.to(engine.encoder.device)
    judge_data = JudgeData(judge_scenes(judging, scenes.side))
    judge_path = train_head(judge, judge_data, judging, objective=judge_objective, report=reporting("judge"))
    data = GeneratorData(engine, scenes, folder / "features", told=told)
    path = train_head(generator, data, training, objective=flow_objective, report=reporting("generator"))
    return path, judge_path


def table(values: Mapping[str, Any], count: int, noises: int) -> str:
    """The section's text of these values."""

    def cell(entry: Mapping[str, float]) -> str:
        return percent(Interval(entry["value"], entry["low"], entry["high"]))

    judge = values["judge"]
    lines = [
        "## Pictures of embeddings: a frozen generator\n",
        f"Share of generated pictures, in per cent ± half a 95 % bootstrap interval over {count} prompts ({noises} "
        "noises each, the same for both embeddings), in which the judge sees the color of X and that of Y. A "
        "denial is honoured where Y's color is not seen; the first rows say how often it is seen when nobody speaks of "
        f"it, and when it is asked for. On real renders the judge sees {cell(judge['sensitivity'])} of the colors that "
        f"are there, and leaves {cell(judge['specificity'])} of those unseen that are not. All figures are of one seed "
        "of the generator, of the judge and of the head: intervals say nothing of what other seeds would give.\n",
        "| caption | embedding | " + " | ".join(SEEN) + " | honours “no Y” |",
        "|---" * (len(SEEN) + 3) + "|",
    ]
    for condition, sides in values["seen"].items():
        for side, cells in sides.items():
            honoured = ""
            if denies(condition):
                y = cells["Y's color"]
                honoured = cell({"value": 1 - y["value"], "low": 1 - y["high"], "high": 1 - y["low"]})
            shown = " | ".join(cell(cells[name]) if "Y" in name or asks_for_x(condition) else "" for name in SEEN)
            lines.append(f"| {condition} | {side} | {shown} | {honoured} |")
    return "\n".join(lines)
