"""Pictures that cannot or must not be shown are refused with path and reason; rows stay in place."""

from __future__ import annotations

import os
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from engine.images import ImageError, decode, decode_many
from tests.awkward_pictures import png, saved


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
    # Generous: only a hang takes this long, however busy the machine is.
    assert time.monotonic() - started < 60
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decode(NOISE, max_pixels="5"), "decode: max_pixels must be an integer, got str"),
        (lambda: decode(NOISE, max_pixels=1e6), "decode: max_pixels must be an integer, got float"),
        (lambda: decode_many([NOISE], threads="2"), "decode_many: threads must be an integer, got str"),
    ],
)
def test_options_of_another_type_are_named(call, message: str):
    with pytest.raises(TypeError, match=message):
        call()
