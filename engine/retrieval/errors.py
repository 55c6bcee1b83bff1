"""What goes wrong with an index beyond wrong arguments."""

from __future__ import annotations

from os import PathLike


class IndexDamaged(ValueError):
    """A file of an index is not what was written.

    Attributes:
        path: the file.
        reason: what is wrong with it.
    """

    def __init__(self, path: str | PathLike[str], reason: str) -> None:
        super().__init__(str(path), reason)
        self.path = str(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"Index: {self.path} is damaged: {self.reason}"


class IndexBusy(RuntimeError):
    """Somebody else is writing to the index."""
