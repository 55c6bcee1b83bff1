"""The section on retrieval: what an index with late interaction finds among rendered scenes and one cosine does not."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from engine.benchmarks.scenes import percent
from engine.engine import Engine, load
from engine.features import TextFeatures
from engine.heads.base import shipped_head
from engine.metrics import Interval, wilson_interval
from engine.results.figures import Figure, check_figures, write_figures
from engine.results.run import Run
from engine.retrieval.index import Index
from engine.retrieval.manifest import MANIFEST
from engine.scenes.items import controlled_items, described, picture_of, settings_of
from engine.scenes.negation import retrieval_items
from engine.scenes.world import Group, SceneSpec

NAME = "retrieval"
IMAGES, QUERIES = 20_000, 500
QUICK_IMAGES, QUICK_QUERIES = 400, 40
SEED = 4242
CATEGORIES = ("color", "size", "material", "quantity")
TOP = 10
CANDIDATES = 1000
# Queries that are timed, one at a time.
TIMED = 25
BLOCK = 64
HEADS = ("max_sim_head", "peakpatch")
# Scorers with the number of candidates; None for all images.
ROWS: Mapping[str, tuple[str, int | None]] = {
    "global": ("global", None),
    "global → sgi": ("sgi", CANDIDATES),
    "sgi": ("sgi", None),
    "global → max_sim_head": ("max_sim_head", CANDIDATES),
    "global → peakpatch": ("peakpatch", CANDIDATES),
}
KINDS = ("binding", "all said", "denial", "no denial")
WORDS = ("size", "color", "material")
# What the captions of a category say beside shape and count.
SAID: Mapping[str, tuple[str, ...]] = {
    "color": ("color",), "size": ("size",), "material": ("material",), "quantity": (),
}  # fmt: skip


@dataclass(frozen=True)
class Query:
    """A caption, what it says of groups that a right picture holds (see `said_of`), and what it denies."""

    caption: str
    groups: tuple[tuple[object, ...], ...]
    absent: tuple[str, str] | None = None


def said_of(group: Group, words: Sequence[str] = WORDS) -> tuple[object, ...]:
    """Shape, count and the given words of a group: what a caption says of it."""
    return (group.shape, group.count, *(getattr(group, word) if word in words else "" for word in WORDS))


@dataclass(frozen=True)
class Collection:
    """Scenes in two halves, and captions of some of them.

    One half is pairs of pictures in which only a binding is exchanged, in combinations that training never showed: each
    is the other's hardest distractor. The other half is scenes that training may show, with captions that may deny
    something first.

    Attributes:
        images: in all, a multiple of 16.
        queries: of each of `KINDS`.
        seed: decides everything.
    """

    images: int = IMAGES
    queries: int = QUERIES
    seed: int = SEED

    @cached_property
    def scenes(self) -> list[tuple[str, SceneSpec, int, str]]:
        """For each picture its id, its scene, the seed of its rendering, and the split."""
        found = [(f"scene {n}", i.scene, i.render_seed, i.split) for n, i in enumerate(self._plain)]
        for number, item in enumerate(self._quads):
            for side, scene in enumerate(item.scenes):
                found.append((f"{item.category} {number} {'ab'[side]}", scene, item.render_seed, item.split))
        return found

    @cached_property
    def _plain(self) -> list[Any]:
        return retrieval_items(self.images // 2, seed=self.seed)

    @cached_property
    def _quads(self) -> list[Any]:
        each = self.images // 4 // len(CATEGORIES)
        return [item for category in CATEGORIES for item in controlled_items(category, each, seed=self.seed)]

    def asked(self) -> dict[str, list[Query]]:
        """The queries of each kind, evenly out of the whole half."""
        quads = self._quads[:: max(1, len(self._quads) // self.queries)][: self.queries]
        plain = self._plain[:: max(1, len(self._plain) // self.queries)][: self.queries]
        found: dict[str, list[Query]] = {kind: [] for kind in KINDS}
        for item in quads:
            groups, said = item.scenes[0].groups[:2], SAID[item.category]
            found["binding"].append(Query(item.captions[0], tuple(said_of(group, said) for group in groups)))
            whole = described(item, WORDS).captions[0]
            found["all said"].append(Query(whole, tuple(said_of(group) for group in groups)))
        for item in plain:
            color, shape = item.absent.split()
            groups = tuple(said_of(group) for group in item.scene.groups)
            found["denial"].append(Query(item.negated_caption, groups, (color, shape)))
            found["no denial"].append(Query(item.caption, groups))
        return found

    def right(self, queries: Sequence[Query]) -> list[set[str]]:
        """For each query the ids of all pictures that it is true of, its own among them."""
        holding: dict[object, set[str]] = defaultdict(set)
        for name, scene, _, _ in self.scenes:
            for group in scene.groups:
                for words in {*SAID.values(), WORDS}:
                    holding[said_of(group, words)].add(name)
                holding[group.color, group.shape].add(name)
        return [
            set.intersection(*(holding[group] for group in query.groups)) - holding[query.absent] for query in queries
        ]

    def pictures(self, names: Sequence[str]) -> list[Image.Image]:
        """The pictures of these ids."""
        known = {name: (scene, seed, split) for name, scene, seed, split in self.scenes}
        return [
            Image.fromarray(picture_of(scene, seed, settings_of(split)))
            for scene, seed, split in (known[name] for name in names)
        ]


def section(run: Run) -> str:
    """The table. A quick run measures a small collection and raises ResultsDiffer where its figures differ."""
    peaksim = load("scenes", device="cpu")
    path = run.figures / f"{NAME}.jsonl"
    small = _measured(run, peaksim, Collection(QUICK_IMAGES, QUICK_QUERIES))
    if run.quick:
        check_figures(path, _figures(small))
        return _table(small)
    large = _measured(run, peaksim, Collection())
    write_figures(path, [*_figures(small), *_figures(large)])
    return f"## Retrieval: what one cosine does not find\n\n{_table(large)}"


def _measured(run: Run, peaksim: Engine, collection: Collection) -> dict[str, Any]:
    heads = [sha256(shipped_head(name).read_bytes()).hexdigest() for name in HEADS]
    made_by = f"{peaksim.spec.fingerprint} {collection!r} {peaksim.segmenter.name} {dict(ROWS)} {heads}"
    digest = sha256(made_by.encode()).hexdigest()[:12]

    def make() -> dict[str, Any]:
        folder = run.folder / f"{NAME}-{digest}"
        indexes = {store: _filled(folder / store, store, peaksim, collection, run) for store in ("int8", "bf16")}
        return measure(indexes["int8"], indexes["bf16"], collection, run)

    return run.part(f"{NAME}-{collection.images}", made_by, make)


def _filled(folder: Path, store: str, peaksim: Engine, collection: Collection, run: Run) -> Index:
    """The index of the collection; what an earlier run added is not rendered again."""
    if (folder / MANIFEST).exists():
        index = Index.open(folder, model=peaksim)
    else:
        index = Index.create(folder, model=peaksim, vectors=("windows", "head"), store=store)  # type: ignore[arg-type]
    names = [name for name, *_ in collection.scenes]
    missing = [name for name in names if name not in index]

    def batches() -> Iterator[Any]:
        for first in range(0, len(missing), BLOCK):
            run.progress(f"scenes into an index ({store})", len(names) - len(missing) + first, len(names))
            own = missing[first : first + BLOCK]
            with torch.no_grad():
                yield peaksim.encode_images(collection.pictures(own), scorer=index.needs(), ids=own)

    index.add(batches(), existing="skip")
    return index


def measure(index: Index, wide: Index, collection: Collection, run: Run) -> dict[str, Any]:
    """Shares of captions whose first, or one of whose first ten pictures is right; milliseconds; recall of candidates.

    `wide` is the same index with vectors in bfloat16.
    """
    rows: dict[str, Any] = {}
    asked = collection.asked()
    right = {kind: collection.right(queries) for kind, queries in asked.items()}
    encoded = {
        (scorer, kind): index.engine.encode_texts(
            [query.caption for query in queries], scorer=index.recipe.scorer(scorer)
        )
        for scorer in {scorer for scorer, _ in ROWS.values()}
        for kind, queries in asked.items()
    }
    for name, (scorer, candidates) in ROWS.items():
        shares: dict[str, dict[str, int]] = {}
        times: list[float] = []
        for kind, queries in asked.items():
            run.progress(f"retrieval: {name}", KINDS.index(kind), len(KINDS))
            texts = encoded[scorer, kind]
            found = [hit_ids(hits) for hits in index.search(texts, TOP, scorer=scorer, candidates=candidates)]
            first = sum(own[0] in wanted for own, wanted in zip(found, right[kind], strict=True))
            ten = sum(bool(wanted & set(own)) for own, wanted in zip(found, right[kind], strict=True))
            shares[kind] = {"first": first, "ten": ten, "of": len(queries)}
            for row in range(min(TIMED, len(queries))):
                start = time.process_time()
                index.search(texts[row], TOP, scorer=scorer, candidates=candidates)
                times.append(time.process_time() - start)
        rows[name] = {"shares": shares, "ms": 1e3 * statistics.median(times)}
    return {
        "images": collection.images, "queries": collection.queries, "rows": rows,
        "recall": {kind: _recalls(index, wide, encoded["sgi", kind]) for kind in asked},
        "segmenter": index.engine.segmenter.name,
    }  # fmt: skip


def hit_ids(hits: Sequence[Any]) -> list[str]:
    """The ids of hits."""
    return [hit.id for hit in hits]


def _recalls(index: Index, wide: Index, texts: TextFeatures) -> dict[str, float]:
    """Of sgi's best ten over all codes, the share that candidates, the default and bfloat16 find too."""
    every = [set(hit_ids(hits)) for hits in index.search(texts, TOP, candidates=None)]
    others = {
        "candidates": index.search(texts, TOP, candidates=CANDIDATES),
        "default": index.search(texts, TOP),
        "bfloat16": wide.search(texts, TOP, candidates=None),
    }
    return {
        name: statistics.fmean(len(own & set(hit_ids(hits))) / len(own) for own, hits in zip(every, some, strict=True))
        for name, some in others.items()
    }


def _share(values: Mapping[str, int], what: str) -> Interval:
    return wilson_interval(values[what], values["of"])


def _figures(found: Mapping[str, Any]) -> list[Figure]:
    return [
        Figure.of(f"{name} {kind} R@{place} {found['images']}", values["of"], _share(values, what))
        for name, row in found["rows"].items()
        for kind, values in row["shares"].items()
        for place, what in ((1, "first"), (TOP, "ten"))
    ]


def _table(found: Mapping[str, Any]) -> str:
    heads = " | ".join(f"{kind} R@1 | R@{TOP}" for kind in KINDS)
    lines = [f"| search | {heads} | ms a query |", "|---" * (2 * len(KINDS) + 2) + "|"]
    for name, row in found["rows"].items():
        cells = []
        for kind in KINDS:
            cells += [percent(_share(row["shares"][kind], what)) for what in ("first", "ten")]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['ms']:.1f} |")
    recalls = "; ".join(
        f"{kind}: {own['candidates']:.3f} with {CANDIDATES} candidates, {own['default']:.3f} by default, "
        f"{own['bfloat16']:.3f} with bfloat16 in the place of int8"
        for kind, own in found["recall"].items()
    )
    return (
        f"{found['images']:,} rendered scenes, {found['queries']} captions of each kind; per cent of the captions "
        "(± half a 95 % Wilson interval) whose first picture, or one of whose first ten, is right: all that the "
        "caption says is in it, and what it denies is not. *Binding*: captions of one half of the pictures, pairs in "
        "which only a binding is exchanged, in combinations that no training showed; they say that and the shapes, "
        "*all said* everything of both things. "
        "*Denial*: captions of the other half, which first say what is not there; beside them the same captions "
        "without that. `→`: the scorer ranks "
        f"{CANDIDATES} candidates, else it looks at all pictures. Segments {found['segmenter']}; int8; CPU time of one "
        "thread, the caption encoded before.\n\n"
        + "\n".join(lines)
        + f"\n\nOf sgi's best {TOP} over all codes the share that is found: {recalls}."
    )
