"""Options of which a few values are valid: the values as types, and the checks that name them in their messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

GridName = Literal["none", "scenes", "multi_scale", "dense"]
CropMode = Literal["rescaled", "native"]
RegionMode = Literal["rescaled", "native", "windows"]
FillName = Literal["border", "mean"]
Fill: TypeAlias = "FillName | tuple[int, int, int]"
Backend = Literal["auto", "cpp", "triton", "reference"]
# Numbers that an exported model computes in, and what runs it through ONNX Runtime.
Precision = Literal["fp32", "fp16", "int8"]
Provider = Literal["cpu", "cuda", "tensorrt"]
# What a reader of a benchmark does where a picture is not there.
OnMissing = Literal["error", "skip"]
# A softmax over the texts of an image, or the sigmoid of each pair.
Probability = Literal["softmax", "sigmoid"]


def check_choice(who: str, option: str, value: object, known: Sequence[str]) -> None:
    """Raise ValueError, listing the known values, unless `value` is one of them.

    >>> check_choice("sgi", "crops", "big", ("rescaled", "native"))
    Traceback (most recent call last):
        ...
    ValueError: sgi: crops must be one of 'rescaled', 'native', got 'big'
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{who}: {option} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_flag(who: str, option: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False: the word "no" would count as yes."""
    if not isinstance(value, bool):
        raise TypeError(f"{who}: {option} must be True or False, got {value!r}")


def check_numbers(
    settings: object,
    *,
    above_zero: Sequence[str] = (),
    at_least_zero: Sequence[str] = (),
    integers: Mapping[str, int] = MappingProxyType({}),
    at_most: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Raise ValueError, naming it, for an attribute of `settings` that is not finite or outside its bounds.

    `integers`: the lowest value of each attribute that is an integer or a tuple of them. `at_most`: the highest value
    of any attribute.
    """
    who = type(settings).__name__
    # Comparisons are written so that NaN fails them.
    for name in above_zero:
        if not 0 < getattr(settings, name) < math.inf:
            raise ValueError(f"{who}: {name} must be finite and above 0, got {getattr(settings, name)}")
    for name in at_least_zero:
        if not 0 <= getattr(settings, name) < math.inf:
            raise ValueError(f"{who}: {name} must be finite, at least 0, got {getattr(settings, name)}")
    for name, least in integers.items():
        value = getattr(settings, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, bool) or not isinstance(each, int):
                raise ValueError(f"{who}: {name} must be an integer, got {each!r}")
            if each < least:
                raise ValueError(f"{who}: {name} must be at least {least}, got {each}")
    for name, most in at_most.items():
        if not getattr(settings, name) <= most:
            raise ValueError(f"{who}: {name} must be at most {most}, got {getattr(settings, name)}")


def check_seed(who: str, seed: int) -> None:
    """Raise ValueError for a seed that generators of random numbers do not take."""
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"{who}: seed must be from 0 to below 2**63, got {seed}")


def check_fill(who: str, value: object, names: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of the names or an RGB tuple of integers 0..255."""
    if isinstance(value, str):
        check_choice(who, "fill", value, names)
        return
    parts = value if isinstance(value, tuple) else ()
    whole = all(isinstance(part, int) and not isinstance(part, bool) and 0 <= part <= 255 for part in parts)
    if len(parts) != 3 or not whole:
        raise ValueError(
            f"{who}: fill must be three numbers 0..255 or a name ({', '.join(map(repr, names))}), got {value!r}"
        )
