"""Pictures on their way to an encoder: one or many, named, decoded a batch at a time, failures kept apart."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from PIL import Image

from engine.encoders.base import Encoder, NonFiniteError, Progress
from engine.encoders.inputs import check_inside
from engine.encoders.progress import reporting
from engine.encoders.taps import tap_for
from engine.features import ImageFeatures, Needs, RegionPlan
from engine.images import ImageError, ImageFailure, ImageSource, decode_many

OnError = Literal["raise", "skip"] | Callable[[ImageFailure], None]
# Rectangles (R, 4) of each image.
Boxes = Sequence[Sequence[Sequence[int]] | np.ndarray]

# Failures that a warning names before it only counts.
NAMED_FAILURES = 5
# Images scored in one go when their features are there already.
FEATURE_ROWS = 1024


def as_list(images: ImageSource | Sequence[ImageSource]) -> list[ImageSource]:
    """The sources as a list; a single source is a list of one, a four-dimensional array or tensor a batch.

    Raises:
        ValueError: no image.
        TypeError: what is none and no list.
    """
    one: tuple[type, ...] = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)
    if isinstance(images, one) or (isinstance(images, np.ndarray | torch.Tensor) and images.ndim < 4):
        sources = [images]
    else:
        if not hasattr(images, "__iter__"):
            raise TypeError(
                "images: must be paths, bytes, PIL images, numpy arrays or torch tensors, one or a list of them, "
                f"got {type(images).__name__}"
            )
        sources = list(images)  # type: ignore[arg-type]
    if not sources:
        raise ValueError("images: there must be at least one, got none")
    return sources  # type: ignore[return-value]


def names_of(sources: Sequence[ImageSource], ids: Sequence[str] | None = None) -> list[str]:
    """A name for each source: the given ids, else its path, else its row. ValueError for too few or many."""
    if ids is None:
        return [
            os.fsdecode(source) if isinstance(source, str | os.PathLike) else str(row)
            for row, source in enumerate(sources)
        ]
    if isinstance(ids, str) or len(ids) != len(sources):
        shown = repr(ids) if isinstance(ids, str) else f"{len(ids)} ids"
        raise ValueError(f"images: ids must name each of {len(sources)} images, got {shown}")
    return [str(name) for name in ids]


def decode_batch(
    sources: Sequence[ImageSource], names: Sequence[str], start: int
) -> tuple[list[Image.Image], list[int], list[ImageFailure]]:
    """Pictures of one batch, the rows they stand in (counted from `start`), and what could not be read.

    `names` are those of all rows. A failure has its name as id and, where the source is no file, its row in
    `path`, so that it can be found in a list of arrays.
    """
    # Rows as ids inside: the same picture may come twice.
    done = decode_many(sources, on_error="skip")
    failures = []
    for failure in done.failures:
        row = start + int(failure.id)
        is_file = isinstance(sources[int(failure.id)], str | os.PathLike)
        path = failure.path if is_file else f"image {row}, {failure.path}"
        failures.append(ImageFailure(names[row], path, failure.reason))
    return done.images, [start + row for row in done.rows], failures


def encoded_batches(
    encoder: Encoder,
    sources: Sequence[ImageSource],
    names: Sequence[str],
    needs: Needs,
    *,
    boxes: Boxes | None = None,
    batch_size: int = 64,
    stop: bool = True,
) -> Iterator[tuple[range, ImageFeatures | None, list[ImageFailure]]]:
    """The pictures a batch at a time: its rows, the features of those that could be read, and the failures.

    The features are None when nothing of the batch could be read. Raises what `encode_pictures` raises and, with
    `stop`, ImageError for the first picture that cannot be read, before its batch is encoded.
    """
    for start in range(0, len(sources), batch_size):
        rows = range(start, min(start + batch_size, len(sources)))
        pictures, read, failures = decode_batch(sources[rows.start : rows.stop], names, start)
        if failures and stop:
            raise ImageError(failures[0].path, failures[0].reason)
        part = None
        if pictures:
            own = None if boxes is None else [boxes[row] for row in read]
            named = [names[row] for row in read]
            part = encode_pictures(encoder, pictures, named, needs, boxes=own, batch_size=batch_size)
        yield rows, part, failures


def blocks_of(
    encoder: Encoder,
    sources: ImageFeatures | Sequence[ImageSource],
    needs: Needs,
    *,
    batch_size: int = 64,
    progress: bool | Progress = False,
) -> Iterator[tuple[int, ImageFeatures]]:
    """Features of the images, a block at a time, with the row each block begins at.

    Features that are there already come `FEATURE_ROWS` at a time, pictures are encoded `batch_size` at a time.

    Raises:
        ImageError: a picture cannot be read.
    """
    with reporting(progress, "images") as report:
        if isinstance(sources, ImageFeatures):
            for start in range(0, len(sources), FEATURE_ROWS):
                yield start, sources[start : start + FEATURE_ROWS]
                if report is not None:
                    report(min(start + FEATURE_ROWS, len(sources)), len(sources))
            return
        for rows, block, _ in encoded_batches(encoder, sources, names_of(sources), needs, batch_size=batch_size):
            assert block is not None  # what cannot be read has stopped it
            yield rows.start, block
            if report is not None:
                report(rows.stop, len(sources))


def report_failures(failures: Sequence[ImageFailure], on_error: OnError, total: int) -> None:
    """Hand the failures to the caller's function, or name them in a UserWarning."""
    if callable(on_error):
        for failure in failures:
            on_error(failure)
        return
    if failures and on_error == "skip":
        shown = "; ".join(f"{failure.path} ({failure.reason})" for failure in failures[:NAMED_FAILURES])
        more = f"; and {len(failures) - NAMED_FAILURES} more" if len(failures) > NAMED_FAILURES else ""
        message = f"encode_images: {len(failures)} of {total} images left out: {shown}{more}"
        warnings.warn(message, UserWarning, stacklevel=3)


def none_read(failures: Sequence[ImageFailure]) -> ImageError:
    """The error for a list of pictures of which none could be read."""
    first = failures[0]
    if len(failures) == 1:
        return ImageError(first.path, first.reason)
    return ImageError(first.path, f"{first.reason}; none of {len(failures)} images could be read")


def encode_pictures(
    encoder: Encoder,
    pictures: Sequence[Image.Image],
    names: Sequence[str],
    needs: Needs,
    *,
    boxes: Boxes | None = None,
    batch_size: int = 64,
) -> ImageFeatures:
    """Features of decoded pictures with what `needs` asks for, and their names as ids.

    `boxes` are each picture's own regions `(R, 4)` in place of the plan's grid.

    Raises:
        ValueError: naming the picture, for an embedding that is not finite or a region that is not in it, and what
            `tap_for` raises.
    """
    plan = needs.regions
    if boxes is not None:
        # The encoder would know the image by its row in this batch alone.
        check_inside("encode_images", [np.asarray(own) for own in boxes], pictures, names)
        plan = plan or RegionPlan()
    try:
        with torch.no_grad():
            features = encoder.encode_images(
                pictures,
                tap=tap_for(encoder.spec, needs),
                layers=needs.image_layers,
                regions=plan,
                boxes=None if boxes is None else [np.asarray(own) for own in boxes],
                batch_size=batch_size,
            )
    except NonFiniteError as error:
        raise ValueError(
            f"encode_images: the embedding of image {names[error.row]} must be finite; check its pixels and "
            "the dtype of the weights"
        ) from error
    return replace(features, ids=tuple(names))
