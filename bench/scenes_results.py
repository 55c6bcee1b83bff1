"""Measure any models of the embedded kind, such as its other seeds: ``python -m bench.scenes_results FOLDER``.

For each model given (``--models scenes scenes:runs/scenes-1 …``) the controlled benchmark on withheld combinations,
zero-shot classification and retrieval; for the shipped one also the other splits (a quarter of the items) and the
negation sets. Writes
``FOLDER/<part>.json`` as it goes (a part that the same weights made already is kept, so a stopped run goes on) and
``FOLDER/tables.md``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from engine.atomic_files import written_whole
from engine.benchmarks import scenes, scenes_negation
from engine.benchmarks.scenes_zero_shot import zero_shot_figures
from engine.engine import Engine, load

SHIPPED = "scenes"


def part(path: Path, engine: Engine, make: Callable[[Engine], dict[str, Any]]) -> dict[str, Any]:
    """The result in ``path`` if this very model made it, else made now and written there."""
    made_by = engine.spec.fingerprint
    if path.exists():
        known_result = json.loads(path.read_text())
        if known_result["made_by"] == made_by:
            return known_result["values"]
    values = make(engine)
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps({"made_by": made_by, "values": values}, indent=1) + "\n")
    print(f"{path.name} done", flush=True)
    return json.loads(path.read_text())["values"]


def controlled(engine: Engine, *, split: str, items: int) -> dict[str, Any]:
    benchmark = scenes.ScenesBenchmark(items=items, split=split)
    return scenes.evaluate(engine, benchmark=benchmark).to_dict()


def known(engine: Engine) -> dict[str, Any]:
    """Zero-shot classification (trained and withheld looks) and retrieval among 500."""
    return {
        "zero_shot": {k: asdict(v) for k, v in zero_shot_figures(engine, 1000, seed=5).items()},
        "zero_shot_withheld": {
            k: asdict(v) for k, v in zero_shot_figures(engine, 1000, seed=5, withheld=True).items()
        },
        "retrieval_500": scenes.retrieval_figures(engine, 500, seed=5),
    }


def negation(engine: Engine, *, items: int) -> dict[str, Any]:
    benchmark = scenes_negation.NegationBenchmark(items=items)
    return scenes_negation.evaluate(engine, benchmark=benchmark).to_dict()


def measure(folder: Path, models: list[str], items: int) -> str:
    """All parts of all models; the tables in Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for model in models:
        engine = load(model)
        name = model.replace(":", "_").replace("/", "_")
        plan = [("held_out", items)]
        if model == SHIPPED:
            plan += [("shifted", max(1, items // 4)), ("in_domain", max(1, items // 4))]
        for split, count in plan:
            values = part(
                folder / f"{name}-{split}-{count}.json", engine, partial(controlled, split=split, items=count)
            )
            report = scenes.ScenesReport.from_dict(values)
            lines += [
                f"\n### {model}: {split}, segments {report.segmenter}, {report.benchmark.items} items a category\n",
                report.to_markdown(),
            ]
        facts = part(folder / f"{name}-words.json", engine, known)
        lines += [f"\n### {model}: zero-shot and retrieval\n", words_table(facts)]
        if model == SHIPPED:
            values = part(folder / f"{name}-negation.json", engine, partial(negation, items=items))
            denials = scenes_negation.NegationReport.from_dict(values)
            lines += [f"\n### {model}: negation\n", denials.to_markdown()]
    return "\n".join(lines).strip() + "\n"


def words_table(facts: dict[str, Any]) -> str:
    names = list(facts["zero_shot"])
    lines = ["| looks | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for title, key in (("seen in training", "zero_shot"), ("withheld", "zero_shot_withheld")):
        cells = [scenes.percent(scenes.Interval(**facts[key][name])) for name in names]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    recall = facts["retrieval_500"]
    both = f"{100 * recall['image_to_text_r1']:.1f} image→text, {100 * recall['text_to_image_r1']:.1f} text→image"
    return "\n".join([*lines, "", f"R@1 among 500 scenes whose captions name every group in full: {both}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=[SHIPPED])
    parser.add_argument("--items", type=int, default=400)
    arguments = parser.parse_args()
    tables = measure(arguments.folder, arguments.models, arguments.items)
    (arguments.folder / "tables.md").write_text(tables)
    print(tables)


if __name__ == "__main__":
    main()
