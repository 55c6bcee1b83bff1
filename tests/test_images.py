"""Awkward pictures are shown as a viewer shows them."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.images import decode
from tests.awkward_pictures import H, W, as_stored, blend, colours, exif, grey3, png, profile, saved, tiff16

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
            found.append((f"webp-orientation-{orientation}", saved(image, "WEBP", lossless=True, exif=tags), shown, 0))
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
    found.append(("jpeg-broken-exif", saved(image, "JPEG", quality=95, subsampling=0, exif=broken), shown, 40))
    return found


def transparency_cases() -> list[Case]:
    rgb, alpha = colours(1), colours(2, 1)[:, :, 0]
    grey = colours(3, 1)
    indices = (np.arange(H * W).reshape(H, W, 1) % 4).astype(np.uint8)
    table = np.array([[10, 20, 30], [200, 0, 0], [0, 200, 0], [0, 0, 200]], dtype=np.uint8)
    plte = (b"PLTE", table.tobytes())
    palette_alpha = np.array([0, 128, 255, 255], dtype=np.uint8)
    rgba = np.dstack([rgb, alpha])
    over = blend(rgb, alpha)
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


def colour_key_cases() -> list[Case]:
    rgb, deep = colours(1), colours(4, 3, np.uint16)
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
    return [
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
    ]


def first_frame_cases() -> list[Case]:
    frames = [Image.fromarray(colours(seed)).quantize(64) for seed in (12, 13)]
    first = np.asarray(frames[0].convert("RGB"))
    rgb_frames = [Image.fromarray(colours(seed)) for seed in (12, 13)]
    still = {"save_all": True, "append_images": rgb_frames, "default_image": True}
    return [
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
            saved(rgb_frames[0], "MPO", save_all=True, append_images=rgb_frames[1:], quality=98, subsampling=0),
            colours(12),
            6,
        ),
    ]


SHOWN = (
    orientation_cases()
    + transparency_cases()
    + colour_key_cases()
    + depth_cases()
    + colour_cases()
    + first_frame_cases()
)


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


def test_grey_of_16_bits_may_have_zero_for_white_and_12_bits_their_own_white():
    deep = colours(4, 1, np.uint16)[:, :, 0]
    shown = grey3(np.rint(deep / 257).astype(np.uint8))
    turned = tiff16(65535 - deep, "<", zero_is_white=True)
    assert np.abs(np.asarray(decode(turned)).astype(int) - shown).max() <= 1
    assert np.array_equal(np.asarray(decode(Image.open(io.BytesIO(turned)))), np.asarray(decode(turned)))
    twelve = deep >> 4
    twelve[0, :2] = (0, 4095)
    found = np.asarray(decode(tiff16(twelve, "<", bits=12)))
    assert np.abs(found.astype(int) - grey3(np.rint(twelve * (255 / 4095)).astype(np.uint8))).max() <= 1
    assert found[0, :2, 0].tolist() == [0, 255]


def test_floating_point_grey_may_have_zero_for_white():
    image = Image.fromarray(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4))
    plain, turned = (np.asarray(decode(saved(image, "TIFF", tiffinfo={262: value}))) for value in (1, 0))
    assert plain[0, 0, 0] == 0 and np.array_equal(turned, 255 - plain)


def test_the_gamma_of_a_png_counts_for_nothing():
    grey = np.full((H, W, 1), 100)
    with_gamma = png(grey, 8, 0, (b"gAMA", struct.pack(">I", 100000)))
    assert np.array_equal(np.asarray(decode(with_gamma)), np.asarray(decode(png(grey, 8, 0))))
