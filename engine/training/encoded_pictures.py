"""Features of pictures of which some cannot be read: those keep their rows in a store, and a note says why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from engine.atomic_files import write_text
from engine.engine import Engine
from engine.features import ImageFeatures, Needs
from engine.images import ImageFailure, ImageSource
from engine.store import FeatureStore, damaged

# Pictures that are held as files at once; with a blank one they fill two batches.
BLOCK = 127
UNREAD = "unread.json"


def encoded_pictures(
    engine: Engine,
    needs: Needs,
    loads: Sequence[Callable[[], ImageSource]],
    store: FeatureStore[ImageFeatures],
    first: int,
) -> ImageFeatures:
    """A row for each picture, those of a blank one where it cannot be read; why is noted in the folder of the store.

    Args:
        engine, needs: what is encoded.
        loads: give the pictures, or where they are.
        store: what the rows are for.
        first: row of the first picture there.
    """
    parts = []
    unread: dict[int, str] = {}
    blank = Image.new("RGB", (engine.spec.image_size, engine.spec.image_size))
    for start in range(0, len(loads), BLOCK):
        failures: list[ImageFailure] = []
        sources = [*(load() for load in loads[start : start + BLOCK]), blank]
        names = [str(row) for row in range(len(sources))]
        found = engine.encode_images(sources, scorer=needs, ids=names, on_error=failures.append)
        place = {int(name): row for row, name in enumerate(found.ids or ())}
        # Names and places serve explanations, which training has no use for.
        found = replace(found, ids=None, sizes=None, views=None)
        parts.append(found[torch.tensor([place.get(row, len(found) - 1) for row in range(len(sources) - 1)])])
        unread |= {first + start + int(failure.id): failure.reason for failure in failures}
    # In place of what an earlier try said of these rows.
    held = {row: reason for row, reason in unread_rows(store).items() if not first <= row < first + len(loads)}
    # Also where all could be read, so that a note that is gone is seen to be.
    write_text(_note(store), json.dumps(held | unread, indent=1))
    return ImageFeatures.cat(parts)


def file_state(path: Path) -> tuple[int, int] | None:
    """Size in bytes and time of the last change in ns, which tell a changed file unread; None where there is none."""
    try:
        held = path.stat()
    except OSError:
        # Whoever opens it will say so.
        return None
    return held.st_size, held.st_mtime_ns


def unread_rows(store: FeatureStore[ImageFeatures]) -> dict[int, str]:
    """The rows whose pictures could not be read, and why. Raises ValueError when the note of them is damaged."""
    if not _note(store).exists():
        # A store of format 1 has none of pictures that could all be read.
        if store.format_version > 1 and len(store.missing()) < store.shards:
            raise damaged(store.folder, f"{UNREAD} is missing")
        return {}
    try:
        held = {int(row): str(why) for row, why in json.loads(_note(store).read_text(encoding="utf-8")).items()}
    except (AttributeError, ValueError) as error:
        raise damaged(store.folder, f"{UNREAD}: {error}") from error
    outside = [row for row in held if not 0 <= row < len(store)]
    if outside:
        raise damaged(store.folder, f"{UNREAD}: row {outside[0]} of {len(store)}")
    return held


def _note(store: FeatureStore[ImageFeatures]) -> Path:
    return store.folder / UNREAD
