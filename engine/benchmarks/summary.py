"""From scores to a result: slices with intervals, ties, margins and what the baselines reach.

The official figure of a benchmark stands in ``headline``; beside it every table holds the figures under
honest rules (ties wrong, ties shared), because some official rules reward a scorer that knows nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from engine.datasets.base import Dataset, Item
from engine.datasets.bivlc import PublishedGroup
from engine.datasets.sugarcrepe import PublishedChoice
from engine.metrics import (
    Bools,
    Floats,
    GroupOutcomes,
    Interval,
    bootstrap_interval,
    group_means,
    group_scores,
    multiple_choice,
)

ALL, MACRO = "all", "macro"
TIED_SHOWN = 20
# Columns of choice benchmarks: the tie rule behind each name.
CHOICE_COLUMNS = {"strict": "wrong", "argmax": "first", "shared": "share"}


@dataclass(frozen=True)
class Line:
    """A line of a table: a slice of the items, how many they are, and each metric with its 95 % interval.

    In the line ``"macro"`` the count is that of the types averaged over.
    """

    name: str
    count: int
    values: Mapping[str, Interval]


@dataclass(frozen=True)
class Result:
    """What an evaluation found; shares are in 0..1.

    Attributes
    ----------
    benchmark, edition: which items.
    subject, fingerprint: which scorer.
    headline: (line, metric) of the official figure.
    lines: ``"all"`` first, then ``"macro"`` where it is defined, types, subtypes and tags.
    rule: the official rule in words.
    tie_rate: share of items in which a comparison that decides is exactly equal.
    tied_ids: the first such items.
    margin: mean, median and the share below 0.001 of the deciding differences of right items.
    picked: share of each option's number among the answers (choice benchmarks).
    baselines: the headline metric of text-only scorers, ties shared, and of pure chance.
    missing: images that were not there.
    notes: what else a reader must know.
    """

    benchmark: str
    edition: str
    subject: str
    fingerprint: str
    headline: tuple[str, str]
    lines: tuple[Line, ...]
    rule: str
    tie_rate: float = 0.0
    tied_ids: tuple[str, ...] = ()
    margin: Mapping[str, float] = field(default_factory=dict)
    picked: Mapping[str, float] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)
    missing: int = 0
    notes: tuple[str, ...] = ()

    def line(self, name: str) -> Line:
        """The line of this name; KeyError with the names there are."""
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(f"{self.benchmark} has no line {name!r}, only {[line.name for line in self.lines]}")

    @property
    def score(self) -> Interval:
        """The official figure."""
        return self.line(self.headline[0]).values[self.headline[1]]

    def to_json(self) -> str:
        """Everything as one JSON object; ``Result.from_json`` reads it back."""
        return json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """What ``to_json`` wrote."""
        fields: dict[str, Any] = json.loads(text)
        lines = tuple(
            Line(line["name"], line["count"], {key: Interval(**cell) for key, cell in line["values"].items()})
            for line in fields.pop("lines")
        )
        for name in ("headline", "tied_ids", "notes"):
            fields[name] = tuple(fields[name])
        return cls(lines=lines, **fields)


def make_lines(values: Mapping[str, Floats | Bools], slices: Sequence[Sequence[str]]) -> tuple[Line, ...]:
    """One line for each slice: all, types, subtypes, tags, each in order of first appearance.

    Arguments: ``values``, for each metric one number ``(n,)`` an item; ``slices``, for each item the names of
    the lines it belongs to.
    """
    members: dict[str, list[int]] = {}
    for row, names in enumerate(slices):
        for name in names:
            members.setdefault(name, []).append(row)
    return tuple(
        Line(name, len(rows), {metric: bootstrap_interval(cells[rows]) for metric, cells in values.items()})
        for name, rows in sorted(members.items(), key=lambda entry: _order(entry[0]))
    )


def _order(name: str) -> tuple[bool, bool, int]:
    """All, types, subtypes, tags."""
    return name != ALL, name.startswith("#"), name.count("/")


def slices_of(items: Sequence[Item]) -> list[list[str]]:
    """For each item: ``"all"``, its type, its type/subtype, and its tags as ``"#tag"``."""
    names = []
    for item in items:
        own = [ALL, item.type, f"{item.type}/{item.subtype}" if item.subtype else ""]
        names.append([name for name in own if name] + [f"#{tag}" for tag in item.tags])
    return names


def summarise_group(dataset: Dataset, scores: Floats, subject: tuple[str, str]) -> Result:
    """The result of a group dataset from scores ``(n, 2, 2)``; ``subject`` is (name, fingerprint)."""
    outcomes = group_scores(scores, ids=[item.id for item in dataset.items])
    return Result(
        dataset.name,
        dataset.edition,
        *subject,
        headline=(ALL, "group"),
        lines=make_lines(group_columns(outcomes), slices_of(dataset.items)),
        rule=dataset.rule.source,
        tie_rate=float(outcomes.tied.mean()),
        tied_ids=tied_ids(dataset.items, outcomes.tied),
        margin=margins(outcomes.margin, outcomes.group),
        # To a scorer that reads the text alone both images are the same: it wins one of two, never both.
        baselines={"chance": 1 / 6, "blind, whatever it prefers": 0.0},
        missing=len(dataset.missing),
        notes=dataset.notes,
    )


def summarise_choice(
    dataset: Dataset, scores: Floats, subject: tuple[str, str], blind: Mapping[str, Floats] | None = None
) -> Result:
    """The result of a choice dataset from scores ``(n, k)``.

    Arguments: ``subject`` is (name, fingerprint); ``blind``, scores of text-only baselines on the same items.
    """
    ids = [item.id for item in dataset.items]
    right = [item.right for item in dataset.items if item.right is not None]
    outcomes = {column: multiple_choice(scores, right, ties=rule, ids=ids) for column, rule in CHOICE_COLUMNS.items()}
    official = next(name for name, rule in CHOICE_COLUMNS.items() if rule == dataset.rule.ties)
    columns = {"accuracy": outcomes[official].credit}
    columns |= {name: outcome.credit for name, outcome in outcomes.items()}
    lines = make_lines(columns, slices_of(dataset.items))
    macro, groups = macro_line(dataset, columns)
    if macro is not None:
        lines = (lines[0], macro, *lines[1:])
    on_macro = dataset.rule.average == "macro" and macro is not None
    any_outcome = outcomes[official]
    picked = np.bincount(any_outcome.picked, minlength=scores.shape[1]) / len(scores)
    baselines = {"chance": 1 / scores.shape[1]}
    for name, cells in (blind or {}).items():
        credit = multiple_choice(cells, right, ties="share").credit
        baselines[name] = _average(credit, groups if on_macro else None)
    notes = dataset.notes
    if dataset.rule.average == "macro" and not on_macro:
        notes = (
            *notes,
            "no type has enough items for the official macro average; the headline is the micro one",
        )
    return Result(
        dataset.name,
        dataset.edition,
        *subject,
        headline=(MACRO if on_macro else ALL, "accuracy"),
        lines=lines,
        rule=f"{dataset.rule.source}; ties {dataset.rule.ties}",
        tie_rate=float(any_outcome.tied.mean()),
        tied_ids=tied_ids(dataset.items, any_outcome.tied),
        margin=margins(any_outcome.margin, outcomes["strict"].credit > 0),
        picked={str(option): float(share) for option, share in enumerate(picked)},
        baselines=baselines,
        missing=len(dataset.missing),
        notes=notes,
    )


def summarise_published_groups(outcomes: Sequence[PublishedGroup], name: str) -> Result:
    """BiVLC's figures from published outcomes, without a model."""
    ipos, ineg, tpos, tneg = (
        np.array([getattr(outcome, part) for outcome in outcomes], dtype=bool)
        for part in ("ipos_2t", "ineg_2t", "tpos_2i", "tneg_2i")
    )
    columns = _columns(ipos, ineg, tpos, tneg)
    slices = [[ALL, outcome.type, f"{outcome.type}/{outcome.subtype}"] for outcome in outcomes]
    edition = f"{len(outcomes)} published outcomes"
    return Result("bivlc", edition, name, "published", (ALL, "group"), make_lines(columns, slices), "published")


def summarise_published_choices(outcomes: Sequence[PublishedChoice], name: str) -> Result:
    """SugarCrepe's figures from published outcomes, without a model."""
    correct = np.array([outcome.correct for outcome in outcomes], dtype=np.float64)
    slices = [[ALL, outcome.type, f"{outcome.type}/{outcome.subtype}"] for outcome in outcomes]
    lines = make_lines({"accuracy": correct}, slices)
    edition = f"{len(outcomes)} published outcomes"
    return Result("sugarcrepe", edition, name, "published", (ALL, "accuracy"), lines, "published")


def group_columns(outcomes: GroupOutcomes) -> dict[str, Bools]:
    """The metrics of a group benchmark, totals under Winoground's names and parts under BiVLC's."""
    return _columns(outcomes.ipos_2t, outcomes.ineg_2t, outcomes.tpos_2i, outcomes.tneg_2i)


def macro_line(dataset: Dataset, columns: Mapping[str, Floats]) -> tuple[Line | None, list[str]]:
    """The mean over types by the dataset's rule, or None; and for each item its type, "" where left out."""
    rule = dataset.rule
    types = [f"{item.type}/{item.subtype}" if item.subtype else item.type for item in dataset.items]
    means = group_means(next(iter(columns.values())), types)
    kept = {
        name
        for name, (_, count) in means.items()
        if name and count >= rule.macro_min and name not in rule.macro_exclude
    }
    if not kept:
        return None, types
    rows = [row for row, name in enumerate(types) if name in kept]
    names = [types[row] for row in rows]
    cells = {metric: bootstrap_interval(values[rows], groups=names) for metric, values in columns.items()}
    return Line(MACRO, len(kept), cells), [name if name in kept else "" for name in types]


def margins(differences: Floats, right: Bools) -> dict[str, float]:
    """Mean and median of the deciding difference, the median of the right items, and how many are thin.

    A model can rank better while its margins vanish; ``thin`` is the share of right items decided by < 0.001,
    where a coarser dtype could decide otherwise.
    """
    found = {"mean": float(differences.mean()), "median": float(np.median(differences))}
    if right.any():
        won = differences[right]
        found |= {"median_right": float(np.median(won)), "thin": float((won < 1e-3).mean())}
    return found


def tied_ids(items: Sequence[Item], tied: Bools) -> tuple[str, ...]:
    """Ids of the first tied items."""
    return tuple(items[row].id for row in np.flatnonzero(tied)[:TIED_SHOWN])


def _average(credit: Floats, groups: Sequence[str] | None) -> float:
    if groups is None:
        return float(credit.mean())
    means = group_means(credit, list(groups))
    return float(np.mean([mean for name, (mean, _) in means.items() if name]))


def _columns(ipos: Bools, ineg: Bools, tpos: Bools, tneg: Bools) -> dict[str, Bools]:
    text, image = ipos & ineg, tpos & tneg
    parts = {"Ipos_2T": ipos, "Ineg_2T": ineg, "Tpos_2I": tpos, "Tneg_2I": tneg}
    return {"text": text, "image": image, "group": text & image, **parts}
