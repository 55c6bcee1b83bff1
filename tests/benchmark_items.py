"""Small datasets in the shape of each official benchmark, and published figures as counts."""

from __future__ import annotations

from engine.datasets import aro, bivlc, negbench, sugarcrepe, winoground
from engine.datasets.base import GROUP, Dataset, ImageRef, Item, RetrievalDataset, Rule

# BiVLC's items by type and subtype.
BIVLC_COUNTS = {
    ("replace", "obj"): 1200,
    ("replace", "rel"): 462,
    ("replace", "att"): 437,
    ("add", "obj"): 399,
    ("add", "att"): 76,
    ("swap", "att"): 278,
    ("swap", "obj"): 81,
}
# Published for OpenAI's ViT-B/32, as counts of 2933: I2T 75.83, T2I 52.40, group 49.06; parts 84.32, 89.50,
# 69.21, 82.82 per cent.
GOLD = {
    "text": 2224,
    "image": 1537,
    "group": 1439,
    "Ipos_2T": 2473,
    "Ineg_2T": 2625,
    "Tpos_2I": 2030,
    "Tneg_2I": 2429,
}


def gold_outcomes() -> list[tuple[bool, bool, bool, bool]]:
    """2933 outcomes (Ipos_2T, Ineg_2T, Tpos_2I, Tneg_2I) with exactly the published counts.

    The four comparisons go round a circle, so some outcomes belong to no scores: both image parts won with
    both text parts lost, and the reverse. They do not occur.
    """
    both, first, second, neither = (True, True), (True, False), (False, True), (False, False)
    by_image = {both: 2224, first: 2473 - 2224, second: 2625 - 2224, neither: 2933 - 2473 - 2625 + 2224}
    by_text = {both: 1537, first: 2030 - 1537, second: 2429 - 1537, neither: 2933 - 2030 - 2429 + 1537}
    joint: list[tuple[bool, bool, bool, bool]] = []

    def draw(left: tuple[bool, bool], right: tuple[bool, bool], count: int) -> None:
        by_image[left] -= count
        by_text[right] -= count
        joint.extend([(*left, *right)] * count)

    draw(both, both, GOLD["group"])
    draw(neither, neither, by_text[neither])
    draw(first, both, by_text[both])
    for left in by_image:
        for right in (first, second, neither):
            draw(left, right, min(by_image[left], by_text[right]))
    assert not any(by_image.values()) and not any(by_text.values())
    return joint


def scores_of(outcome: tuple[bool, bool, bool, bool]) -> list[list[float]]:
    """Scores ``[image][text]`` that give exactly this outcome, without ties; the smallest whole numbers."""
    ipos, ineg, tpos, tneg = outcome
    edges = [("00", "01", ipos), ("11", "10", ineg), ("00", "10", tpos), ("11", "01", tneg)]
    level = dict.fromkeys(("00", "01", "10", "11"), 0)
    for _ in range(4):
        for left, right, won in edges:
            high, low = (left, right) if won else (right, left)
            level[high] = max(level[high], level[low] + 1)
    return [[float(level["00"]), float(level["01"])], [float(level["10"]), float(level["11"])]]


def sugarcrepe_items(count: int = 240) -> Dataset:
    """Every subset in turn; each picture serves three items, as in COCO."""
    items = []
    for row in range(count):
        subset = sugarcrepe.SUBSETS[row % 7]
        kind, subtype = subset.split("_")
        texts = (f"cup {row}", f"tall blue cup {row}")
        items.append(Item(f"{subset}/{row}", (ImageRef(f"{row % (count // 3)}.jpg"),), texts, 0, kind, subtype))
    return Dataset("sugarcrepe", f"{count} items", sugarcrepe.RULE, tuple(items))


def group_items(name: str = "bivlc", count: int = 240) -> Dataset:
    """Two images × two texts an item, in BiVLC's or Winoground's name."""
    rule = {"bivlc": bivlc.RULE, "winoground": winoground.RULE}[name]
    items = []
    for row in range(count):
        images = (ImageRef(f"{row}_0.png"), ImageRef(f"{row}_1.png"))
        texts = (f"cup {row} on plate", f"plate {row} on cup")
        items.append(Item(str(row), images, texts, None, ("replace", "swap")[row % 2], "obj"))
    return Dataset(name, f"{count} items", rule, tuple(items))


def bivlc_items() -> Dataset:
    """2933 items in BiVLC's types."""
    kinds = [kind for kind, count in BIVLC_COUNTS.items() for _ in range(count)]
    items = tuple(
        Item(str(row), (ImageRef(f"{row}_0"), ImageRef(f"{row}_1")), (f"a {row}", f"b {row}"), None, *kind)
        for row, kind in enumerate(kinds)
    )
    return Dataset("bivlc", "2933 items", Rule(GROUP), items)


def vg_items(task: str = "relation", count: int = 240) -> Dataset:
    """[false, true] with right index 1; three types of unequal size, one of them excluded or too small."""
    rule = aro.RELATION_RULE if task == "relation" else aro.ATTRIBUTION_RULE
    names = ("on", "wearing", "next to") if task == "relation" else ("black_white", "open_wooden", "old_new")
    items = []
    for row in range(count):
        kind = names[2] if row < 20 else names[row % 4 == 0]
        texts = (f"the table {row} on the cup", f"the cup {row} on the table")
        ref = ImageRef(f"{row % 50}.jpg", box=(row % 3, 0, 10, 10))
        items.append(Item(str(row), (ref,), texts, 1, kind))
    return Dataset(f"vg_{task}", f"{count} items", rule, tuple(items))


def order_items(count: int = 240) -> Dataset:
    """[true, four others] with right index 0 and no types."""
    items = tuple(
        Item(f"{row}/0", (ImageRef(f"{row}.jpg"),), tuple(f"{word} {row}" for word in "abcde"), 0)
        for row in range(count)
    )
    return Dataset("coco_order", f"{count} items", aro.ORDER_RULE, items)


def mcq_items(synthetic: bool = False, count: int = 240) -> Dataset:
    """Four options; the right one is number 0 (COCO, VOC), or 0 and 1 in turn (synthetic)."""
    items = []
    for row in range(count):
        template = negbench.TEMPLATES[row % 3]
        texts = (f"a cup {row} but no dog", f"a dog {row}", f"a dog {row} here too", f"no cup {row}")
        right = row % 2 if synthetic else 0
        items.append(Item(str(row), (ImageRef(f"{row}.jpg"),), texts, right, template))
    name = "negbench_mcq_synthetic" if synthetic else "negbench_mcq_coco"
    return Dataset(name, f"{count} items", negbench.RULE, tuple(items))


def retrieval_items(images: int = 60, captions: int = 3) -> RetrievalDataset:
    """Every image with captions of its own."""
    owner = tuple(row // captions for row in range(images * captions))
    texts = tuple(f"caption {row}" for row in range(images * captions))
    refs = tuple(ImageRef(f"{row}.jpg") for row in range(images))
    return RetrievalDataset("negbench_retrieval", f"{images} images", refs, texts, owner)
