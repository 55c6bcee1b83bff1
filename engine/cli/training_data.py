"""Which data `peaksim train` takes: rendered scenes, or captioned pictures of one's own in three formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

from engine.cli import tables
from engine.cli.options import OptionalFile, OptionalFolder, Shared
from engine.cli.progress import Told, bar
from engine.datasets.captioned import CaptionedImages, Problem
from engine.datasets.coco import read_coco
from engine.datasets.trohn import read_trohn
from engine.datasets.web_dataset import read_web_dataset
from engine.training.processes import processes

SCENES = "scenes"
KINDS = "scenes, coco:FILE.json, trohn:FILE.csv or webdataset:PATTERN"
# Problems that are named before they are only counted.
NAMED = 5


@dataclass(frozen=True, kw_only=True)
class OnData(Shared):
    """Options that name the data."""

    data: str = SCENES
    """Rendered scenes, or your own: coco:CAPTIONS.json, trohn:ROWS.csv or "webdataset:SHARDS-*.tar"."""
    images: OptionalFolder = None
    """Folder of the pictures of coco and trohn."""
    negative_images: OptionalFolder = None
    """Folder of trohn's negative pictures; by default that of the pictures."""
    instances: OptionalFile = None
    """COCO's JSON of instances, which says what is in each picture, and so what is not."""

    @property
    def on_scenes(self) -> bool:
        """Whether the data are rendered."""
        if self.data != SCENES:
            return False
        given = [name for name in ("images", "negative_images", "instances") if getattr(self, name) is not None]
        if given:
            option = given[0].replace("_", "-")
            raise ValueError(f"--{option}: goes with data of your own ({KINDS}), got --data {SCENES}")
        return True

    def read(self) -> CaptionedImages:
        """The user's data; what was left out is reported.

        Raises ValueError for another kind, options that do not belong to it, and what the readers raise.
        """
        kind, _, place = self.data.partition(":")
        if kind not in ("coco", "trohn", "webdataset") or not place:
            raise ValueError(f"--data: must be {KINDS}, got {self.data!r}")
        belong: dict[str, tuple[str, ...]] = {
            "coco": ("images", "instances"), "trohn": ("images", "negative_images"), "webdataset": ()
        }  # fmt: skip
        for name in ("images", "negative_images", "instances"):
            option = name.replace("_", "-")
            if getattr(self, name) is not None and name not in belong[kind]:
                raise ValueError(f"--{option}: {kind} has no use for it")
        if kind == "webdataset":
            found = read_web_dataset(place)
        elif self.images is None:
            raise ValueError(f"--images: {kind} needs the folder of its pictures")
        elif kind == "coco":
            found = read_coco(place, self.images, self.instances)
        else:
            found = read_trohn(place, self.images, self.negative_images)
        report(f"{len(found)} items")
        report_problems(found.problems)
        return found


def report(text: str) -> None:
    """Say how a training is getting on; of several processes the first one speaks."""
    if processes().is_main:
        tables.report(text)


def check_figure_items(items: int) -> None:
    """Raise ValueError for figures of no item at all."""
    if items < 1:
        raise ValueError(f"--figure-items must be at least 1, got {items}; --skip-figures leaves the figures out")


def check_batch(batch_size: int, items: int) -> None:
    """Raise ValueError for a batch of more items than there are, before anything is computed of them."""
    # No items at all are refused by what makes them.
    if 0 < items < batch_size:
        raise ValueError(f"--batch-size: must be at most the {items} items that are trained on, got {batch_size}")


@dataclass(frozen=True)
class Speaker:
    """Says how far features and training are: a bar where a person sees it, and lines that a log keeps."""

    drawn: Told | None

    def features(self, what: str, done: int, total: int) -> None:
        """Told (of what features are computed, how many there are, of how many)."""
        if self.drawn is None:
            report(f"features of {what}: {done}/{total}")
        else:
            self.drawn(f"features of {what}", done, total)

    def step(self, words: str, step: int, steps: int) -> None:
        """Told (what a step gave, which step it is, of how many)."""
        report(f"step {step}/{steps}  {words}")
        if self.drawn is not None:
            self.drawn("training", step, steps)


@contextmanager
def speaking() -> Iterator[Speaker]:
    """Of several processes the first one speaks."""
    with bar("training") if processes().is_main else nullcontext() as drawn:
        yield Speaker(drawn)


def show_trained(*, as_json: bool, use: str, facts: Mapping[str, str], model: str = "scenes") -> None:
    """Say on standard output how a head of this model, or a model, is used; of several processes the first speaks."""
    if not processes().is_main:
        return
    if as_json:
        tables.show_json(dict(facts))
    else:
        tables.show_line(f"trained; use it as {with_model(model, use)}")


def with_model(model: str, use: str) -> str:
    """Options that use what was trained, behind that of its model where commands do not take it by themselves."""
    return use if model == "scenes" else f"--model {model} {use}"


def report_problems(problems: tuple[Problem, ...]) -> None:
    """Say what was left out: the first few by name, the others by their number."""
    for problem in problems[:NAMED]:
        report(f"left out {problem}")
    if len(problems) > NAMED:
        report(f"left out {len(problems) - NAMED} more")


NegativesOption = Literal["auto", "file", "swaps", "negation", "none"]
