"""How much memory a call takes at its peak, for benchmarks that report it beside the time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")


def peak_mib(call: Callable[[], Any]) -> float:
    """The peak of resident memory during `call()` above what was resident before it, in MiB (Linux, glibc)."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed but not given back would hide what the call takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the peak back to what is resident
    before = _read("VmRSS")
    call()
    return (_read("VmHWM") - before) / 1024


def resident_kib() -> int:
    """Resident memory of this process, what was freed given back first, in KiB (Linux, glibc)."""
    ctypes.CDLL(None).malloc_trim(0)
    return _read("VmRSS")


def _read(field: str) -> int:
    line = next(x for x in STATUS.read_text(encoding="ascii").splitlines() if x.startswith(field))
    return int(line.split()[1])
