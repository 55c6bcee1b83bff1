"""The one error that decoding raises for a picture it cannot or will not show."""

from __future__ import annotations


class ImageError(ValueError):
    """A picture was refused; says which one and why, in words a user can act on.

    Attributes: `source` (the path, or a description such as `bytes (12 bytes)`), `reason` (without the
    source).
    """

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(source, reason)
        self.source = source
        self.reason = reason

    def __str__(self) -> str:
        return f"decode: {self.source}: {self.reason}"
