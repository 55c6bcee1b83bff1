"""Ways to write awkward picture files, and what each must look like."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageCms

H, W = 13, 17
WHITE = 255


def colours(seed: int = 0, channels: int = 3, depth: type = np.uint8) -> np.ndarray:
    """Smooth random colours that survive lossy formats."""
    rng = np.random.default_rng(seed)
    top = np.iinfo(depth).max
    start, end = rng.uniform(0, top, (2, channels))
    ramp = np.linspace(0, 1, H * W).reshape(H, W, 1)
    return np.rint(start * (1 - ramp) + end * ramp).astype(depth)


def blend(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Lay colours over white, in exact arithmetic."""
    a = alpha.astype(np.float64)[:, :, None] / 255
    return np.rint(rgb.astype(np.float64) * a + WHITE * (1 - a)).astype(np.uint8)


def grey3(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey.reshape(*grey.shape[:2], 1), 3, axis=2)


def saved(image: Image.Image, format_name: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format_name, **options)
    return stream.getvalue()


def png(samples: np.ndarray, bits: int, kind: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Write a PNG by hand: `samples` (H, W, C) in their own depth, extra chunks before the pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width = samples.shape[:2]
    rows = []
    for row in samples.reshape(height, -1):
        if bits == 16:
            packed = row.astype(">u2").tobytes()
        elif bits == 8:
            packed = row.astype(np.uint8).tobytes()
        else:
            flags = (row[:, None] >> np.arange(bits - 1, -1, -1)) & 1
            packed = np.packbits(flags.astype(np.uint8).ravel()).tobytes()
        rows.append(b"\0" + packed)
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def as_stored(shown: np.ndarray, orientation: int) -> np.ndarray:
    """Store `shown` so that a viewer following `orientation` shows it again (EXIF's table of rows and columns)."""
    return {
        1: shown,
        2: shown[:, ::-1],
        3: shown[::-1, ::-1],
        4: shown[::-1],
        5: shown.transpose(1, 0, 2),
        6: np.rot90(shown, 1),
        7: shown[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(shown, -1),
    }[orientation]


def profile(name: str) -> bytes:
    if name in ("sRGB", "LAB"):
        return ImageCms.ImageCmsProfile(ImageCms.createProfile(name)).tobytes()
    # A hand-made matrix profile: sRGB's primaries with the red and the green column exchanged.
    data = bytearray(profile("sRGB"))
    count = struct.unpack(">I", data[128:132])[0]
    places = {bytes(data[132 + 12 * k : 136 + 12 * k]): 132 + 12 * k for k in range(count)}
    red, green = places[b"rXYZ"], places[b"gXYZ"]
    data[red + 4 : red + 12], data[green + 4 : green + 12] = (
        data[green + 4 : green + 12],
        data[red + 4 : red + 12],
    )
    return bytes(data)


def tiff16(grey: np.ndarray, order: str, *, bits: int = 16, zero_is_white: bool = False) -> bytes:
    """Write an uncompressed grey TIFF of 16 or 12 bits by hand in byte order "<" or ">"."""
    pixels = grey.astype(order + "u2").tobytes()
    if bits == 12:
        flags = (grey.reshape(H, W, 1) >> np.arange(11, -1, -1)) & 1
        pixels = np.packbits(flags.reshape(H, -1).astype(np.uint8), axis=1).tobytes()
    colour = 0 if zero_is_white else 1
    tags = [(256, 3, W), (257, 3, H), (258, 3, bits), (259, 3, 1), (262, 3, colour), (273, 4, 8), (277, 3, 1)]
    tags += [(278, 3, H), (279, 4, len(pixels))]
    out = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8 + len(pixels)) + pixels
    out += struct.pack(order + "H", len(tags))
    for tag, kind, value in tags:
        field = struct.pack(order + "HH", value, 0) if kind == 3 else struct.pack(order + "I", value)
        out += struct.pack(order + "HHI", tag, kind, 1) + field
    return out + struct.pack(order + "I", 0)
