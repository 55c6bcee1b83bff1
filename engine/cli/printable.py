"""Text that any output can show, whatever is in it.

What the output's encoding cannot hold (a file name that is no UTF-8, an umlaut on an ASCII terminal) and what would
act on the terminal is written as an escape.
"""

from __future__ import annotations

import json
import re
import sys

# Bytes of file names that are no UTF-8 come as lone surrogates (PEP 383), which no encoding takes; an escape sequence
# in a file name would act on the terminal.
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    r"""``text`` as standard output can show it: undecodable bytes as ``\xNN``, other such characters escaped too.

    >>> print(printable("na\udcefve.png"))
    na\xefve.png
    """
    text = _SURROGATE.sub(_escape, _CONTROL.sub(_escape, text))
    return text.encode(_encoding(), "backslashreplace").decode(_encoding())


def printable_json(text: str) -> str:
    r"""JSON as standard output can show it: the same value, with escapes where the encoding needs them.

    An undecodable byte of a file name is the escape of its lone surrogate, as JavaScript's ``JSON.stringify`` writes
    it: Python's ``json`` reads back the very name that ``open`` takes.

    >>> json.loads(printable_json('["na\udcefve.png"]')) == ["na\udcefve.png"]
    True
    """
    try:
        text.encode(_encoding())
    except UnicodeEncodeError:
        return json.dumps(json.loads(text), indent=1)
    return text


def is_text(text: str) -> bool:
    """Whether all of it is Unicode text: no byte of the command line that was none."""
    return _SURROGATE.search(text) is None


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    # PEP 383: byte 0xNN was decoded to U+DCNN.
    return f"\\x{code & 0xFF:02x}" if code < 0x100 or 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"
