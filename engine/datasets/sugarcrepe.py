"""SugarCrepe (Hsieh et al., arXiv 2306.14610): one image, a caption, a hard negative.

On disk: seven JSON files `add_att.json` … `swap_obj.json`, each an object of decimal keys with
`filename` (a COCO val2017 name), `caption`, `negative_caption`. `swap_obj` has no key `"108"` since
that caption was withdrawn: 7511 items; the CSV copy that BiVLC ships (columns `filename, caption,
negative_caption, type, subtype`) still has it: 7512. Both give the same ids for the same items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.choices import OnMissing
from engine.datasets.base import CHOICE, Dataset, ImageRef, Item, Rule, choice_notes, dataset_of
from engine.datasets.files import FilePath, ImageFolder, read_csv, read_json, text_field

SUBSETS = ("add_att", "add_obj", "replace_att", "replace_obj", "replace_rel", "swap_att", "swap_obj")
COLUMNS = ("filename", "caption", "negative_caption", "type", "subtype")
EDITIONS = {
    7511: "the current files (swap_obj without key 108)",
    7512: "the older copy (swap_obj with the withdrawn key 108)",
}
RULE = Rule(
    CHOICE,
    ties="wrong",
    average="micro",
    source="RAIVNLab/sugar-crepe: caption > negative per image, strict; the paper's total is micro",
)
MEANINGS = {"identical options": "both captions are the same text, a tie for every model"}


@dataclass(frozen=True)
class PublishedChoice:
    """A published outcome of one item: its type, subtype, and whether the model was right."""

    type: str
    subtype: str
    correct: bool


def read_sugarcrepe(
    annotations: FilePath, images: FilePath | None = None, *, on_missing: OnMissing = "error"
) -> Dataset:
    """SugarCrepe from the folder of its JSON files or from the CSV copy.

    Args:
        annotations: the folder that holds the seven JSON files (or whose `data/` does), or a CSV file.
        images: the folder of COCO val2017 images; None reads the texts alone.
        on_missing: `"error"` or `"skip"` (leave out items whose image is missing, and say so).

    Returns:
        items `"<type>_<subtype>/<key>"` with texts (caption, negative caption), right index 0; captions keep their
        double and trailing blanks.

    Raises:
        FileNotFoundError: a file or image is missing.
        ValueError: a file does not hold this format.
    """
    path = Path(annotations)
    folder = ImageFolder(images, "sugarcrepe")
    rows = _csv_rows(path) if path.is_file() else _json_rows(path)
    items = tuple(_item(subset, key, row, folder) for subset, key, row in rows)
    missing = folder.check(on_missing)
    counts = Counter(f"{item.type}_{item.subtype}" for item in items)
    notes = (", ".join(f"{name} {count}" for name, count in counts.items()), *choice_notes(items, MEANINGS))
    return dataset_of("sugarcrepe", RULE, items, title="SugarCrepe", editions=EDITIONS, missing=missing, notes=notes)


def read_sugarcrepe_outcomes(path: FilePath) -> list[PublishedChoice]:
    """Per-item outcomes as BiVLC publishes them: the CSV's columns and `correct` (0 or 1).

    Raises ValueError naming file and row for anything else.
    """
    outcomes = []
    for number, row in enumerate(read_csv(path, (*COLUMNS, "correct")), 2):
        if row["correct"] not in ("0", "1"):
            where = f"read_sugarcrepe_outcomes: {path} row {number}"
            raise ValueError(f"{where}: correct must be 0 or 1, got {row['correct']!r}")
        outcomes.append(PublishedChoice(row["type"], row["subtype"], row["correct"] == "1"))
    return outcomes


def _json_rows(path: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    base = path if (path / f"{SUBSETS[0]}.json").is_file() else path / "data"
    absent = [name for name in SUBSETS if not (base / f"{name}.json").is_file()]
    if absent:
        raise FileNotFoundError(
            f"sugarcrepe: {path} must hold {', '.join(f'{name}.json' for name in SUBSETS)} "
            f"(itself or in data/), missing {', '.join(absent)}"
        )
    for subset in SUBSETS:
        entries = read_json(base / f"{subset}.json")
        if not isinstance(entries, dict):
            raise ValueError(f"sugarcrepe: {subset}.json must be an object, got {type(entries).__name__}")
        # The keys are read, never counted: swap_obj has a hole.
        for key, row in entries.items():
            if not isinstance(row, dict):
                raise ValueError(f"sugarcrepe: {subset}/{key} must be an object, got {row!r}")
            yield subset, key, row


def _csv_rows(path: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    seen: Counter[str] = Counter()
    for row in read_csv(path, COLUMNS):
        subset = f"{row['type']}_{row['subtype']}"
        yield subset, str(seen[subset]), row
        seen[subset] += 1


def _item(subset: str, key: str, row: dict[str, str], folder: ImageFolder) -> Item:
    where = f"sugarcrepe: {subset}/{key}"
    if subset not in SUBSETS:
        raise ValueError(f"{where}: type and subtype must be one of {', '.join(SUBSETS)}")
    name = text_field(row, "filename", where=where)
    texts = (text_field(row, "caption", where=where), text_field(row, "negative_caption", where=where))
    kind, subtype = subset.split("_")
    tags = ("identical options",) if texts[0] == texts[1] else ()
    return Item(f"{subset}/{key}", (ImageRef(name, folder.find(name)),), texts, 0, kind, subtype, tags)
