"""The section on regions from one pass of the encoder: what they tell apart, and how many images a second they take."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from engine.atomic_files import write_text
from engine.benchmarks import scenes
from engine.engine import Engine, load
from engine.heads.base import shipped_head
from engine.heads.registry import load_window_head
from engine.heads.window_head import WindowHead, WindowHeadConfig
from engine.metrics import Interval
from engine.results import scorers
from engine.results.figures import (
    Figure,
    check_figures,
    compare_figures,
    read_figures,
    renew_figures,
    write_figures,
)
from engine.results.json_lines import read_json_lines
from engine.results.run import Run
from engine.scenes.items import controlled_items
from engine.scorers.sgi import SGI
from engine.training.heads import BatchLoss, HeadTrainConfig, train_head
from engine.training.presets import TRAINING
from engine.training.windows import (
    WindowData,
    WindowLoss,
    WindowObjective,
    WindowPictures,
    begun,
    window_data,
    wordings_of,
)

NAME = "onepass"
CATEGORIES = ("color", "size", "material", "quantity")
SPLIT, ITEMS, QUICK_ITEMS = "held_out", 400, 25
SEEDS = (0, 1, 2)
# Pictures and rounds of the timing; of the rounds the fastest counts.
TIMED, ROUNDS = 32, 3
# Made by the section before, over the same items.
RE_ENCODED = {"sgi rescaled": SGI(crops="rescaled"), "sgi native": SGI(crops="native")}
UNTRAINED = {
    "windows, untrained": SGI(crops="windows"),
    "windows, untrained, whole image left out": SGI(crops="windows", full_image=False),
}
SHIPPED = "windows, trained head"
SERVED = SGI(crops="windows", head="scenes", full_image=False)
WITH_WHOLE = f"{SHIPPED}, whole image too"
TITLES = {
    "sgi rescaled": "crops re-encoded, rescaled",
    "sgi native": "crops re-encoded, native scale",
}


def train(run: Run, *, steps: int | None = None, pictures: WindowPictures | None = None) -> None:
    """Train a head of each seed, or go on with it, and put the figures of all where the section reads them.

    `steps` and `pictures`: smaller ones for a test. Raises ResultsDiffer, with the new figures written, where those of
    any seed do not meet the ones they replace.
    """
    peaksim = load("scenes", device="cpu")
    data = _data(run, peaksim, pictures or WindowPictures())
    objective = WindowObjective()
    loss = BatchLoss(WindowLoss(objective, wordings_of(peaksim, objective.wordings)), facts=asdict(objective))
    found = []
    for seed in SEEDS:
        config = training(run, seed, steps)
        head = begun(peaksim, data, WindowHeadConfig(), seed=seed)

        def report(line: str, step: int, steps: int, seed: int = seed) -> None:
            run.progress(f"{NAME}: seed {seed}: {line}", step, steps)

        path = train_head(head, data, config, objective=loss, report=report)
        trained = replace(SERVED, head=load_window_head(path, fingerprint=peaksim.spec.fingerprint))
        found += _measured(run, peaksim, {f"{SHIPPED}, seed {seed}": trained}, run.items(ITEMS, QUICK_ITEMS))
    renew_figures(run.figures / f"{NAME}-seeds.jsonl", found)


def training(run: Run, seed: int, steps: int | None = None) -> HeadTrainConfig:
    """Settings of one seed: those of `peaksim train window_head`, in a folder of the run."""
    preset = TRAINING[WindowHead.name]
    steps = steps or preset.steps
    return replace(
        preset,
        output=run.folder / NAME / str(seed),
        seed=seed,
        steps=steps,
        warmup_steps=min(preset.warmup_steps, steps),
        evaluate_every=0,
    )


def section(run: Run) -> str:
    """The table. A quick run measures few items of the shipped head and raises ResultsDiffer where figures differ."""
    peaksim = load("scenes", device="cpu")
    rows = {**UNTRAINED, SHIPPED: SERVED, WITH_WHOLE: replace(SERVED, full_image=True)}
    path = run.figures / f"{NAME}.jsonl"
    if run.quick:
        found = _measured(run, peaksim, rows, QUICK_ITEMS)
        check_figures(path, found)
        return _table(found, [], {})
    held = read_figures(run.figures / f"{scorers.NAME}.jsonl")
    wanted = {f"{name} {SPLIT} {category}" for name in RE_ENCODED for category in CATEGORIES}
    figures = [figure for figure in held if figure.name in wanted] + _measured(run, peaksim, rows, ITEMS)
    seeds = read_figures(run.figures / f"{NAME}-seeds.jsonl", written_by="make results-train")
    # The shipped head is that of the first seed: the two files must not drift apart.
    first = [figure for figure in seeds if f", seed {SEEDS[0]} " in figure.name]
    compare_figures(path.name, _renamed(figures, f"{SHIPPED}, seed {SEEDS[0]}"), first)
    write_figures(path, figures)
    made_by = f"{peaksim.spec.fingerprint} {peaksim.segmenter.name} {_head_tag()} {torch.get_num_threads()} threads"
    speed = run.part(f"{NAME}-speed", made_by, lambda: speeds(peaksim, {**RE_ENCODED, **rows}))
    write_speeds(run.figures / f"{NAME}-speed.jsonl", speed)
    return _table(figures, seeds, speed)


def speeds(peaksim: Engine, rows: Mapping[str, SGI], *, pictures: int = TIMED, rounds: int = ROUNDS) -> dict[str, Any]:
    """Images a second of each way to regions, from pictures to features, in turns; the fastest of `rounds` counts."""
    items = controlled_items("color", -(-pictures // 2), seed=2026, split=SPLIT)
    images = [Image.fromarray(pixels) for item in items for pixels in item.images()][:pictures]
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(rounds):
        for name, scorer in rows.items():
            started = time.perf_counter()
            peaksim.encode_images(images, scorer=scorer)
            best[name] = min(best[name], time.perf_counter() - started)
    return {"threads": torch.get_num_threads(), **{name: len(images) / seconds for name, seconds in best.items()}}


def write_speeds(path: Path, speed: Mapping[str, Any]) -> None:
    """One JSON line for each way to regions of what `speeds` gave."""
    lines = [
        {"name": name, "threads": speed["threads"], "images_per_second": round(rate, 2)}
        for name, rate in speed.items()
        if name != "threads"
    ]
    write_text(path, "\n".join(map(json.dumps, lines)))


def read_speeds(path: Path) -> dict[str, float]:
    """Images a second of each way, as `write_speeds` wrote them."""
    return {line["name"]: line["images_per_second"] for line in read_json_lines(path)}


def _data(run: Run, peaksim: Engine, pictures: WindowPictures) -> WindowData:
    layers = WindowHeadConfig().fitted(peaksim.spec).layers
    return window_data(peaksim, layers, pictures, run.folder / "features", told=run.progress)


def _head_tag() -> str:
    return load_window_head(shipped_head(WindowHead.name)).tag


def _measured(run: Run, peaksim: Engine, rows: Mapping[str, SGI], items: int) -> list[Figure]:
    """Group score of each row on each category."""
    benchmark = scenes.ScenesBenchmark(items=items, split=SPLIT, categories=CATEGORIES)
    report = scenes.evaluate(peaksim, rows, benchmark, progress=run.progress)
    return [Figure.of(f"{row.scorer} {SPLIT} {row.category}", row.items, row.group) for row in report.results]


def _renamed(figures: Sequence[Figure], name: str) -> list[Figure]:
    """The figures of the shipped head under another name."""
    return [
        Figure(figure.name.replace(SHIPPED, name), figure.items, figure.value, figure.low, figure.high)
        for figure in figures
        if figure.name.startswith(f"{SHIPPED} {SPLIT} ")
    ]


def _table(figures: Sequence[Figure], seeds: Sequence[Figure], speed: Mapping[str, Any]) -> str:
    held = {figure.name: figure for figure in (*figures, *seeds)}
    names = list(dict.fromkeys(name.partition(f" {SPLIT} ")[0] for name in held))
    words = (
        "## Regions from one pass\n\n"
        "SGI with the same 35 regions made in different ways, on held-out combinations, segments parsed from the "
        f"captions: group score in per cent ± half a 95 % interval over {figures[0].items} items. Images a second from "
        f"decoded pictures to features, on {speed.get('threads', 1)} thread(s), in turns within one run, the fastest "
        f"of {ROUNDS} rounds."
    )
    lines = [
        words,
        "",
        "| regions | " + " | ".join(map(str.capitalize, CATEGORIES)) + " | images/s | × native |",
        "|---" * (len(CATEGORIES) + 3) + "|",
    ]
    for name in names:
        cells = [_cell(held[f"{name} {SPLIT} {category}"]) for category in CATEGORIES]
        rate = speed.get(name)
        timed = ["", ""] if rate is None else [f"{rate:.0f}", f"{rate / speed['sgi native']:.1f}"]
        lines.append(f"| {TITLES.get(name, name)} | " + " | ".join([*cells, *timed]) + " |")
    return "\n".join(lines)


def _cell(figure: Figure) -> str:
    return scenes.percent(Interval(figure.value, figure.low, figure.high))
