"""ARO (Yuksekgonul et al., arXiv 2210.01936): relations, attributes, word order.

On disk: `visual_genome_relation.json` and `visual_genome_attribution.json`, lists of objects with
`image_path`, `bbox_x, bbox_y, bbox_w, bbox_h` (the picture is cut to this box before it is scored; what of a box lies
outside the picture is black, as with the official code's `Image.crop`), `true_caption`, `false_caption` and
`relation_name` or `attributes`; and for the order tasks `coco_karpathy_test.json` or `flickr30k_test.json`, lists of
`{image, caption: [five texts]}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.choices import OnMissing
from engine.datasets.base import CHOICE, Dataset, ImageRef, Item, Rule, choice_notes, dataset_of
from engine.datasets.files import FilePath, ImageFolder, int_field, read_json, text_field
from engine.datasets.word_order import PERTURBATIONS, Tagger, function_word_tagger, prepare_caption, reorder

EDITIONS = {
    "relation": {23937: "the published count"},
    "attribution": {28748: "the published count"},
    "coco_order": {25010: "the published count"},
    "flickr30k_order": {5000: "the published count"},
}
# The relations that the official average of VG-R leaves out and calls symmetric. Facts, not a judgement: they are those
# of the evaluation notebook of github.com/mertyg/vision-language-models-are-bows (MIT licence), commit 81fdd20d, kept
# as they are so that figures compare; the library beside that notebook averages over all relations.
_SYMMETRIC_RELATIONS = """
adjusting, attached to, between, bigger than, biting, boarding, brushing, chewing, cleaning,
climbing, close to, coming from, coming out of, contain, crossing, dragging, draped over, drinking,
drinking from, driving, driving down, driving on, eating from, eating in, enclosing, exiting,
facing, filled with, floating in, floating on, flying, flying above, flying in, flying over, flying
through, full of, going down, going into, going through, grazing in, growing in, growing on,
guiding, hanging from, hanging in, hanging off, hanging over, higher than, holding onto, hugging, in
between, jumping off, jumping on, jumping over, kept in, larger than, leading, leaning over,
leaving, licking, longer than, looking in, looking into, looking out, looking over, looking through,
lying next to, lying on top of, making, mixed with, mounted on, moving, on the back of, on the edge
of, on the front of, on the other side of, opening, painted on, parked at, parked beside, parked by,
parked in, parked in front of, parked near, parked next to, perched on, petting, piled on, playing,
playing in, playing on, playing with, pouring, reaching for, reading, reflected on, riding on,
running in, running on, running through, seen through, sitting behind, sitting beside, sitting by,
sitting in front of, sitting near, sitting next to, sitting under, skiing down, skiing on, sleeping
in, sleeping on, smiling at, sniffing, splashing, sprinkled on, stacked on, standing against,
standing around, standing behind, standing beside, standing in front of, standing near, standing
next to, staring at, stuck in, surrounding, swimming in, swinging, talking to, topped with,
touching, traveling down, traveling on, tying, typing on, underneath, wading in, waiting for,
walking across, walking by, walking down, walking next to, walking through, working in, working on,
worn on, wrapped around, wrapped in, by, of, near, next to, with, beside, on the side of, around
"""
SYMMETRIC_RELATIONS = frozenset(" ".join(part.split()) for part in _SYMMETRIC_RELATIONS.split(","))
RELATION_RULE = Rule(
    CHOICE,
    ties="first",
    average="macro",
    macro_exclude=SYMMETRIC_RELATIONS,
    source="ARO: argmax of [false, true]; mean over relations without the notebook's list of symmetric ones",
)
ATTRIBUTION_RULE = Rule(
    CHOICE,
    ties="first",
    average="macro",
    macro_min=25,
    source="ARO: argmax of [false, true]; mean over attribute pairs of at least 25 items",
)
ORDER_RULE = Rule(
    CHOICE,
    ties="first",
    average="micro",
    source="ARO: argmax of [true, four other orders], Precision@1; the orders are our own",
)
MEANINGS = {"identical options": "a wrong option is the same text as the right one, a tie for every model"}


def read_vg_relation(
    annotations: FilePath, images: FilePath | None = None, *, on_missing: OnMissing = "error"
) -> Dataset:
    """ARO's relation task (VG-R) from `visual_genome_relation.json`.

    Arguments: `annotations`, the file; `images`, the folder of Visual Genome pictures, None reads the texts alone;
    `on_missing`, `"error"` or `"skip"`. Returns choice items `"<row>"` with texts (false, true), right index 1, type =
    the relation, each image with its box.

    Raises:
        FileNotFoundError: missing images.
        ValueError: another format or an `image_id` that is not the image's.
    """
    return _read_boxed(annotations, images, on_missing, "relation", _relation_of)


def read_vg_attribution(
    annotations: FilePath, images: FilePath | None = None, *, on_missing: OnMissing = "error"
) -> Dataset:
    """ARO's attribute task (VG-A) from `visual_genome_attribution.json`; as `read_vg_relation`.

    The type is the pair of attributes, `"black_white"`.
    """
    return _read_boxed(annotations, images, on_missing, "attribution", _attributes_of)


def read_order(
    annotations: FilePath,
    images: FilePath | None = None,
    *,
    name: str = "coco_order",
    tagger: Tagger | None = None,
    seed: int = 0,
    on_missing: OnMissing = "error",
) -> Dataset:
    """ARO's order tasks from `coco_karpathy_test.json` or `flickr30k_test.json`.

    Args:
        annotations: the file; one item for each caption.
        images: the folder the file's image names start from; None reads the texts alone.
        name: `"coco_order"` or `"flickr30k_order"`.
        tagger: splits a caption into (word, "noun" | "adjective" | ""); None uses a list of function words. With
            spaCy: `lambda text: [(t.text, {"NOUN": "noun", "PROPN": "noun", "ADJ": "adjective"}.get(t.pos_, ""))
            for t in nlp(text)]`.
        seed: of the orders; part of the edition.
        on_missing: `"error"` or `"skip"`.

    Returns:
        choice items `"<row>/<caption>"` with texts (true, four other orders), right index 0, all prepared by
        `prepare_caption`.

    Raises:
        FileNotFoundError: missing images.
        ValueError: another format.
    """
    if name not in ("coco_order", "flickr30k_order"):
        raise ValueError(f"read_order: name must be 'coco_order' or 'flickr30k_order', got {name!r}")
    finder = ImageFolder(images, name)
    items = []
    for row, entry in enumerate(_read_list(annotations, name)):
        where = f"{name}: row {row}"
        image = text_field(entry, "image", where=where)
        captions = entry.get("caption")
        if not isinstance(captions, list) or not captions:
            raise ValueError(f"{where}: caption must be a list of texts, got {captions!r}")
        ref = ImageRef(image, finder.find(image))
        for number in range(len(captions)):
            caption = text_field({"caption": captions[number]}, "caption", where=where)
            others = reorder(caption, f"{seed}/{name}/{row}/{number}", tagger or function_word_tagger)
            texts = tuple(prepare_caption(text) for text in (caption, *others))
            tags = ("identical options",) if texts[0] in texts[1:] else ()
            items.append(Item(f"{row}/{number}", (ref,), texts, 0, tags=tags))
    missing = finder.check(on_missing)
    how = "function words" if tagger is None else "the caller's tagger"
    notes = (f"wrong options: {', '.join(PERTURBATIONS)}", *choice_notes(items, MEANINGS))
    found = dataset_of(name, ORDER_RULE, items, editions=EDITIONS[name], missing=missing, notes=notes)
    return replace(found, edition=f"{found.edition}; orders by {how}, seed {seed}")


def _read_list(path: FilePath, who: str) -> list[dict[str, Any]]:
    rows = read_json(path)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{who}: {path} must be a list of objects that is not empty")
    return rows


def _read_boxed(
    annotations: FilePath,
    images: FilePath | None,
    on_missing: OnMissing,
    task: str,
    type_of: Callable[[dict[str, Any], str], str],
) -> Dataset:
    who = f"vg_{task}"
    finder = ImageFolder(images, who)
    items = []
    for number, row in enumerate(_read_list(annotations, who)):
        where = f"{who}: row {number}"
        name = text_field(row, "image_path", where=where)
        owner = row.get("image_id")
        if owner is not None and name.rsplit("/", 1)[-1].rsplit(".", 1)[0] != str(owner):
            raise ValueError(f"{where}: image_path must be the picture of image_id {owner!r}, got {name!r}")
        x, y, w, h = (int_field(row, f"bbox_{side}", where=where) for side in "xywh")
        if w <= 0 or h <= 0:
            raise ValueError(f"{where}: bbox_w and bbox_h must be positive, got {w} x {h}")
        if x + w <= 0 or y + h <= 0:
            raise ValueError(f"{where}: the box must overlap the picture {name!r}, got {x, y, x + w, y + h}")
        texts = tuple(text_field(row, f"{truth}_caption", where=where) for truth in ("false", "true"))
        ref = ImageRef(name, finder.find(name), (x, y, x + w, y + h))
        tags = ("identical options",) if texts[0] == texts[1] else ()
        items.append(Item(str(number), (ref,), texts, 1, type_of(row, where), tags=tags))
    missing = finder.check(on_missing)
    rule = RELATION_RULE if task == "relation" else ATTRIBUTION_RULE
    notes = choice_notes(items, MEANINGS)
    return dataset_of(who, rule, items, editions=EDITIONS[task], missing=missing, notes=notes)


def _relation_of(row: dict[str, Any], where: str) -> str:
    return text_field(row, "relation_name", where=where)


def _attributes_of(row: dict[str, Any], where: str) -> str:
    pair = row.get("attributes")
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(word, str) for word in pair):
        raise ValueError(f"{where}: attributes must be a list of two words, got {pair!r}")
    return "_".join(pair)
