"""Winoground (Thrush et al., arXiv 2204.03162): two images, two captions of the same words.

Gated: bring your own copy. On disk, as the hub gives it: `examples.jsonl` (id, image_0, image_1, caption_0,
caption_1, tag, secondary_tag, num_main_preds, collapsed_tag; 400 lines) and `images.zip`, unpacked, with
`ex_<id>_img_<0|1>.png`. Optionally `new_tag_assignments.json` of Diwan et al. (arXiv 2211.00768): an
object of id → list of tags, often empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.choices import OnMissing
from engine.datasets.base import GROUP, Dataset, ImageRef, Item, Rule, count_notes, dataset_of
from engine.datasets.files import FilePath, ImageFolder, int_field, read_json, read_json_lines, text_field

EDITIONS = {400: "the official count"}
RULE = Rule(GROUP, ties="wrong", average="micro", source="Winoground, equations 1-3: strict comparisons")
NO_TAG = "NoTag"
MEANINGS = {"identical options": "both captions are the same text, a tie for every model"}


def read_winoground(
    folder: FilePath,
    images: FilePath | None = None,
    *,
    tags: FilePath | None = None,
    on_missing: OnMissing = "error",
) -> Dataset:
    """Winoground from a folder with `examples.jsonl` (itself or in `data/`).

    Args:
        folder: holds the annotation file.
        images: the unpacked images; None reads the texts alone.
        tags: `new_tag_assignments.json`; its tags become slices, `"NoTag"` where there are none.
        on_missing: `"error"` or `"skip"`.

    Returns:
        group items `"<id>"`: text i belongs to image i; type is the collapsed tag, subtype `"<n> predicates"`.

    Raises:
        FileNotFoundError: no annotation file, or images missing.
        ValueError: another format, or an image field that belongs to another id.
    """
    base = Path(folder)
    path = next((p for p in (base / "examples.jsonl", base / "data" / "examples.jsonl") if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"winoground: {base} must hold examples.jsonl (itself or in data/)")
    finder = ImageFolder(images, "winoground")
    extra = _read_tags(tags)
    items = tuple(_item(row, finder, extra, f"winoground: line {number}") for number, row in read_json_lines(path))
    if extra is not None and not {item.id for item in items} & extra.keys():
        raise ValueError(f"winoground: {tags} must name the items of {path} by id, it names none of them")
    missing = finder.check(on_missing)
    notes = count_notes(items, MEANINGS)
    return dataset_of("winoground", RULE, items, title="Winoground", editions=EDITIONS, missing=missing, notes=notes)


def _read_tags(path: FilePath | None) -> dict[str, list[str]] | None:
    if path is None:
        return None
    tags = read_json(path)
    if not isinstance(tags, dict):
        raise ValueError(f"winoground: tags: {path} must be an object of id -> list of tags")
    for name, value in tags.items():
        if not isinstance(value, list) or not all(isinstance(tag, str) for tag in value):
            raise ValueError(f"winoground: tags: {path} must hold a list of tags for id {name!r}, got {value!r:.80}")
    return tags


def _item(row: dict[str, Any], finder: ImageFolder, extra: dict[str, list[str]] | None, where: str) -> Item:
    number = int_field(row, "id", where=where)
    images = []
    for side in (0, 1):
        stem = f"ex_{number}_img_{side}"
        value = row.get(f"image_{side}", stem)
        # Exports of the hub's table put bytes or null here; a name must be this item's own.
        if isinstance(value, str) and value.removesuffix(".png") != stem:
            raise ValueError(f"{where}: image_{side} of id {number} must be {stem!r}, got {value!r}")
        images.append(ImageRef(f"{stem}.png", finder.find(f"{stem}.png")))
    texts = (text_field(row, "caption_0", where=where), text_field(row, "caption_1", where=where))
    predicates = int_field(row, "num_main_preds", where=where)
    slices = tuple(extra.get(str(number)) or [NO_TAG]) if extra is not None else ()
    if texts[0] == texts[1]:
        slices = (*slices, "identical options")
    kind = text_field(row, "collapsed_tag", where=where)
    subtype = f"{predicates} predicate{'s' * (predicates != 1)}"
    return Item(str(number), tuple(images), texts, None, kind, subtype, slices)
