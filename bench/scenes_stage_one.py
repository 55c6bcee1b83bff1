"""What should ask what for candidates: `python -m bench.scenes_stage_one INDEX [--images 20000 --queries 500]`.

INDEX is one that `peaksim results --section retrieval` left in its work folder. Printed is the share of captions of
which a right picture is among the first 10, 100 and 1000, for what can be asked of an inverted file: the embedding of
the caption or the mean of its segments, of an image's one embedding, of the mean of its windows, or of all windows,
the nearest of which counts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engine.engine import load
from engine.results.retrieval import Collection
from engine.retrieval.candidates import asking_vectors
from engine.retrieval.index import Index
from engine.retrieval.queries import asked
from engine.retrieval.stored import features_of

BLOCK = 2000
PLACES = (10, 100, 1000)


def scores_of(index: Index, asking: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scores `(queries, images)` of each way."""
    found: dict[str, list[Tensor]] = {}
    for first in range(0, index.snapshot.rows, BLOCK):
        images = features_of(index.snapshot, range(first, min(first + BLOCK, index.snapshot.rows)))
        assert images.regions is not None
        sides = {"one embedding": images.embedding, "mean of windows": normalize(images.regions.mean(dim=1), dim=1)}
        for name, vectors in asking.items():
            for side, held in sides.items():
                found.setdefault(f"{name}, {side}", []).append(vectors @ held.T)
            all_windows = (vectors @ images.regions.flatten(0, 1).T).view(len(vectors), len(images), -1)
            found.setdefault(f"{name}, all windows", []).append(all_windows.amax(dim=2))
    return {name: torch.cat(parts, dim=1) for name, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("index", type=Path)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    peaksim = load("scenes", device="cpu")
    index = Index.open(options.index, model=peaksim)
    collection = Collection(options.images, options.queries)
    places = {name: row for row, name in enumerate(index.ids())}
    scorer = index.recipe.scorer("sgi")
    for kind, queries in collection.asked().items():
        texts = peaksim.encode_texts([query.caption for query in queries], scorer=scorer)
        segments = asking_vectors(asked(texts, scorer, index.recipe, lambda: peaksim))
        right = [[places[name] for name in names] for names in collection.right(queries)]
        for way, scores in scores_of(index, {"caption": texts.embedding, "mean of segments": segments}).items():
            ranks = [int((own > own[rows].max()).sum()) for own, rows in zip(scores, right, strict=True)]
            shares = [100 * sum(rank < place for rank in ranks) / len(ranks) for place in PLACES]
            words = ", ".join(f"{share:.1f} in {place}" for place, share in zip(PLACES, shares, strict=True))
            sys.stdout.write(f"{kind}: {way}: {words}\n")


if __name__ == "__main__":
    main()
