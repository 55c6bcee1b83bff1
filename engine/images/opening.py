"""From a path, bytes, array or tensor to an open Pillow image: header read, pixels not yet."""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Callable
from typing import IO, TypeAlias, cast

import numpy as np
import torch
from PIL import Image

from engine.images.errors import ImageError

ImageSource: TypeAlias = (
    "str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | np.ndarray | torch.Tensor"
)

# Raster formats that Pillow decodes by itself. Left out on purpose: EPS and PDF (start another program or
# have no pixels), stubs, and formats nobody keeps photographs in.
FORMATS = (
    *("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "AVIF", "JPEG2000"),
    *("PPM", "TGA", "ICO", "QOI", "PCX", "SGI", "DDS"),
)

_FLOAT_SLACK = 1e-4
_CHANNELS = (1, 2, 3, 4)
_SIXTEEN_TO_EIGHT = ((np.arange(65536) + 128) // 257).astype(np.uint8)


def describe(source: ImageSource) -> str:
    """Name `source` for messages and reports: the path itself, or the kind of object with its size."""
    if isinstance(source, (str, os.PathLike)):
        return str(os.fspath(source)) or "''"
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f"bytes ({len(source)} bytes)"
    if isinstance(source, Image.Image):
        return f"PIL image ({source.mode}, {source.width} x {source.height})"
    if isinstance(source, np.ndarray):
        return f"numpy array {source.dtype} {source.shape}"
    if isinstance(source, torch.Tensor):
        return f"torch tensor {source.dtype} {tuple(source.shape)}"
    raise TypeError(
        "decode: source must be a path, bytes, a PIL image, a numpy array or a torch tensor, "
        f"got {type(source).__name__}"
    )


def check_size(name: str, width: int, height: int, max_pixels: int) -> None:
    """Refuse a picture without pixels or with more than `max_pixels` of them, before any is decoded."""
    if width < 1 or height < 1:
        raise ImageError(name, f"the picture has no pixels ({width} x {height})")
    if width * height > max_pixels:
        raise ImageError(
            name,
            f"the picture is too large: {width} x {height} = {width * height} pixels, "
            f"the limit is {max_pixels} (max_pixels)",
        )


def open_file(path: str, name: str) -> IO[bytes]:
    """Open a regular, non-empty file; anything that could block or is not a file is refused first."""
    if not path:
        raise ImageError(name, "the path is empty")
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise ImageError(name, "this is a directory, not an image file")
        # A pipe or a device would wait for ever or never end.
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(name, "this is not a regular file")
        if status.st_size == 0:
            raise ImageError(name, "the file is empty")
        return open(path, "rb")
    except FileNotFoundError:
        raise ImageError(name, "there is no such file") from None
    except OSError as error:
        raise ImageError(name, f"the file cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(name, f"this is not a usable path ({error})") from error


def open_bytes(data: bytes | bytearray | memoryview, name: str) -> IO[bytes]:
    """Wrap encoded bytes as a file."""
    if len(data) == 0:
        raise ImageError(name, "there are no bytes")
    return io.BytesIO(bytes(data))


def open_image(stream: IO[bytes], name: str) -> Image.Image:
    """Read the header of the first format that recognises `stream`.

    Pillow's own `Image.open` checks the size against a global setting and warns, neither of which can be
    changed for one call from several threads; asking the same registered readers directly leaves the limit to
    the caller.
    """
    Image.init()
    prefix = stream.read(16)
    unsupported = ""
    for format_name in FORMATS:
        if format_name not in Image.OPEN:
            continue
        factory, accept = Image.OPEN[format_name]
        accepted = accept(prefix) if accept is not None else True
        if isinstance(accepted, str):
            unsupported = f": {accepted}"
        if accepted is not True:
            continue
        stream.seek(0)
        try:
            # For a stream without a name Pillow's readers take an empty one.
            return cast("Callable[[IO[bytes], str], Image.Image]", factory)(stream, "")
        except (SyntaxError, IndexError, TypeError, struct.error):
            # How a reader says "not mine": the next one may know it.
            continue
    raise ImageError(name, f"this is not an image in a format that can be read{unsupported}")


def from_array(array: np.ndarray, name: str) -> Image.Image:
    """Take pixels as (H, W) or (H, W, C) with C = 1 grey, 2 grey + alpha, 3 RGB, 4 RGB + alpha.

    uint8 as it is, uint16 scaled by 1/257, bool black and white, floating point from 0 to 1.
    """
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in _CHANNELS):
        raise ImageError(name, "pixels must have shape (H, W) or (H, W, C) with C in 1, 2, 3, 4")
    pixels = np.ascontiguousarray(eight_bit(array, name))
    return Image.fromarray(pixels)


def from_tensor(tensor: torch.Tensor, name: str) -> Image.Image:
    """Take pixels as (H, W), (C, H, W) or (H, W, C); read as (C, H, W) whenever the first size is 1 to 4.

    The channel-first reading wins because it is what torch code passes on: an image of one to four rows in
    (H, W, C) order must be given as a numpy array. Value ranges as for arrays; any device.
    """
    try:
        pixels = tensor.detach().cpu()
        if pixels.dtype == torch.bfloat16:
            pixels = pixels.float()
        if pixels.ndim == 3 and pixels.shape[0] in _CHANNELS:
            pixels = pixels.permute(1, 2, 0)
        array = pixels.numpy()
    # Tensors without memory (meta) and of odd layouts (sparse, nested): torch has an error of its own for each.
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ImageError(name, f"this tensor has no plain pixels ({error})") from error
    return from_array(array, name)


def eight_bit(array: np.ndarray, name: str) -> np.ndarray:
    """Scale pixel values to uint8, rounding to nearest; what has no agreed range is refused."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    # By kind and size: either byte order is as good.
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return _SIXTEEN_TO_EIGHT[array]
    if not np.issubdtype(array.dtype, np.floating):
        raise ImageError(name, f"pixels must be uint8, uint16, bool or floating point from 0 to 1, not {array.dtype}")
    low, high = float(array.min()), float(array.max())
    # Written so that NaN, which compares false with everything, is refused too.
    if not (low >= -_FLOAT_SLACK and high <= 1 + _FLOAT_SLACK):
        raise ImageError(name, f"floating-point pixels must lie between 0 and 1, these go from {low:g} to {high:g}")
    return np.rint(np.clip(array.astype(np.float32), 0, 1) * 255).astype(np.uint8)
