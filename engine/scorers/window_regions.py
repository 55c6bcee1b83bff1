"""The window head that a scorer names: a file, an object, or the one that is shipped."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from engine.features import ImageFeatures
from engine.heads.base import shipped_head
from engine.heads.registry import load_window_head
from engine.heads.window_head import WindowHead

# Models that a window head is shipped for; any other name is a path.
SHIPPED = ("scenes",)


class StoredWindowHead:
    """A window head as its file holds it, used where the features are; a `RegionHead` of the features' contract."""

    def __init__(self, head: WindowHead) -> None:
        self.layers = head.layers
        # Its weights do not change any more: once is enough.
        self.tag = head.tag
        self.check_belongs = head.check_belongs
        self._on = {torch.device("cpu"): head}

    def regions(self, images: ImageFeatures, boxes: Tensor) -> Tensor:
        """See `WindowHead.regions`."""
        device = images.embedding.device
        if device not in self._on:
            self._on[device] = deepcopy(self._on[torch.device("cpu")]).to(device)
        return self._on[device].regions(images, boxes)


def window_head(head: str | WindowHead) -> WindowHead | StoredWindowHead:
    """The head by name of the model it is shipped for, by path, or as it was given.

    Raises what `shipped_head` and `load_window_head` raise, TypeError for anything else.
    """
    if isinstance(head, WindowHead):
        return head
    if not isinstance(head, str | Path):
        raise TypeError(f"sgi: head must be a path, a WindowHead or None, got {type(head).__name__}")
    path = shipped_head(WindowHead.name, head) if head in SHIPPED else Path(head)
    return _stored(str(path), path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=16)
def _stored(path: str, written_ns: int) -> StoredWindowHead:
    """`written_ns`: a file that was replaced is read again."""
    return StoredWindowHead(load_window_head(path))
