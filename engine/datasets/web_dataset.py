"""WebDataset shards as training data: tar files in which the files of one sample share their name up to the first dot.

    0001.jpg 0001.txt                               a picture and its caption
    0002.png 0002.json                              the caption is its "caption", a negative its "negative_caption"
    0003.jpg 0003.txt 0003.negative.txt             a caption and a hard negative of it
    0004.jpg 0004.txt 0004.negative.jpg 0004.negative.txt      and a picture of that

Shards are read with `tarfile`, and pictures at their place in the shard when they are encoded; nothing is unpacked.
"""

from __future__ import annotations

import glob
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from engine.datasets.base import ImageRef
from engine.datasets.captioned import CaptionedImages, CaptionedItem, Problem, usable

PICTURES = ("jpg", "jpeg", "png", "webp")
NEGATIVE = "negative."
MAX_TEXT_BYTES = 1_000_000


@dataclass(frozen=True)
class Member:
    """A file within a shard: where it lies, so that it can be read without looking for it."""

    shard: Path
    name: str
    offset: int
    size_bytes: int

    def __call__(self) -> bytes:
        """Its bytes. Raises OSError when the shard cannot be read or is shorter than it was."""
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.size_bytes)
        if len(data) != self.size_bytes:
            raise OSError(f"{self.shard}: {self.name} must hold {self.size_bytes} bytes, got {len(data)}")
        return data

    def ref(self) -> ImageRef:
        """The same as an image."""
        return ImageRef(f"{self.shard.name}/{self.name}", load=self)


def read_web_dataset(shards: str) -> CaptionedImages:
    """The samples of all shards in order of their names; ids are `"<shard>/<sample>"`.

    Args:
        shards: path of a tar file, or a pattern with `*`, `?` and `[…]`. Compressed ones are refused.

    Returns:
        items; samples without a picture or a caption, and what cannot be read of a shard, are in the problems.

    Raises:
        FileNotFoundError: no file fits the pattern.
        ValueError: two shards of the same name, or nothing to train on.
    """
    paths = sorted(Path(path) for path in glob.glob(shards, recursive=True))
    if not paths:
        raise FileNotFoundError(f"read_web_dataset: no file fits {shards!r}")
    names = [path.name for path in paths]
    if len(set(names)) != len(names):
        raise ValueError("read_web_dataset: shards must have names of their own, got one name in several folders")
    items: list[CaptionedItem] = []
    problems: list[Problem] = []
    for path in paths:
        for key, parts in _samples(path, problems).items():
            try:
                items.append(_item(f"{path.name}/{key}", parts))
            except ValueError as error:
                problems.append(Problem(f"{path}/{key}", str(error)))
    return usable("read_web_dataset", items, problems)


def _samples(path: Path, problems: list[Problem]) -> dict[str, dict[str, Member]]:
    """The members of a shard by sample and ending."""
    found: dict[str, dict[str, Member]] = {}
    for member in _members(path, problems):
        place = PurePosixPath(member.name)
        stem, _, ending = place.name.partition(".")
        parts = found.setdefault(str(place.parent / stem), {})
        if ending.lower() in parts:
            problems.append(Problem(f"{path}/{member.name}", "comes twice; the first one is taken"))
        parts.setdefault(ending.lower(), member)
    return found


def _members(path: Path, problems: list[Problem]) -> Iterator[Member]:
    """Every whole file of a shard. What cannot be read is passed over, to the next header that makes sense."""
    size, end = path.stat().st_size, 0
    try:
        # `ignore_zeros` is what lets tarfile go on behind a broken header; how much it passed over shows in the places.
        with tarfile.open(path, "r:", ignore_zeros=True) as archive:
            for entry in archive:
                _check_gap(path, end, entry.offset, problems)
                end = entry.offset_data + -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if entry.isreg() and entry.offset_data + entry.size > size:
                    problems.append(Problem(f"{path}/{entry.name}", "the shard ends in the middle of it"))
                elif entry.isreg():
                    yield Member(path, entry.name, entry.offset_data, entry.size)
    except (tarfile.TarError, EOFError) as error:
        if end <= size:
            problems.append(Problem(str(path), f"cannot be read behind byte {end} ({error})"))
        return
    _check_gap(path, end, size, problems)


def _check_gap(path: Path, start: int, stop: int, problems: list[Problem]) -> None:
    """Report what lies between two members when it is more than filling."""
    with path.open("rb") as file:
        file.seek(start)
        while start < stop:
            block = file.read(min(1 << 20, stop - start))
            if block.count(0) != len(block):
                problems.append(Problem(str(path), f"bytes {start} to {stop} are no tar member and are lost"))
                return
            start += max(1, len(block))


def _item(name: str, parts: dict[str, Member]) -> CaptionedItem:
    """One sample. Raises ValueError saying what it lacks."""
    image, other = (_picture(parts, prefix) for prefix in ("", NEGATIVE))
    if image is None:
        raise ValueError(f"a sample must have a picture ({', '.join(PICTURES)}), got {', '.join(parts)}")
    facts = _facts(parts)
    caption = _text(parts, "txt") or facts.get("caption", "")
    negative = _text(parts, NEGATIVE + "txt") or facts.get("negative_caption", "")
    if not caption:
        raise ValueError("a sample must have a caption (txt, or json with a caption), got none")
    if other is not None and not negative:
        raise ValueError("a negative picture must have a negative caption, got none")
    return CaptionedItem(
        name, image.ref(), (caption,), (negative,) if negative else (), None if other is None else other.ref()
    )


def _picture(parts: dict[str, Member], prefix: str) -> Member | None:
    return next((parts[prefix + ending] for ending in PICTURES if prefix + ending in parts), None)


def _text(parts: dict[str, Member], ending: str) -> str:
    """The text of a member, stripped; empty where there is none. Raises ValueError for what is no text."""
    member = parts.get(ending)
    if member is None:
        return ""
    if member.size_bytes > MAX_TEXT_BYTES:
        raise ValueError(f"{member.name} must hold at most {MAX_TEXT_BYTES} bytes of text, got {member.size_bytes}")
    try:
        return member().decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{member.name} must be UTF-8, got byte 0x{error.object[error.start]:02x}") from error


def _facts(parts: dict[str, Member]) -> dict[str, str]:
    """The texts in a sample's JSON."""
    written = _text(parts, "json")
    try:
        content = json.loads(written or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{parts['json'].name} must be JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{parts['json'].name} must be an object, got {content!r:.40}")
    return {key: value.strip() for key, value in content.items() if isinstance(value, str)}
