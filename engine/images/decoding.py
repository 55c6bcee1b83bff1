"""Decode pictures as a person sees them, one or many, without a broken file harming its neighbours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image

from engine.images.colour import colour_key, grey_scale, to_rgb, upright
from engine.images.errors import ImageError
from engine.images.opening import (
    ImageSource,
    check_size,
    describe,
    from_array,
    from_tensor,
    open_bytes,
    open_file,
    open_image,
)

DEFAULT_MAX_PIXELS = 120_000_000
_MAX_THREADS = 8


@dataclass(frozen=True)
class ImageFailure:
    """One refused source: its id, its path (or what kind of object it was) and the reason in words."""

    id: str
    path: str
    reason: str


@dataclass(frozen=True)
class DecodedImages:
    """What `decode_many` made of a list of sources.

    `images[k]` is the picture of `ids[k]` and came from `sources[rows[k]]`; refused sources are in `failures`
    and nowhere else, in source order.
    """

    images: list[Image.Image]
    ids: list[str]
    rows: list[int]
    failures: list[ImageFailure]

    def __len__(self) -> int:
        return len(self.images)


def decode(source: ImageSource, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Image.Image:
    """Decode one picture to upright 8-bit sRGB, as a viewer shows it on a white page.

    Two things that some viewers do it leaves: a PNG's own gamma and primaries (gAMA, cHRM) count for nothing, only an
    ICC profile does; and 16-bit RGB is cut to 8 bits first, so that with a transparent colour (tRNS) those that differ
    from it in the lower 8 bits alone are transparent too.

    Args:
        source: a path (str or PathLike), the encoded bytes, a PIL image, a numpy array (H, W) or (H, W, C),
            or a torch tensor (C, H, W), (H, W, C) or (H, W) (channel-first wins when the first size is 1 to
            4). Arrays and tensors: uint8, uint16 (white = 65535), bool, or floating point from 0 to 1;
            C = 1 grey, 2 grey + alpha, 3 RGB, 4 RGB + alpha.
        max_pixels: width x height that is still accepted; read from the header before any pixel is decoded.
            At most about 24 bytes a pixel are used on the way.

    Returns:
        A new PIL image of mode RGB without metadata. Orientation is applied once (EXIF or XMP, all eight), an
        embedded ICC profile is converted to sRGB, transparency is laid over white, 16-bit grey (12-bit in a TIFF)
        is scaled to 8 bits, CMYK is converted, of an animation the first shown frame is taken (of an open PIL image the
        current one). A PIL image is never changed, and its own orientation tag still counts: drop the tag
        after turning an image by hand.

    Raises:
        ImageError: missing, empty, not a regular file, not an image, truncated, damaged, no pixels, too many
            pixels, or pixel values without an agreed range; carries `source` and `reason`.
        TypeError: `source` is none of the above, `max_pixels` is no integer.
        ValueError: `max_pixels` is not positive.

    Source: own rules; EXIF 2.32 orientation, ICC.1 through LittleCMS, PNG transparency of its specification.

    Example:
        >>> decode(np.full((2, 3), 128, dtype=np.uint8)).getpixel((0, 0))
        (128, 128, 128)
    """
    _check_whole("decode", "max_pixels", max_pixels)
    if max_pixels < 1:
        raise ValueError(f"decode: max_pixels must be at least 1, got {max_pixels}")
    name = describe(source)
    if isinstance(source, (np.ndarray, torch.Tensor)):
        return _decode_pixels(source, name, max_pixels)
    if isinstance(source, Image.Image):
        return _finish(source, name, max_pixels)
    if isinstance(source, (bytes, bytearray, memoryview)):
        stream = open_bytes(source, name)
    else:
        stream = open_file(os.fspath(source), name)
    with stream:
        try:
            image = open_image(stream, name)
            check_size(name, image.width, image.height, max_pixels)
            # An animated PNG may carry a still picture for viewers that cannot animate; the animation is what
            # shows.
            if image.info.get("default_image") and getattr(image, "n_frames", 1) > 1:
                image.seek(1)
        except ImageError:
            raise
        except Exception as error:
            raise _damaged(name, error) from error
        return _finish(image, name, max_pixels)


def decode_many(
    sources: Sequence[ImageSource],
    *,
    on_error: Literal["raise", "skip"] = "raise",
    ids: Sequence[str] | None = None,
    threads: int | None = None,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> DecodedImages:
    """Decode many pictures; a refused one is reported and never moves another.

    Args:
        sources: as for `decode`.
        on_error: "raise" stops at the first refused source (in source order), "skip" collects them in
            `failures`.
        ids: one distinct name per source; default the row numbers "0", "1", …
        threads: decoding threads; default one per core, at most eight; 1 stays in the calling thread.
        max_pixels: as for `decode`.

    Returns:
        `DecodedImages`; `images`, `ids` and `rows` have one entry per decoded picture, in source order.

    Raises:
        ImageError: a source was refused and `on_error` is "raise".
        TypeError: a source is of no accepted type (with either `on_error`).
        ValueError: wrong `on_error` or `threads`; ids missing or used twice.

    Example:
        >>> grey = np.zeros((2, 2), dtype=np.uint8)
        >>> done = decode_many([grey, b"not an image", grey], on_error="skip")
        >>> done.ids, done.failures[0].id
        (['0', '2'], '1')
    """
    names = _check_many(sources, on_error, ids, threads)

    def attempt(source: ImageSource) -> Image.Image | ImageError:
        try:
            return decode(source, max_pixels=max_pixels)
        except ImageError as error:
            return error

    done = DecodedImages([], [], [], [])
    count = threads if threads is not None else min(_MAX_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count) if count > 1 and len(sources) > 1 else None
    try:
        results = map(attempt, sources) if pool is None else pool.map(attempt, sources)
        for row, result in enumerate(results):
            if isinstance(result, Image.Image):
                done.images.append(result)
                done.ids.append(names[row])
                done.rows.append(row)
            elif on_error == "raise":
                raise result
            else:
                done.failures.append(ImageFailure(names[row], result.source, result.reason))
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
    return done


def _check_many(
    sources: Sequence[ImageSource], on_error: str, ids: Sequence[str] | None, threads: int | None
) -> list[str]:
    """Check the options of `decode_many` and return the id of every source."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f'decode_many: on_error must be "raise" or "skip", got {on_error!r}')
    if threads is not None:
        _check_whole("decode_many", "threads", threads)
    if threads is not None and threads < 1:
        raise ValueError(f"decode_many: threads must be at least 1, got {threads}")
    names = [str(row) for row in range(len(sources))] if ids is None else list(ids)
    if len(names) != len(sources):
        raise ValueError(f"decode_many: ids must name every source, got {len(names)} ids for {len(sources)} sources")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"decode_many: ids must be distinct, got {twice!r} more than once")
    return names


def _check_whole(who: str, option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{who}: {option} must be an integer, got {type(value).__name__}")


def _decode_pixels(source: np.ndarray | torch.Tensor, name: str, max_pixels: int) -> Image.Image:
    """Check the size of raw pixels before any of them is copied, then convert."""
    if source.ndim not in (2, 3):
        raise ImageError(name, "pixels must have two or three axes; give one image at a time")
    if 0 in source.shape:
        raise ImageError(name, "the picture has no pixels")
    channel_first = isinstance(source, torch.Tensor) and source.ndim == 3 and source.shape[0] <= 4
    height, width = source.shape[1:] if channel_first else source.shape[:2]
    check_size(name, width, height, max_pixels)
    image = from_array(source, name) if isinstance(source, np.ndarray) else from_tensor(source, name)
    return to_rgb(image, None, name)


def _finish(image: Image.Image, name: str, max_pixels: int) -> Image.Image:
    """Load the pixels of an opened image and convert them; what a reader raises becomes an `ImageError`."""
    check_size(name, image.width, image.height, max_pixels)
    try:
        key = colour_key(image)
        image.load()
        # The size of a frame inside a container shows only now.
        check_size(name, image.width, image.height, max_pixels)
        # Read before turning, which leaves the tags behind.
        rgb = to_rgb(upright(image), key, name, grey_scale(image))
    except ImageError:
        raise
    except Exception as error:
        # Readers of damaged files raise nearly anything (OSError, SyntaxError, struct.error, KeyError, ...).
        raise _damaged(name, error) from error
    if rgb is image:
        rgb = rgb.copy()
    # All that the metadata asked for has been done: kept, it would be done again by the next reader.
    rgb.info = {}
    return rgb


def _damaged(name: str, error: Exception) -> ImageError:
    text = str(error) or type(error).__name__
    return ImageError(name, f"the image is truncated or damaged ({text})")
