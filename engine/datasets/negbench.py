"""NegBench (Alhamoud et al., arXiv 2501.09425): multiple choice and retrieval with negated captions.

On disk, CSV with a header in any column order. Multiple choice: `image_path, correct_answer, caption_0 …`
(two or four options) and usually `correct_answer_template` (positive, negative, hybrid). Retrieval:
`filepath, captions` and sometimes `image_id`; lists in cells are read as literals, never evaluated.

The right option is number 0 in every row of the COCO and VOC files, so a scorer without any opinion has 100 %
under the official `argmax`; results therefore always stand beside those with ties shared and ties wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from engine.choices import OnMissing
from engine.datasets.base import (
    CHOICE,
    Dataset,
    ImageRef,
    Item,
    RetrievalDataset,
    Rule,
    choice_notes,
    dataset_of,
    edition_of,
)
from engine.datasets.files import FilePath, ImageFolder, int_field, parse_text_list, read_csv, text_field

MCQ_EDITIONS = {
    5914: "the official COCO val2017 file",
    5031: "the official VOC2007 test file",
    9997: "the official synthetic file",
}
RETRIEVAL_EDITIONS = {
    5000: "an official count (COCO val2017, synthetic 1)",
    10000: "the official synthetic 2",
}
RULE = Rule(
    CHOICE,
    ties="first",
    average="micro",
    source="m1k2zoo/negbench: argmax over the options, total and per template",
)
TEMPLATES = ("positive", "negative", "hybrid")
LEAK = re.compile(r"->|rephras|original caption|\bnote:", re.IGNORECASE)
LONG_WORDS = 50
MEANINGS = {
    "identical options": "two options are the same text",
    "leaked remark": "an option holds a remark of the language model that wrote it",
    "leaked remark in the right option": "the right option holds such a remark",
    "empty option": "an option has no words",
    "long option": f"an option has more than {LONG_WORDS} words and will be cut by most encoders",
}


def read_negbench_mcq(
    annotations: FilePath,
    images: FilePath | None = None,
    *,
    name: str = "negbench_mcq",
    on_missing: OnMissing = "error",
) -> Dataset:
    """NegBench's multiple choice, of two (binary) or four options.

    Args:
        annotations: a CSV file.
        images: a folder below which the longest tail of each `image_path` is looked up (the files carry paths
            of their authors' machines); None reads the texts alone.
        name: what the results call it, e.g. `"negbench_mcq_coco"`.
        on_missing: `"error"` or `"skip"`.

    Returns:
        choice items `"<row>"`, type = the template of the right answer. What is odd about an item is in its tags and
        counted in the notes; nothing is left out.

    Raises:
        FileNotFoundError: images missing.
        ValueError: another format, a right answer out of range, an unknown template.
    """
    rows = read_csv(annotations, ("image_path", "correct_answer", "caption_0", "caption_1"))
    if not rows:
        raise ValueError(f"{name}: {annotations} must hold at least one row")
    columns = sorted((key for key in rows[0] if re.fullmatch(r"caption_\d+", key)), key=lambda key: int(key[8:]))
    if columns != [f"caption_{number}" for number in range(len(columns))]:
        raise ValueError(f"{name}: option columns must be caption_0, caption_1, … without a gap, got {columns}")
    finder = ImageFolder(images, name)
    items = tuple(_item(row, columns, number, finder, name) for number, row in enumerate(rows))
    missing = finder.check(on_missing)
    answers = Counter(item.right for item in items)
    places = ", ".join(f"{place}: {count}" for place, count in sorted(answers.items(), key=str))
    notes = [f"right option by number: {places}", *choice_notes(items, MEANINGS)]
    if len(answers) == 1:
        notes.append("the right option always has the same number: argmax would reward a constant scorer")
    return dataset_of(name, RULE, items, title="NegBench MCQ", editions=MCQ_EDITIONS, missing=missing, notes=notes)


def read_negbench_retrieval(
    annotations: FilePath,
    images: FilePath | None = None,
    *,
    name: str = "negbench_retrieval",
    on_missing: OnMissing = "error",
) -> RetrievalDataset:
    """NegBench's retrieval: every caption of every image is a query.

    Arguments as `read_negbench_mcq`. Captions are kept as they are, an empty one included; images have one to seven.

    Raises:
        ValueError: another format, a cell that is no list of texts, an image that comes twice, or an `image_id` that is
            not the one in the file name.
    """
    finder = ImageFolder(images, name)
    refs: list[ImageRef] = []
    texts: list[str] = []
    owner: list[int] = []
    for number, row in enumerate(read_csv(annotations, ("filepath", "captions"))):
        where = f"{name}: row {number}"
        path = text_field(row, "filepath", where=where)
        if row.get("image_id"):
            digits = re.findall(r"\d+", Path(path).stem)
            if not digits or int(digits[-1]) != int_field(row, "image_id", where=where):
                raise ValueError(f"{where}: image_id {row['image_id']} must be the one in the file name {path!r}")
        captions = parse_text_list(row["captions"], where=where)
        if not captions:
            raise ValueError(f"{where}: captions must hold at least one text")
        refs.append(ImageRef(path, finder.find(path)))
        texts.extend(captions)
        owner.extend([number] * len(captions))
    missing = finder.check(on_missing)
    edition = edition_of("NegBench retrieval", len(refs), RETRIEVAL_EDITIONS, missing)
    notes = _retrieval_notes(texts, owner)
    kept = [row for row, ref in enumerate(refs) if ref.name not in set(missing)]
    place = {old: new for new, old in enumerate(kept)}
    rows = [row for row, image in enumerate(owner) if image in place]
    return RetrievalDataset(
        name,
        edition,
        tuple(refs[row] for row in kept),
        tuple(texts[row] for row in rows),
        tuple(place[owner[row]] for row in rows),
        missing,
        notes,
    )


def _item(row: dict[str, str], columns: list[str], number: int, finder: ImageFolder, name: str) -> Item:
    where = f"{name}: row {number}"
    path = text_field(row, "image_path", where=where)
    texts = tuple(text_field(row, column, where=where, empty=True) for column in columns)
    right = int_field(row, "correct_answer", where=where)
    if not 0 <= right < len(texts):
        raise ValueError(f"{where}: correct_answer must be in 0..{len(texts) - 1}, got {right}")
    template = row.get("correct_answer_template", "")
    if template and template not in TEMPLATES:
        raise ValueError(f"{where}: correct_answer_template must be one of {TEMPLATES}, got {template!r}")
    leaked = [bool(LEAK.search(text)) for text in texts]
    tags = {
        "identical options": len(set(texts)) < len(texts),
        "leaked remark": any(leaked),
        "leaked remark in the right option": leaked[right],
        "empty option": not all(text.strip() for text in texts),
        "long option": max(len(text.split()) for text in texts) > LONG_WORDS,
    }
    return Item(
        str(number),
        (ImageRef(path, finder.find(path)),),
        texts,
        right,
        template,
        tags=tuple(tag for tag, found in tags.items() if found),
    )


def _retrieval_notes(texts: list[str], owner: list[int]) -> tuple[str, ...]:
    images_of: dict[str, set[int]] = {}
    for text, image in zip(texts, owner, strict=True):
        images_of.setdefault(text, set()).add(image)
    shared = sum(len(images) > 1 for images in images_of.values())
    found = {
        f"{shared} captions belong to several images: recall with a single right image is capped": shared,
        f"{(empty := sum(not text.strip() for text in texts))} captions have no words": empty,
        f"{(long := sum(len(text.split()) > LONG_WORDS for text in texts))} captions have more than "
        f"{LONG_WORDS} words and will be cut by most encoders": long,
    }
    per_image = Counter(Counter(owner).values())
    counts = ", ".join(f"{captions} on {images}" for captions, images in sorted(per_image.items()))
    return (f"captions an image: {counts}", *(note for note, count in found.items() if count))
