"""BiVLC (Miranda et al., arXiv 2406.09952): an image and its caption against a generated negative of each.

The set lives on the hub alone (`imirandam/BiVLC`, split test, 2933 rows). This reader takes an export: a
CSV (or JSON lines) with the hub's columns `image, caption, negative_caption, negative_image, type, subtype`
in hub order, in which `image` and `negative_image` are file names below the image folder. Such an export
is made once with the `datasets` library: save `row["image"]` and `row["negative_image"]` of row n as
`<n>_0.png` and `<n>_1.png` and write the names in their place.

The repository's result tables hold one outcome per item under one of two names for the same columns; their
`image` columns hold the printed form of a Python object and are never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.choices import OnMissing
from engine.datasets.base import GROUP, Dataset, ImageRef, Item, Rule, count_notes, dataset_of
from engine.datasets.files import FilePath, ImageFolder, read_csv, read_json_lines, text_field

COLUMNS = ("image", "caption", "negative_caption", "negative_image", "type", "subtype")
EDITIONS = {2933: "the official count"}
RULE = Rule(GROUP, ties="wrong", average="micro", source="IMirandaM/BiVLC: strict comparisons, mean of items")
MEANINGS = {
    "identical options": "both captions are the same text, a tie for every model",
    "identical images": "both images are one file, a tie for every model",
}
# The code writes the names on the left; the committed tables carry those on the right.
RESULT_COLUMNS = {
    "Ipos_2T": "text_score_i0",
    "Ineg_2T": "text_score_i1",
    "Tpos_2I": "image_score_c0",
    "Tneg_2I": "image_score_c1",
    "I2T": "text_score",
    "T2I": "image_score",
    "group_score": "group_score",
}


@dataclass(frozen=True)
class PublishedGroup:
    """A published outcome of one item: type, subtype, and the four comparisons in BiVLC's names."""

    type: str
    subtype: str
    ipos_2t: bool
    ineg_2t: bool
    tpos_2i: bool
    tneg_2i: bool


def read_bivlc(annotations: FilePath, images: FilePath | None = None, *, on_missing: OnMissing = "error") -> Dataset:
    """BiVLC from an export of the hub's table.

    Args:
        annotations: the `.csv` or `.jsonl` file described above.
        images: the folder its file names start from; None reads the texts alone.
        on_missing: `"error"` or `"skip"`.

    Returns:
        group items `"<row>"` (hub order, from 0): image 0 and text 0 are the originals.

    Raises:
        FileNotFoundError: images missing.
        ValueError: another format, or a printed image object in place of a file name.
    """
    path = Path(annotations)
    finder = ImageFolder(images, "bivlc")
    items = tuple(_item(row, number, finder) for number, row in enumerate(_rows(path)))
    missing = finder.check(on_missing)
    notes = count_notes(items, MEANINGS)
    return dataset_of("bivlc", RULE, items, title="BiVLC", editions=EDITIONS, missing=missing, notes=notes)


def read_bivlc_outcomes(path: FilePath) -> list[PublishedGroup]:
    """Per-item outcomes of a result table, under either set of column names.

    Raises:
        ValueError: a cell that is no truth value, and for a row whose totals contradict its parts.
    """
    rows = read_csv(path, ("type", "subtype", "group_score"))
    header = set(rows[0]) if rows else set()
    names = next(
        (
            chosen
            for chosen in (dict(zip(RESULT_COLUMNS, RESULT_COLUMNS, strict=True)), RESULT_COLUMNS)
            if set(chosen.values()) <= header
        ),
        None,
    )
    if names is None:
        raise ValueError(
            f"read_bivlc_outcomes: {path} must have rows with columns {', '.join(RESULT_COLUMNS)} or "
            f"{', '.join(RESULT_COLUMNS.values())}, got {', '.join(sorted(header)) or 'none'}"
        )
    outcomes = []
    for number, row in enumerate(rows, 2):
        won = {key: _truth(row[column], f"{path} row {number}, {column}") for key, column in names.items()}
        text, image = won["Ipos_2T"] and won["Ineg_2T"], won["Tpos_2I"] and won["Tneg_2I"]
        if (won["I2T"], won["T2I"], won["group_score"]) != (text, image, text and image):
            raise ValueError(f"read_bivlc_outcomes: {path} row {number}: totals must follow from the parts")
        parts = (won[name] for name in ("Ipos_2T", "Ineg_2T", "Tpos_2I", "Tneg_2I"))
        outcomes.append(PublishedGroup(row["type"], row["subtype"], *parts))
    return outcomes


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".jsonl":
        yield from (row for _, row in read_json_lines(path))
    elif path.suffix == ".csv":
        yield from read_csv(path, COLUMNS)
    else:
        raise ValueError(f"bivlc: annotations must be a .csv or .jsonl file, got {path.name!r}")


def _item(row: dict[str, Any], number: int, finder: ImageFolder) -> Item:
    where = f"bivlc: row {number}"
    images = []
    for column in ("image", "negative_image"):
        name = text_field(row, column, where=where)
        if name.startswith("<PIL."):
            raise ValueError(
                f"{where}: {column} must be a file name, got the printed form of an image ({name[:40]!r}…); "
                "result tables hold these, export the hub's table instead"
            )
        images.append(ImageRef(name, finder.find(name)))
    texts = (text_field(row, "caption", where=where), text_field(row, "negative_caption", where=where))
    tags = ("identical options",) * (texts[0] == texts[1]) + ("identical images",) * (images[0] == images[1])
    return Item(
        str(number),
        tuple(images),
        texts,
        None,
        text_field(row, "type", where=where),
        text_field(row, "subtype", where=where),
        tags,
    )


def _truth(cell: str, where: str) -> bool:
    if cell not in ("True", "False", "1", "0"):
        raise ValueError(f"read_bivlc_outcomes: {where} must be True or False, got {cell!r}")
    return cell in ("True", "1")
