"""Settings that stand in the JSON files beside a model's weights, refused by file and name where they cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_object(who: str, path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError, naming it, for a file that is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{who}: {path} is damaged: it is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{who}: {path} must hold a JSON object, got {content!r:.40}")
    return content


@contextmanager
def built_from(where: str, library: str) -> Iterator[None]:
    """What `library` raises over settings that it cannot use becomes a ValueError that names the file in `where`.

    OSError passes: it is about files and the network, and says which.
    """
    try:
        yield
    except OSError:
        raise
    # Constructors fail in any way over a setting of the wrong kind: TypeError, KeyError, AssertionError, …
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise ValueError(f"{where} describes what {library} cannot build ({type(error).__name__}: {reason})") from error


def three_numbers(where: str, key: str, value: object, *, positive: bool = False) -> tuple[float, float, float]:
    """Three finite numbers, one a colour; `positive` for those that pixels are divided by.

    >>> three_numbers("preprocessor_config.json", "image_std", [0.5, 0.5, 0], positive=True)
    Traceback (most recent call last):
        ...
    ValueError: preprocessor_config.json: image_std must be three numbers above 0, got [0.5, 0.5, 0]
    """
    numbers = list(value) if isinstance(value, list | tuple) else []
    good = len(numbers) == 3 and all(
        isinstance(number, int | float)
        and not isinstance(number, bool)
        and math.isfinite(number)
        and (number > 0 or not positive)
        for number in numbers
    )
    if not good:
        wanted = "three numbers above 0" if positive else "three numbers"
        raise ValueError(f"{where}: {key} must be {wanted}, got {value!r:.60}")
    return float(numbers[0]), float(numbers[1]), float(numbers[2])


def part_of(where: str, content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under a key. Raises ValueError where there is none."""
    value = content.get(key)
    if not isinstance(value, dict):
        got = f"{value!r:.40}" if key in content else f"only {', '.join(map(repr, content)) or 'nothing'}"
        raise ValueError(f"{where} must state {key!r} as an object, got {got}")
    return value
