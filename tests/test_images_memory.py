"""What decoding takes of memory: a few times the picture, and nothing for one that is refused for its size."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.awkward_pictures import png

HEIGHT, WIDTH = 3000, 4000
# Measured: 17 with transparency. Pillow keeps four bytes a pixel, also of RGB: what is read, its blend, its copies.
BYTES_A_PIXEL = 20
MEASURED = """
import sys
from engine.images import ImageError, decode

def peak():
    # Not ru_maxrss: that begins with what the parent had.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

decode(sys.argv[1])
before = peak()
try:
    decode(sys.argv[2])
except ImageError as error:
    assert "pixels" in error.reason, error.reason
print(peak() - before)
"""


def taken(small: Path, large: Path) -> int:
    """Bytes that decoding the large picture adds to what the small one of its kind has taken."""
    done = subprocess.run([sys.executable, "-c", MEASURED, small, large], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("mode", ["RGBA", "I;16"])
def test_a_large_picture_takes_a_few_times_its_pixels(mode: str, tmp_path: Path):
    Image.new(mode, (8, 6)).save(tmp_path / "small.png")
    Image.new(mode, (WIDTH, HEIGHT)).save(tmp_path / "large.png", compress_level=1)
    bytes_taken = taken(tmp_path / "small.png", tmp_path / "large.png")
    assert 3 * WIDTH * HEIGHT < bytes_taken < BYTES_A_PIXEL * WIDTH * HEIGHT


def test_a_picture_refused_for_its_size_takes_nothing(tmp_path: Path):
    (tmp_path / "small.png").write_bytes(small := png(np.zeros((1, 1, 3)), 8, 2))
    huge = small.replace(struct.pack(">II", 1, 1), struct.pack(">II", 60_000, 60_000), 1)
    checksum = struct.pack(">I", zlib.crc32(huge[12:29]))
    (tmp_path / "large.png").write_bytes(huge[:29] + checksum + huge[33:])
    assert taken(tmp_path / "small.png", tmp_path / "large.png") < 4 << 20
