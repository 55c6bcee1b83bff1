"""The demonstration: the controlled benchmark scored, drawn and laid out on one page."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from engine.atomic_files import write_text
from engine.benchmarks.demo_examples import (
    GLOBAL,
    SGI_NATIVE,
    Example,
    Sheet,
    controlled_examples,
    negation_examples,
)
from engine.benchmarks.demo_page import page
from engine.benchmarks.scenes import (
    STANDARD_SCORERS,
    ScenesBenchmark,
    ScenesReport,
    score_categories,
    summarise,
)
from engine.benchmarks.shared_features import Told, features_for
from engine.engine import Engine, load
from engine.metrics import Interval, bootstrap_interval, multiple_choice
from engine.scenes.items import ITEM_SPLITS
from engine.scenes.negation import NegationItem, negation_items

# Enough to tell the scorers apart, few enough that all of it takes less than two minutes on two cores.
ITEMS = 120
NEGATION_ITEMS = 60

NEXT_STEPS = """\
The same with your own pictures and a CLIP of open_clip (its weights are fetched once):

  peaksim score photos/ --text "a red cup on a blue table" --text "a blue cup on a red table" \\
      --scorer sgi --model open_clip:ViT-B-32/laion2b_s34b_b79k
  peaksim explain photos/cup.jpg --text "a red cup on a blue table" --draw found.png \\
      --scorer sgi --model open_clip:ViT-B-32/laion2b_s34b_b79k

In Python:

  import engine
  peaksim = engine.load("open_clip:ViT-B-32/laion2b_s34b_b79k")
  scores = peaksim.score(["photos/cup.jpg"], ["a red cup on a blue table"], scorer="sgi")
  peaksim.explain("photos/cup.jpg", "a red cup on a blue table").draw("found.png")"""


@dataclass(frozen=True)
class DemoConfig:
    """What the demonstration shows."""

    output: Path = Path("demo")
    """Folder of the page, its pictures and the table; made if absent, its files replaced."""
    items: int = ITEMS
    """Items of each category; more give narrower intervals and take longer."""
    seed: int = 2026
    """Of the items."""
    split: str = "held_out"
    """held_out (combinations the embedded model was never trained on), in_domain or shifted."""
    model: str = "scenes"
    """Name of the encoder; `peaksim models` lists them."""

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown split or no items."""
        if self.split not in ITEM_SPLITS:
            raise ValueError(f"DemoConfig: split must be of {', '.join(ITEM_SPLITS)}, got {self.split!r}")
        if self.items < 1:
            raise ValueError(f"DemoConfig: items must be at least 1, got {self.items}")


@dataclass(frozen=True)
class DemoResult:
    """What came of it.

    Attributes
    ----------
    report: group scores of every scorer and category.
    negation: by scorer, the share of right choices in the negation set (ties wrong, chance 25 %).
    negation_items: how many choices that is of.
    examples: the items that are drawn.
    page, table: the HTML page and the JSON file with all of this.
    seconds: how long it took, loading included.
    next_steps: how to do the same with other pictures and models.
    """

    report: ScenesReport
    negation: Mapping[str, Interval]
    negation_items: int
    examples: tuple[Example, ...]
    page: Path
    table: Path
    seconds: float
    next_steps: str = NEXT_STEPS

    def to_dict(self) -> dict[str, Any]:
        """Everything but the advice as plain values for JSON; paths as text."""
        values = asdict(self)
        values["report"] = self.report.to_dict()
        del values["next_steps"]
        return values | {"page": str(self.page), "table": str(self.table)}


def run(config: DemoConfig, *, engine: Engine | None = None, progress: Told | None = None) -> DemoResult:
    """Score the controlled benchmark and write ``index.html``, ``results.json`` and ``pictures/``.

    Arguments: ``engine`` in place of loading ``config.model``; ``progress`` is called with (what is being
    done, pictures encoded, pictures to encode in all). Raises what loading and scoring raise, OSError where
    the folder cannot be written.
    """
    started = time.monotonic()
    if engine is None:
        engine = load(config.model)
    pictures = config.output / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    sheet = Sheet(config.output, pictures, engine, STANDARD_SCORERS[SGI_NATIVE])
    benchmark = ScenesBenchmark(items=config.items, split=config.split, seed=config.seed)
    scored, examples = [], []
    for part in score_categories(engine, STANDARD_SCORERS, benchmark, progress=progress):
        scored.append(part)
        examples += controlled_examples(part, sheet)
    items = negation_items(min(config.items, NEGATION_ITEMS), seed=config.seed, split=config.split)
    choices = score_choices(engine, items, progress=progress)
    examples += negation_examples(items, choices, sheet)
    right = [item.correct for item in items]
    result = DemoResult(
        summarise(engine, benchmark, scored, STANDARD_SCORERS),
        {name: bootstrap_interval(multiple_choice(cells, right).credit) for name, cells in choices.items()},
        len(items),
        tuple(examples),
        config.output / "index.html",
        config.output / "results.json",
        time.monotonic() - started,
    )
    write_text(result.page, page(result))
    write_text(result.table, json.dumps(result.to_dict(), indent=1, ensure_ascii=False, allow_nan=False))
    return result


def score_choices(engine: Engine, items: list[NegationItem], *, progress: Told | None = None) -> dict[str, Tensor]:
    """Scores ``(n, 4)`` of every picture against its four captions, without the rescaled sgi."""
    scorers = {name: STANDARD_SCORERS[name] for name in (GLOBAL, "max_sim", SGI_NATIVE)}
    pictures = [Image.fromarray(item.image()) for item in items]
    captions = [caption for item in items for caption in item.captions]
    rows = torch.arange(len(items)).repeat_interleave(4)
    found = {}
    for name, images, texts in features_for(engine, pictures, captions, scorers, progress=_within(progress)):
        scores = engine.score(images[rows], texts, scorer=scorers[name], pairs=True)
        found[name] = scores.view(len(items), 4)
    return found


def _within(progress: Told | None) -> Told | None:
    if progress is None:
        return None
    return lambda what, done, total: progress(f"negation: {what}", done, total)
