"""What readers make and evaluations read: images by name, items, datasets and their official rule."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

GROUP, CHOICE = "group", "choice"


@dataclass(frozen=True)
class ImageRef:
    """An image by its name in the annotation file; two references are equal when name and box are.

    Attributes:
        name: as the annotation file writes it; nothing in it is decoded or normalised.
        path: the file in the user's folder; None when the dataset was read without images.
        box: half-open pixel rectangle x0, y0, x1, y1 of the upright image to cut out before scoring, or None.
        load: makes the image when it is in no file (a rendered scene), or None.
    """

    name: str
    path: Path | None = field(default=None, compare=False)
    box: tuple[int, int, int, int] | None = None
    load: Callable[[], object] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Item:
    """One question: some images against some texts.

    Attributes:
        id: stable across editions, limits and shards.
        images, texts: the options. In a group item text i belongs to image i.
        right: index of the right text of a choice item; None in a group item.
        type, subtype: names of the slices that the tables show; empty when the benchmark has none.
        tags: further slices, and what is odd about the item (`"identical options"`, `"leaked remark"`).
    """

    id: str
    images: tuple[ImageRef, ...]
    texts: tuple[str, ...]
    right: int | None = None
    type: str = ""
    subtype: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """How the official code counts.

    Attributes:
        kind: `"group"` (two images × two texts) or `"choice"` (one image, k texts).
        ties: what the official code makes of a tie: `"wrong"` (strict comparison) or `"first"` (argmax).
        average: `"micro"` over items, or `"macro"` over the types.
        macro_min: types of fewer items do not enter the macro average.
        macro_exclude: types that do not enter the macro average.
        source: where the rule is written down.
    """

    kind: str
    ties: str = "wrong"
    average: str = "micro"
    macro_min: int = 1
    macro_exclude: frozenset[str] = frozenset()
    source: str = ""


@dataclass(frozen=True)
class Dataset:
    """Items of one benchmark.

    Attributes:
        name: e.g. `"sugarcrepe"`.
        edition: which release this is, with the count that tells, e.g. `"7511 items, …"`.
        rule: the official way of counting.
        items: in file order, ids unique.
        missing: names of images that the folder lacks; items that need them were left out.
        notes: facts a reader of the numbers must know (identical options, leaked remarks, …).
        fingerprint: of the items as read and the sizes of their picture files, before any limit or shard; what
            resuming checks. What is in the pictures is not read.

    Raises:
        ValueError: double ids and for items that do not fit the rule.
    """

    name: str
    edition: str
    rule: Rule
    items: tuple[Item, ...]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        check_unique(self.name, [item.id for item in self.items])
        for item in self.items:
            _check_item(self.name, self.rule.kind, item)
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", fingerprint(_facts(item) for item in self.items))

    def __len__(self) -> int:
        return len(self.items)

    def select(self, *, limit: int | None = None, shard: tuple[int, int] | None = None) -> Dataset:
        """Fewer items of the same dataset; ids, order and fingerprint stay.

        Arguments: `limit` keeps that many items spread evenly over the file, so that every type keeps its
        share; `shard = (k, n)` then keeps every n-th item from the k-th on (k counts from 0). The shards of
        one `n` are disjoint and together whole.
        """
        rows = spread(len(self.items), limit)[shard_slice(shard)]
        if len(rows) == len(self.items):
            return self
        return replace(
            self,
            items=tuple(self.items[row] for row in rows),
            edition=f"{self.edition}; {_part(len(rows), len(self.items), limit, shard)}",
        )


@dataclass(frozen=True)
class RetrievalDataset:
    """Texts and images that must find each other.

    Attributes:
        name, edition, missing, notes, fingerprint: as in `Dataset`.
        images: the gallery; names unique.
        texts: all captions of all images.
        owner: for each text, the index of its image.
        queries: ids `"text/<j>"` and `"image/<i>"` of the queries to ask; every one unless sharded.
    """

    name: str
    edition: str
    images: tuple[ImageRef, ...]
    texts: tuple[str, ...]
    owner: tuple[int, ...]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    queries: tuple[str, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        check_unique(self.name, [image.name for image in self.images])
        if len(self.owner) != len(self.texts) or set(self.owner) != set(range(len(self.images))):
            raise ValueError(
                f"{self.name}: owner must give each of {len(self.texts)} texts one of {len(self.images)} "
                f"images, each image a text, got {len(self.owner)} owners of {len(set(self.owner))} images"
            )
        if not self.queries:
            texts = (f"text/{row}" for row in range(len(self.texts)))
            object.__setattr__(self, "queries", (*texts, *(f"image/{i}" for i in range(len(self.images)))))
        if not self.fingerprint:
            images = [[ref.name, *_file_size(ref)] for ref in self.images]
            facts = [images, list(self.texts), list(self.owner)]
            object.__setattr__(self, "fingerprint", fingerprint(facts))

    def __len__(self) -> int:
        return len(self.queries)

    def select(self, *, limit: int | None = None, shard: tuple[int, int] | None = None) -> RetrievalDataset:
        """A smaller gallery, or a share of the queries.

        `limit` keeps that many images with their texts: easier, and another fingerprint. `shard = (k, n)`
        asks every n-th query against the whole gallery: the shards together give exactly the whole.
        """
        kept = spread(len(self.images), limit)
        chosen = self
        if len(kept) < len(self.images):
            place = {old: new for new, old in enumerate(kept)}
            rows = [row for row, owner in enumerate(self.owner) if owner in place]
            chosen = replace(
                self,
                images=tuple(self.images[i] for i in kept),
                texts=tuple(self.texts[row] for row in rows),
                owner=tuple(place[self.owner[row]] for row in rows),
                queries=(),
                fingerprint="",
                edition=f"{self.edition}; gallery cut to {len(kept)} images (easier than the whole)",
            )
        if shard is None:
            return chosen
        queries = chosen.queries[shard_slice(shard)]
        part = _part(len(queries), len(chosen.queries), None, shard)
        return replace(chosen, queries=queries, edition=f"{chosen.edition}; {part}")


def spread(count: int, limit: int | None) -> list[int]:
    """`limit` row numbers spread evenly over `count` rows, all of them when there are no more.

    Raises ValueError for a limit below 1.

    >>> spread(10, 4)
    [0, 2, 5, 7]
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: wanted at least 1 item, got {limit}")
    if limit is None or limit >= count:
        return list(range(count))
    return [row * count // limit for row in range(limit)]


def shard_slice(shard: tuple[int, int] | None) -> slice:
    """The slice of shard `(k, n)`: every n-th row from the k-th on. Raises ValueError unless 0 <= k < n."""
    if shard is None:
        return slice(None)
    k, n = shard
    if n < 1 or not 0 <= k < n:
        raise ValueError(f"shard: wanted (k, n) with 0 <= k < n, got ({k}, {n})")
    return slice(k, None, n)


def fingerprint(facts: Iterable[object]) -> str:
    """Sixteen hex digits of SHA-256 over the facts written as JSON."""
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(json.dumps(fact, ensure_ascii=True, separators=(",", ":")).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]


def check_unique(who: str, ids: Sequence[str]) -> None:
    """Raise ValueError when an id comes twice."""
    if len(set(ids)) != len(ids):
        double, times = Counter(ids).most_common(1)[0]
        raise ValueError(f"{who}: ids must be unique, got {double!r} {times} times")


def keep_present(items: Iterable[Item], missing: Collection[str]) -> tuple[Item, ...]:
    """The items all of whose images are there."""
    gone = set(missing)
    return tuple(item for item in items if not any(ref.name in gone for ref in item.images))


def dataset_of(
    name: str,
    rule: Rule,
    items: Sequence[Item],
    *,
    title: str = "",
    editions: dict[int, str],
    missing: tuple[str, ...],
    notes: Iterable[str],
) -> Dataset:
    """The dataset of all items that were read: its edition by their number, then without those that lack an image.

    Arguments: `title` names the benchmark in the words for the edition (default `name`); `editions` are the
    official counts with their names; `missing` are names of images that are not there.
    """
    edition = edition_of(title or name, len(items), editions, missing)
    return Dataset(name, edition, rule, keep_present(items, missing), missing, tuple(notes))


def edition_of(who: str, found: int, official: dict[int, str], missing: Collection[str]) -> str:
    """Words for the edition: its count and official name, and how many images it lacks."""
    known = official.get(found, f"not an official count of {who} ({', '.join(map(str, official))})")
    lack = f"; incomplete: {len(missing)} images missing" if missing else ""
    return f"{found} items, {known}{lack}"


def count_notes(items: Iterable[Item], meanings: dict[str, str]) -> Iterator[str]:
    """One note for each tag in `meanings` that some items carry: `"3 items: <meaning>"`."""
    found = Counter(tag for item in items for tag in item.tags)
    for tag, meaning in meanings.items():
        if found[tag]:
            yield f"{found[tag]} item{'s' * (found[tag] > 1)}: {meaning}"


def contradictions(items: Iterable[Item]) -> tuple[str, ...]:
    """Ids of choice items whose right (image, text) pair is the wrong one of another item, or the reverse.

    No scorer of single pairs can answer both; an oracle stays below 100 % by these.
    """
    rights: set[tuple[ImageRef, str]] = set()
    wrongs: set[tuple[ImageRef, str]] = set()
    listed = list(items)
    for item in listed:
        for index, text in enumerate(item.texts):
            (rights if index == item.right else wrongs).add((item.images[0], text))
    both = rights & wrongs
    return tuple(item.id for item in listed if any((item.images[0], text) in both for text in item.texts))


def choice_notes(items: Sequence[Item], meanings: dict[str, str]) -> tuple[str, ...]:
    """The notes of a choice dataset: `meanings` by tag, and how many items contradict others."""
    at_odds = contradictions(items)
    words = f"{len(at_odds)} items share a pair that is right in one and wrong in another, e.g. "
    return (*count_notes(items, meanings), *((words + ", ".join(at_odds[:3]),) if at_odds else ()))


def _check_item(who: str, kind: str, item: Item) -> None:
    if kind == GROUP:
        fits = len(item.images) == 2 and len(item.texts) == 2 and item.right is None
    else:
        fits = len(item.images) == 1 and item.right is not None and 0 <= item.right < len(item.texts) >= 2
    if not fits:
        raise ValueError(
            f"{who}: item {item.id!r} does not fit kind {kind!r}: {len(item.images)} images, "
            f"{len(item.texts)} texts, right index {item.right}"
        )


def _facts(item: Item) -> list[object]:
    images = [[ref.name, ref.box, *_file_size(ref)] for ref in item.images]
    return [item.id, images, item.texts, item.right, item.type]


def _file_size(ref: ImageRef) -> tuple[int, ...]:
    """The size of the picture's file, in bytes, when there is one: tells most changed pictures without reading them."""
    try:
        return () if ref.path is None else (ref.path.stat().st_size,)
    except OSError:
        # Whoever opens it will say so.
        return ()


def _part(kept: int, of: int, limit: int | None, shard: tuple[int, int] | None) -> str:
    words = [f"{kept} of {of}"]
    if limit is not None:
        words.append(f"limit {limit} spread evenly")
    if shard is not None:
        words.append(f"shard {shard[0]} of {shard[1]}")
    return ", ".join(words)
