"""Decoding of awkward pictures: shown as a viewer shows them, or refused with their path and a reason."""

from __future__ import annotations

import io
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageFile

from engine.images import ImageError, decode, decode_many, normalise, resize, to_pixels

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


def tiff16(grey: np.ndarray, order: str) -> bytes:
    """Write an uncompressed 16-bit grey TIFF by hand in byte order "<" or ">"."""
    pixels = grey.astype(order + "u2").tobytes()
    tags = [(256, 3, W), (257, 3, H), (258, 3, 16), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1)]
    tags += [(278, 3, H), (279, 4, len(pixels))]
    out = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8 + len(pixels)) + pixels
    out += struct.pack(order + "H", len(tags))
    for tag, kind, value in tags:
        field = struct.pack(order + "HH", value, 0) if kind == 3 else struct.pack(order + "I", value)
        out += struct.pack(order + "HHI", tag, kind, 1) + field
    return out + struct.pack(order + "I", 0)


Case = tuple[str, bytes, np.ndarray, int]


def orientation_cases() -> list[Case]:
    shown = np.zeros((16, 24, 3), dtype=np.uint8)
    shown[:8, :8] = (250, 10, 10)  # a corner and two bars: no two orientations look alike
    shown[8:, 16:] = (10, 250, 10)
    found: list[Case] = []
    for orientation in range(1, 9):
        image = Image.fromarray(np.ascontiguousarray(as_stored(shown, orientation)))
        tags = exif(orientation)
        jpeg = saved(image, "JPEG", quality=95, subsampling=0, exif=tags)
        found.append((f"jpeg-orientation-{orientation}", jpeg, shown, 40))
        found.append((f"png-orientation-{orientation}", saved(image, "PNG", exif=tags), shown, 0))
        tiff = saved(image, "TIFF", tiffinfo={274: orientation})
        found.append((f"tiff-orientation-{orientation}", tiff, shown, 0))
        if orientation in (3, 6):
            found.append(
                (f"webp-orientation-{orientation}", saved(image, "WEBP", lossless=True, exif=tags), shown, 0)
            )
            xmp = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()
            found.append(
                (
                    f"jpeg-xmp-orientation-{orientation}",
                    saved(image, "JPEG", quality=95, subsampling=0, xmp=xmp),
                    shown,
                    40,
                )
            )
    image = Image.fromarray(shown)
    found.append(
        (
            "jpeg-orientation-out-of-range",
            saved(image, "JPEG", quality=95, subsampling=0, exif=exif(77)),
            shown,
            40,
        )
    )
    broken = b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage"
    found.append(
        ("jpeg-broken-exif", saved(image, "JPEG", quality=95, subsampling=0, exif=broken), shown, 40)
    )
    return found


def transparency_cases() -> list[Case]:
    rgb, alpha = colours(1), colours(2, 1)[:, :, 0]
    grey, deep = colours(3, 1), colours(4, 3, np.uint16)
    indices = (np.arange(H * W).reshape(H, W, 1) % 4).astype(np.uint8)
    table = np.array([[10, 20, 30], [200, 0, 0], [0, 200, 0], [0, 0, 200]], dtype=np.uint8)
    plte = (b"PLTE", table.tobytes())
    palette_alpha = np.array([0, 128, 255, 255], dtype=np.uint8)
    rgba = np.dstack([rgb, alpha])
    over = blend(rgb, alpha)
    keyed = rgb.copy()
    keyed[2:5, 3:9] = (7, 8, 9)
    hidden = np.where((keyed == (7, 8, 9)).all(axis=2), 0, 255)
    deep_keyed = deep.copy()
    deep_keyed[2:5, 3:9] = (0x1234, 0x5678, 0x9ABC)
    deep_hidden = np.where((deep_keyed == (0x1234, 0x5678, 0x9ABC)).all(axis=2), 0, 255)
    key16 = struct.pack(">HHH", 0x1234, 0x5678, 0x9ABC)
    grey16 = colours(5, 1, np.uint16)
    grey16[4:6] = 1000
    show16 = np.rint(grey16[:, :, 0] / 257.0).astype(np.uint8)
    two = (np.arange(H * W).reshape(H, W, 1) % 4).astype(np.uint8)
    four = (np.arange(H * W).reshape(H, W, 1) % 16).astype(np.uint8)
    bit = (np.arange(H * W).reshape(H, W, 1) % 3 == 0).astype(np.uint8)
    gif = Image.new("P", (W, H))
    gif.putdata(indices.ravel().tolist())
    gif.putpalette(table.tobytes())
    see = np.array([0, 255, 255, 255])[indices[:, :, 0]]
    return [
        ("png-rgba", png(rgba, 8, 6), over, 1),
        ("png-rgba-16", png(rgba.astype(np.uint16) * 257, 16, 6), over, 1),
        ("png-grey-alpha", png(np.dstack([grey, alpha]), 8, 4), blend(grey3(grey), alpha), 1),
        (
            "png-grey-alpha-16",
            png(np.dstack([grey, alpha]).astype(np.uint16) * 257, 16, 4),
            blend(grey3(grey), alpha),
            1,
        ),
        (
            "png-palette-alpha",
            png(indices, 8, 3, plte, (b"tRNS", palette_alpha.tobytes())),
            blend(table[indices[:, :, 0]], palette_alpha[indices[:, :, 0]]),
            1,
        ),
        (
            "png-palette-2-bit-one-hidden",
            png(indices, 2, 3, plte, (b"tRNS", b"\0")),
            blend(table[indices[:, :, 0]], see),
            0,
        ),
        ("png-rgb-key", png(keyed, 8, 2, (b"tRNS", struct.pack(">HHH", 7, 8, 9))), blend(keyed, hidden), 0),
        (
            "png-rgb-key-16",
            png(deep_keyed, 16, 2, (b"tRNS", key16)),
            blend((deep_keyed / 257.0).round(), deep_hidden),
            1,
        ),
        (
            "png-grey-key-16",
            png(grey16, 16, 0, (b"tRNS", struct.pack(">H", 1000))),
            blend(grey3(show16), np.where(grey16[:, :, 0] == 1000, 0, 255)),
            0,
        ),
        (
            "png-grey-key-2",
            png(two, 2, 0, (b"tRNS", struct.pack(">H", 2))),
            blend(grey3(two * 85), np.where(two[:, :, 0] == 2, 0, 255)),
            0,
        ),
        (
            "png-grey-key-4",
            png(four, 4, 0, (b"tRNS", struct.pack(">H", 9))),
            blend(grey3(four * 17), np.where(four[:, :, 0] == 9, 0, 255)),
            0,
        ),
        ("png-bit-key-black", png(bit, 1, 0, (b"tRNS", struct.pack(">H", 0))), np.full((H, W, 3), 255), 0),
        ("gif-transparent", saved(gif, "GIF", transparency=0), blend(table[indices[:, :, 0]], see), 0),
        ("webp-alpha", saved(Image.fromarray(rgba), "WEBP", lossless=True, exact=True), over, 1),
        ("tga-alpha", saved(Image.fromarray(rgba), "TGA"), over, 1),
        ("tiff-alpha", saved(Image.fromarray(rgba), "TIFF"), over, 1),
        ("qoi-alpha", saved(Image.fromarray(rgba), "QOI"), over, 1),
        ("jpeg2000-alpha", saved(Image.fromarray(rgba), "JPEG2000"), over, 1),
        ("ico-alpha", saved(Image.fromarray(rgba), "ICO", sizes=[(W, H)]), over, 1),
        ("dds-alpha", saved(Image.fromarray(rgba), "DDS"), over, 1),
        ("fully-transparent", png(np.zeros((H, W, 4)), 8, 6), np.full((H, W, 3), 255), 0),
    ]


def depth_cases() -> list[Case]:
    rgb, grey, grey16 = colours(6), colours(7, 1), colours(8, 1, np.uint16)
    show16 = grey3(np.rint(grey16 / 257.0).astype(np.uint8))
    bit = (np.arange(H * W).reshape(H, W, 1) % 5 == 0).astype(np.uint8)
    deep = colours(9, 3, np.uint16)
    unit = np.linspace(0, 1, H * W, dtype=np.float32).reshape(H, W)
    return [
        ("png-rgb", png(rgb, 8, 2), rgb, 0),
        ("png-grey", png(grey, 8, 0), grey3(grey), 0),
        ("png-grey-1", png(bit, 1, 0), grey3(bit * 255), 0),
        ("png-grey-16", png(grey16, 16, 0), show16, 0),
        ("png-rgb-16", png(deep, 16, 2), np.rint(deep / 257.0), 1),
        ("pgm-16", b"P5 %d %d 65535\n" % (W, H) + grey16.astype(">u2").tobytes(), show16, 0),
        ("ppm", b"P6 %d %d 255\n" % (W, H) + rgb.tobytes(), rgb, 0),
        ("pbm", b"P1 2 1\n1 0\n", np.array([[[0] * 3, [255] * 3]]), 0),
        ("tiff-16-little-endian", tiff16(grey16[:, :, 0], "<"), show16, 0),
        ("tiff-16-big-endian", tiff16(grey16[:, :, 0], ">"), show16, 0),
        ("tiff-float", saved(Image.fromarray(unit), "TIFF"), grey3(np.rint(unit * 255)), 0),
        (
            "tiff-bilevel-g4",
            saved(Image.fromarray(bit[:, :, 0] * 255).convert("1"), "TIFF", compression="group4"),
            grey3(bit * 255),
            0,
        ),
        ("tiff-lzw", saved(Image.fromarray(rgb), "TIFF", compression="tiff_lzw"), rgb, 0),
        ("bmp", saved(Image.fromarray(rgb), "BMP"), rgb, 0),
        ("bmp-grey", saved(Image.fromarray(grey[:, :, 0]), "BMP"), grey3(grey), 0),
        ("pcx", saved(Image.fromarray(rgb), "PCX"), rgb, 0),
        ("sgi", saved(Image.fromarray(rgb), "SGI"), rgb, 0),
        ("jpeg-grey", saved(Image.fromarray(grey[:, :, 0]), "JPEG", quality=98), grey3(grey), 4),
        (
            "jpeg-progressive",
            saved(Image.fromarray(rgb), "JPEG", quality=98, subsampling=0, progressive=True),
            rgb,
            6,
        ),
        ("webp-lossless", saved(Image.fromarray(rgb), "WEBP", lossless=True), rgb, 0),
        ("avif", saved(Image.fromarray(rgb), "AVIF", quality=100, subsampling="4:4:4"), rgb, 4),
        ("jpeg2000", saved(Image.fromarray(rgb), "JPEG2000", irreversible=False), rgb, 0),
        ("one-pixel", png(np.array([[[1, 2, 3]]]), 8, 2), np.array([[[1, 2, 3]]]), 0),
    ]


def colour_cases() -> list[Case]:
    rgb, ink = colours(10), colours(11, 4)
    cmyk = Image.frombytes("CMYK", (W, H), ink.tobytes())
    paper = np.rint((255 - ink[:, :, :3].astype(float)) * (255 - ink[:, :, 3:]) / 255)
    rgb_image = Image.fromarray(rgb)
    flat = np.full((H, W, 3), (230, 20, 20), dtype=np.uint8)
    swapped = np.full((H, W, 3), (20, 230, 20), dtype=np.uint8)
    alpha = np.full((H, W), 128, dtype=np.uint8)
    mixed = profile("swapped")
    tagged = saved(Image.fromarray(np.dstack([flat, alpha])), "PNG", icc_profile=mixed)
    palette = Image.fromarray(flat).quantize(2)
    frames = [Image.fromarray(colours(seed)).quantize(64) for seed in (12, 13)]
    first = np.asarray(frames[0].convert("RGB"))
    rgb_frames = [Image.fromarray(colours(seed)) for seed in (12, 13)]
    still = {"save_all": True, "append_images": rgb_frames, "default_image": True}
    # Lab of mid grey: L 50 of 100 stored as 128, a = b = 0 stored as 0 (signed bytes).
    lab = Image.frombytes("LAB", (W, H), bytes([128, 0, 0]) * (H * W))
    return [
        ("jpeg-cmyk", saved(cmyk, "JPEG", quality=100, subsampling=0), paper, 8),
        ("tiff-cmyk", saved(cmyk, "TIFF"), paper, 1),
        ("tiff-lab", saved(lab, "TIFF"), np.full((H, W, 3), 119), 3),
        ("png-srgb-profile", saved(rgb_image, "PNG", icc_profile=profile("sRGB")), rgb, 0),
        ("png-swapped-profile", saved(Image.fromarray(flat), "PNG", icc_profile=mixed), swapped, 2),
        (
            "jpeg-swapped-profile",
            saved(Image.fromarray(flat), "JPEG", quality=98, subsampling=0, icc_profile=mixed),
            swapped,
            6,
        ),
        ("png-swapped-profile-alpha", tagged, blend(swapped, alpha), 2),
        ("png-palette-swapped-profile", saved(palette, "PNG", icc_profile=mixed), swapped, 3),
        (
            "png-grey-with-rgb-profile",
            saved(Image.fromarray(rgb[:, :, 0]), "PNG", icc_profile=mixed),
            grey3(rgb[:, :, 0]),
            3,
        ),
        ("png-broken-profile", saved(rgb_image, "PNG", icc_profile=b"not a profile"), rgb, 0),
        ("png-unfitting-profile", saved(rgb_image, "PNG", icc_profile=profile("LAB")), rgb, 0),
        (
            "gif-animated",
            saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50),
            first,
            0,
        ),
        (
            "webp-animated",
            saved(rgb_frames[0], "WEBP", save_all=True, append_images=rgb_frames[1:], lossless=True),
            colours(12),
            0,
        ),
        ("apng", saved(rgb_frames[0], "PNG", save_all=True, append_images=rgb_frames[1:]), colours(12), 0),
        ("apng-with-still-for-old-viewers", saved(Image.new("RGB", (W, H)), "PNG", **still), colours(12), 0),
        (
            "tiff-many-pages",
            saved(rgb_frames[0], "TIFF", save_all=True, append_images=rgb_frames[1:]),
            colours(12),
            0,
        ),
        (
            "mpo",
            saved(
                rgb_frames[0], "MPO", save_all=True, append_images=rgb_frames[1:], quality=98, subsampling=0
            ),
            colours(12),
            6,
        ),
    ]


SHOWN = orientation_cases() + transparency_cases() + depth_cases() + colour_cases()


def test_there_are_enough_awkward_pictures() -> None:
    names = [name for name, *_ in SHOWN]
    kinds = {name.split("-orientation")[0] for name in names}
    assert len(set(names)) == len(names) >= 60
    assert len(kinds) >= 20


# Pillow itself warns of damaged metadata while it opens a JPEG; the picture is shown all the same.
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(("name", "data", "expected", "tolerance"), SHOWN, ids=[case[0] for case in SHOWN])
def test_shown_as_a_viewer_shows_it(
    name: str, data: bytes, expected: np.ndarray, tolerance: int, tmp_path: Path
) -> None:
    # The extension lies on purpose: content decides.
    path = tmp_path / f"{name}.dat"
    path.write_bytes(data)
    shown = decode(path)
    assert shown.mode == "RGB"
    assert shown.size == (expected.shape[1], expected.shape[0])
    difference = np.abs(np.asarray(shown).astype(int) - expected.astype(int))
    assert difference.max() <= tolerance
    assert np.array_equal(np.asarray(decode(data)), np.asarray(shown))
    assert np.array_equal(np.asarray(decode(str(path))), np.asarray(shown))


def cut(data: bytes, share: float = 0.6) -> bytes:
    return data[: int(len(data) * share)]


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
BOMB = png(np.zeros((1, 1, 3)), 8, 2).replace(struct.pack(">II", 1, 1), struct.pack(">II", 60_000, 60_000), 1)


def with_header_crc(data: bytes) -> bytes:
    return data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]


REFUSED: list[tuple[str, bytes, str]] = [
    ("empty", b"", "the file is empty"),
    ("text", b"<html>404 not found</html>", "not an image"),
    ("one-byte", b"\x89", "not an image"),
    ("zeros", bytes(4000), "not an image"),
    ("svg", b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not an image"),
    ("pdf", b"%PDF-1.7\n%%EOF", "not an image"),
    ("eps-would-start-ghostscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    ("png-cut-in-header", saved(NOISE, "PNG")[:20], "not an image|truncated or damaged"),
    *[
        (f"{kind.lower()}-truncated", cut(saved(NOISE, kind, **options)), "truncated or damaged|not an image")
        for kind, options in [
            ("JPEG", {}),
            ("PNG", {}),
            ("GIF", {}),
            ("WEBP", {}),
            ("BMP", {}),
            ("TIFF", {}),
            ("PPM", {}),
            ("TGA", {}),
            ("QOI", {}),
            ("JPEG2000", {}),
            ("AVIF", {}),
            ("SGI", {}),
            ("PCX", {}),
            ("DDS", {}),
        ]
    ],
    (
        "png-damaged-pixels",
        saved(NOISE, "PNG")[:60] + bytes(200) + saved(NOISE, "PNG")[260:],
        "truncated or damaged",
    ),
    (
        "png-zero-size",
        with_header_crc(png(np.zeros((1, 1, 3)), 8, 2).replace(struct.pack(">II", 1, 1), bytes(8), 1)),
        "no pixels|not an image|damaged",
    ),
    ("png-bomb", with_header_crc(BOMB), "60000 x 60000 = 3600000000 pixels, the limit is"),
    ("pgm-bomb", b"P5 99999 99999 255\n", "99999 x 99999 = 9999800001 pixels, the limit is"),
    (
        "gif-bomb",
        b"GIF89a\xff\xff\xff\xff\x00\x00\x00,\x00\x00\x00\x00\xff\xff\xff\xff\x00\x08\x00",
        "65535 x 65535",
    ),
    (
        "bmp-bomb",
        saved(NOISE, "BMP")[:18] + struct.pack("<ii", 90_000, 90_000) + saved(NOISE, "BMP")[26:],
        "90000 x 90000",
    ),
    (
        "tiff-float-beyond-one",
        saved(Image.fromarray(np.full((4, 4), 7.5, dtype=np.float32)), "TIFF"),
        "between 0 and 1, these go from 7.5",
    ),
    (
        "tiff-float-nan",
        saved(Image.fromarray(np.full((4, 4), np.nan, dtype=np.float32)), "TIFF"),
        "between 0 and 1",
    ),
    (
        "tiff-negative",
        saved(Image.fromarray(np.full((4, 4), -3, dtype=np.int32)), "TIFF"),
        "between 0 and 65535, these go from -3",
    ),
]


@pytest.mark.parametrize(("name", "data", "reason"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_with_its_path_and_reason(name: str, data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.img"
    path.write_bytes(data)
    started = time.monotonic()
    with pytest.raises(ImageError, match=reason) as caught:
        decode(path)
    assert time.monotonic() - started < 5
    assert str(path) in str(caught.value)
    assert caught.value.source == str(path)
    assert str(path) not in caught.value.reason
    assert isinstance(caught.value, ValueError)
    if data:
        with pytest.raises(ImageError, match=rf"bytes \({len(data)} bytes\)"):
            decode(data)


def test_the_limit_is_the_callers_and_is_exact() -> None:
    image = saved(Image.new("RGB", (30, 20)), "PNG")
    assert decode(image, max_pixels=600).size == (30, 20)
    with pytest.raises(ImageError, match=r"30 x 20 = 600 pixels, the limit is 599 \(max_pixels\)"):
        decode(image, max_pixels=599)
    for raw in (np.zeros((20, 30), np.uint8), torch.zeros(3, 20, 30), Image.new("L", (30, 20))):
        with pytest.raises(ImageError, match="30 x 20 = 600 pixels, the limit is 599"):
            decode(raw, max_pixels=599)
    with pytest.raises(ValueError, match="decode: max_pixels must be at least 1, got 0"):
        decode(image, max_pixels=0)


def test_a_limit_above_pillows_own_works_and_warns_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert decode(saved(Image.new("RGB", (30, 20)), "PNG")).size == (30, 20)


def test_no_global_setting_of_pillow_is_touched() -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    for data in (BOMB, cut(saved(NOISE, "JPEG")), b"x"):
        with pytest.raises(ImageError):
            decode(data)
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="this is a directory"):
        decode(tmp_path)
    with pytest.raises(ImageError, match="there is no such file") as caught:
        decode(tmp_path / "gone.png")
    assert str(tmp_path / "gone.png") in str(caught.value)
    with pytest.raises(ImageError, match="the path is empty"):
        decode("")
    with pytest.raises(ImageError, match="not a usable path"):
        decode("a\0b")
    with pytest.raises(ImageError, match="there are no bytes"):
        decode(b"")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):  # Windows has no named pipes among its files
        return
    os.mkfifo(tmp_path / "pipe.png")
    outcome: list[str] = []

    def attempt() -> None:
        with pytest.raises(ImageError) as caught:
            decode(tmp_path / "pipe.png")
        outcome.append(caught.value.reason)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(10)
    assert outcome == ["this is not a regular file"]


def test_names_with_odd_signs_are_taken_literally(tmp_path: Path) -> None:
    for name in ("a%20b.png", "ä ö?&=;'()[]!@~,+.png", "x" * 250 + ".png"):
        (tmp_path / name).write_bytes(saved(NOISE, "PNG"))
        assert np.array_equal(np.asarray(decode(tmp_path / name)), np.asarray(NOISE))


RGB = colours(20)
ARRAYS: list[tuple[str, Callable[[], object], np.ndarray]] = [
    ("uint8", lambda: RGB, RGB),
    ("uint8-strided", lambda: np.ascontiguousarray(RGB[::-1])[::-1], RGB),
    ("uint16", lambda: RGB.astype(np.uint16) * 257, RGB),
    ("uint16-big-endian", lambda: (RGB.astype(np.uint16) * 257).astype(">u2"), RGB),
    ("float32", lambda: (RGB / 255).astype(np.float32), RGB),
    ("float64", lambda: RGB / 255, RGB),
    ("float16", lambda: np.array([[0, 0.5, 1]], dtype=np.float16), grey3(np.array([[0, 128, 255]]))),
    ("float-rounding-noise", lambda: np.array([[-1e-6, 1 + 1e-6]]), grey3(np.array([[0, 255]]))),
    ("bool", lambda: np.array([[True, False]]), grey3(np.array([[255, 0]]))),
    ("grey", lambda: RGB[:, :, 0], grey3(RGB[:, :, 0])),
    ("grey-with-axis", lambda: RGB[:, :, :1], grey3(RGB[:, :, 0])),
    ("grey-alpha", lambda: RGB[:, :, :2], blend(grey3(RGB[:, :, 0]), RGB[:, :, 1])),
    ("rgba", lambda: np.dstack([RGB, RGB[:, :, 0]]), blend(RGB, RGB[:, :, 0])),
    ("tensor-chw", lambda: torch.from_numpy(RGB).permute(2, 0, 1), RGB),
    ("tensor-hwc", lambda: torch.from_numpy(RGB), RGB),
    ("tensor-float", lambda: torch.from_numpy(RGB).permute(2, 0, 1) / 255, RGB),
    ("tensor-bfloat16", lambda: torch.tensor([[0, 1.0]], dtype=torch.bfloat16), grey3(np.array([[0, 255]]))),
    ("tensor-grad", lambda: torch.zeros(3, 5, 6, requires_grad=True), np.zeros((5, 6, 3))),
    (
        "tensor-three-by-three-is-chw",
        lambda: torch.arange(27, dtype=torch.uint8).view(3, 3, 3),
        np.arange(27).reshape(3, 3, 3).transpose(1, 2, 0),
    ),
    (
        "pil-palette",
        lambda: Image.fromarray(RGB).quantize(256),
        np.asarray(Image.fromarray(RGB).quantize(256).convert("RGB")),
    ),
    (
        "pil-premultiplied",
        lambda: Image.fromarray(np.dstack([RGB, np.full((H, W), 255, np.uint8)])).convert("RGBa"),
        RGB,
    ),
    ("pil-int", lambda: Image.fromarray(RGB[:, :, 0].astype(np.int32) * 257), grey3(RGB[:, :, 0])),
    ("pil-ycbcr", lambda: Image.new("YCbCr", (3, 2), (128, 128, 128)), np.full((2, 3, 3), 128)),
]


@pytest.mark.parametrize(
    ("make", "expected"), [case[1:] for case in ARRAYS], ids=[case[0] for case in ARRAYS]
)
def test_pixels_in_memory(make: Callable[[], object], expected: np.ndarray) -> None:
    shown = np.asarray(decode(make())).astype(int)
    # Alpha is laid on in 8-bit arithmetic, hence one level.
    assert shown.shape == expected.shape
    assert np.abs(shown - expected.astype(int)).max() <= 1


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: np.zeros((2, 2), np.int64),
            "must be uint8, uint16, bool or floating point from 0 to 1, not int64",
        ),
        (lambda: np.full((2, 2), 255.0), "must lie between 0 and 1, these go from 255 to 255"),
        (lambda: np.array([[0.1, np.nan]]), "must lie between 0 and 1"),
        (lambda: np.zeros((3, 50, 60), np.uint8), r"shape \(H, W\) or \(H, W, C\)"),
        (lambda: np.zeros((1, 2, 2, 3), np.uint8), "one image at a time"),
        (lambda: np.zeros((0, 5, 3), np.uint8), "no pixels"),
        (lambda: torch.zeros(2, 3, 4, 4), "one image at a time"),
        (lambda: torch.zeros(3, 0, 4), "no pixels"),
        (lambda: torch.zeros(2, 2, dtype=torch.complex64), "floating point from 0 to 1, not complex64"),
        (lambda: torch.zeros(3, 4, 4).to_sparse(), "no plain pixels"),
        (lambda: Image.new("RGB", (0, 4)), "no pixels"),
    ],
)
def test_pixels_in_memory_without_an_agreed_meaning_are_refused(make, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decode(make())


def test_a_source_of_no_accepted_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="source must be a path, bytes, .* got list"):
        decode([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got NoneType"):
        decode_many([None], on_error="skip")  # type: ignore[list-item]


def test_a_pil_image_is_turned_once_and_never_changed() -> None:
    shown = colours(21)
    stored = Image.open(
        io.BytesIO(saved(Image.fromarray(np.ascontiguousarray(as_stored(shown, 6))), "PNG", exif=exif(6)))
    )
    once = decode(stored)
    assert np.array_equal(np.asarray(once), shown)
    assert np.array_equal(np.asarray(decode(once)), shown)
    assert stored.size == (H, W) and stored.getexif()[0x0112] == 6


def test_the_result_shares_no_pixels_with_the_source() -> None:
    image, array = Image.new("RGB", (3, 3)), np.zeros((3, 3, 3), np.uint8)
    for source in (image, array):
        decode(source).paste((9, 9, 9), (0, 0, 3, 3))
    assert image.getpixel((0, 0)) == (0, 0, 0) and not array.any()


def good(value: int) -> bytes:
    return saved(Image.new("RGB", (4, 3), (value, 0, 0)), "PNG")


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_a_broken_file_moves_no_other_row(threads: int | None, tmp_path: Path) -> None:
    sources: list[object] = []
    for row in range(20):
        path = tmp_path / f"{row}.png"
        path.write_bytes(b"broken" if row % 7 == 3 else good(row))
        sources.append(path)
    sources[9] = tmp_path / "gone.png"
    ids = [f"image-{row}" for row in range(20)]
    done = decode_many(sources, on_error="skip", ids=ids, threads=threads)
    bad = [3, 9, 10, 17]
    assert done.rows == [row for row in range(20) if row not in bad]
    assert done.ids == [ids[row] for row in done.rows]
    assert [image.getpixel((0, 0))[0] for image in done.images] == done.rows
    assert len(done) == 16
    assert [(f.id, f.path) for f in done.failures] == [(ids[row], str(sources[row])) for row in bad]
    assert done.failures[1].reason == "there is no such file"


@pytest.mark.parametrize("threads", [1, 4])
def test_raise_names_the_first_broken_row(threads: int) -> None:
    with pytest.raises(ImageError, match=r"bytes \(3 bytes\): this is not an image"):
        decode_many([good(1), b"abc", good(2), b"abcdef"], threads=threads)


def test_decode_many_edges() -> None:
    assert len(decode_many([])) == 0
    assert decode_many([good(1), good(2)]).ids == ["0", "1"]
    done = decode_many([good(1)], max_pixels=11, on_error="skip")
    assert "the limit is 11" in done.failures[0].reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "warn"}, 'decode_many: on_error must be "raise" or "skip", got \'warn\''),
        ({"threads": 0}, "decode_many: threads must be at least 1, got 0"),
        ({"ids": ["a"]}, "decode_many: ids must name every source, got 1 ids for 2 sources"),
        ({"ids": ["a", "a"]}, "decode_many: ids must be distinct, got 'a' more than once"),
    ],
)
def test_decode_many_refuses_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_many([good(1), good(2)], **options)


def ramp(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * 1000 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shape", [(50, 37), (37, 50), (33, 33), (32, 32), (20, 31), (200, 45), (45, 200)])
def test_crop_policy_is_the_field_standard_to_the_pixel(shape: tuple[int, int], interpolation: str) -> None:
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    image = ramp(*shape)
    mode = v2.InterpolationMode(interpolation)
    expected = v2.Compose([v2.Resize(32, interpolation=mode), v2.CenterCrop(32)])(image)
    assert np.array_equal(
        np.asarray(resize(image, 32, "crop", interpolation=interpolation)), np.asarray(expected)
    )


def test_squash_is_one_pillow_resize() -> None:
    image = ramp(40, 25)
    expected = image.resize((30, 20), Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(resize(image, (20, 30), "squash")), np.asarray(expected))


def test_resize_is_antialiased() -> None:
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    for policy in ("crop", "pad", "squash"):
        small = np.asarray(resize(Image.fromarray(stripes), 8, policy)).astype(int)
        assert np.abs(small[:, 1:-1] - 128).max() < 20


def test_pad_keeps_the_ends_and_centres() -> None:
    wide = np.zeros((10, 40, 3), dtype=np.uint8)
    wide[:, :20], wide[:, 20:] = (255, 0, 0), (0, 0, 255)
    shown = np.asarray(resize(Image.fromarray(wide), 20, "pad", fill=(1, 2, 3)))
    assert (shown[:7] == (1, 2, 3)).all() and (shown[12:] == (1, 2, 3)).all()
    assert (shown[7:12, :8] == (255, 0, 0)).all() and (shown[7:12, 12:] == (0, 0, 255)).all()


def test_crop_drops_the_ends_of_a_wide_image() -> None:
    wide = np.zeros((10, 40, 3), dtype=np.uint8)
    wide[:, 15:25] = 255
    assert (np.asarray(resize(Image.fromarray(wide), 10, "crop")) == 255).all()


@pytest.mark.parametrize("policy", ["crop", "pad", "squash"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (3000, 1), (2, 5)])
def test_extreme_shapes_stay_small(policy: str, shape: tuple[int, int]) -> None:
    image = Image.new("RGB", shape, (10, 20, 30))
    for size in (16, (8, 24)):
        shown = resize(image, size, policy, fill=(10, 20, 30))
        assert shown.size == ((16, 16) if size == 16 else (24, 8))
        assert (np.asarray(shown) == (10, 20, 30)).all()


def test_normalise_is_the_formula() -> None:
    image = ramp(6, 5)
    mean, std = (0.48, 0.45, 0.4), (0.26, 0.25, 0.27)
    expected = (np.asarray(image) / 255.0 - mean) / std
    out = normalise(image, mean, std)
    assert out.dtype == torch.float32 and out.shape == (3, 5, 6) and out.is_contiguous()
    np.testing.assert_allclose(out.numpy(), expected.transpose(2, 0, 1), rtol=0, atol=1e-6)


def test_to_pixels_is_resize_then_normalise() -> None:
    images = [ramp(20, 12), ramp(9, 30)]
    options = {"interpolation": "bilinear", "fill": (5, 5, 5)}
    batch = to_pixels(images, 8, "pad", mean=(0.1, 0.2, 0.3), std=(1, 2, 3), **options)
    for row, image in enumerate(images):
        expected = normalise(resize(image, 8, "pad", **options), (0.1, 0.2, 0.3), (1, 2, 3))
        assert torch.equal(batch[row], expected)
    assert to_pixels([], (4, 6), mean=(0, 0, 0), std=(1, 1, 1)).shape == (0, 3, 4, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: resize(i.convert("L"), 4), "resize: image must be RGB, got mode L"),
        (
            lambda i: resize(i, 4, "stretch"),
            'resize: policy must be "crop", "pad" or "squash", got \'stretch\'',
        ),
        (
            lambda i: resize(i, 4, interpolation="nearest"),
            'resize: interpolation must be "bicubic" or "bilinear"',
        ),
        (lambda i: resize(i, 0), "resize: size must be at least 1, got 0"),
        (lambda i: normalise(i.convert("L"), (0,) * 3, (1,) * 3), "normalise: image must be RGB, got mode L"),
        (
            lambda i: normalise(i, (0,), (1,) * 3),
            "normalise: mean and std must be three numbers, got 1 and 3",
        ),
        (lambda i: normalise(i, (0,) * 3, (1, 0, 1)), r"normalise: std must be positive, got \(1, 0, 1\)"),
    ],
)
def test_wrong_calls_say_what_was_wanted(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ramp(5, 5))
