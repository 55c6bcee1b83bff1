"""The page of results: generated sections between their markers, everything else as it was written.

<!-- results: NAME -->
...
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from engine.atomic_files import written_whole

END = "<!-- end -->"


def start(name: str) -> str:
    """The marker before a section."""
    return f"<!-- results: {name} -->"


def replaced(page: str, sections: Mapping[str, str]) -> str:
    """The page with these sections between their markers; one without markers comes to the end, with them.

    Raises ValueError for a marker that comes twice or has no end.

    >>> print(replaced("before\\n<!-- results: a -->\\nold\\n<!-- end -->\\nafter\\n", {"a": "new"}), end="")
    before
    <!-- results: a -->
    <BLANKLINE>
    new
    <BLANKLINE>
    <!-- end -->
    after
    """
    for name, body in sections.items():
        marker = start(name)
        block = f"{marker}\n\n{body.strip()}\n\n{END}"
        if marker not in page:
            page = f"{page.rstrip()}\n\n{block}\n".lstrip()
            continue
        pattern = re.escape(marker) + r"(?:(?!<!-- results: ).)*?" + re.escape(END)
        found = re.findall(pattern, page, flags=re.DOTALL)
        if page.count(marker) != 1 or len(found) != 1:
            raise ValueError(f"results: the page must hold {marker} once, and {END} before the next marker")
        page = page.replace(found[0], block)
    return page


def write_sections(path: Path, sections: Mapping[str, str]) -> None:
    """Replace these sections of the page at `path`. Raises FileNotFoundError, and what `replaced` raises."""
    page = replaced(path.read_text(encoding="utf-8"), sections)
    with written_whole(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")
