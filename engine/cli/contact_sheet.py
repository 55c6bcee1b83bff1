"""A page of what a search found: one HTML file that holds its thumbnails, with nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from PIL import Image

from engine.atomic_files import write_text
from engine.images import ImageError, ImageSource, decode
from engine.retrieval.index import Index
from engine.retrieval.reencoding import pictures
from engine.retrieval.results import Hit
from engine.scorers.base import Match
from engine.scorers.explanation import COLOURS, MAX_ROWS

SIDE = 256
QUALITY = 85
_STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 1.5rem; color: #1d2430; background: #fff;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .75rem; }
.hits { display: grid; grid-template-columns: repeat(auto-fill, minmax(256px, 1fr)); gap: 1rem; }
figure { margin: 0; padding: .5rem; border: 1px solid #d9dee6; border-radius: 4px; }
.picture { position: relative; display: inline-block; line-height: 0; }
.picture img { max-width: 100%; }
.box { position: absolute; border: 3px solid; outline: 1px solid #000; outline-offset: -1px; }
figcaption { overflow-wrap: anywhere; } .id { font-weight: 600; }
.missing { display: block; padding: 2rem 1rem; background: #f4f6f9; color: #5b6575; }
ul { list-style: none; margin: .4rem 0 0; padding: 0; font-size: .9rem; }
.key { display: inline-block; width: .8em; height: .8em; border: 1px solid #000; margin-right: .4em; }
.soft { color: #5b6575; }
"""


def write_sheet(path: Path, index: Index, queries: Sequence[str], found: Sequence[Sequence[Hit]], scorer: str) -> None:
    """Write the page; a picture that cannot be read any more is named and not shown.

    Raises OSError when the file cannot be written; one that was there stays then.
    """
    sections = [
        f"<h2>{escape(query)}</h2>\n" + ("<div class='hits'>\n" + "\n".join(_figures(index, hits)) + "\n</div>"
                                         if hits else "<p>Nothing was found.</p>")
        for query, hits in zip(queries, found, strict=True)
    ]  # fmt: skip
    write_text(path, f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>peaksim: what was found</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>What was found</h1>
<p class="soft">{len(index)} images in {escape(str(index.path))}, ranked by {escape(scorer)}. A frame is the part of the
picture that the words of its colour found.</p>
{chr(10).join(sections)}
</body>
</html>""")  # fmt: skip


def _figures(index: Index, hits: Sequence[Hit]) -> list[str]:
    rows = index.snapshot.find([hit.id for hit in hits])
    sources = pictures(index.snapshot, rows)
    return [_figure(place, hit, _picture(sources[place])) for place, hit in enumerate(hits)]


def _picture(source: ImageSource | None) -> Image.Image | str:
    """The upright picture, or why there is none."""
    if source is None:
        return "the picture is not where the index says"
    try:
        return decode(source)
    except ImageError as error:
        return error.reason


def _figure(place: int, hit: Hit, picture: Image.Image | str) -> str:
    matches = _shown(hit.alignment or ())
    if isinstance(picture, str):
        drawn = f"<span class='missing'>{escape(picture)}</span>"
    else:
        boxes = "".join(_box(number, match, picture.size) for number, match in enumerate(matches))
        image = f"<img alt='{escape(hit.id, quote=True)}' src='{_thumbnail(picture)}'>"
        drawn = f"<div class='picture'>{image}{boxes}</div>"
    words = "".join(
        f"<li><span class='key' style='background: {_colour(number)}'></span>{escape(match.text)} "
        f"<span class='soft'>{match.score:+.3f} × {match.weight:.2f}</span></li>"
        for number, match in enumerate(matches)
    )
    notes = [f"{place + 1}.", f"score {hit.score:.4f}"]
    notes += [] if hit.margin is None else [f"margin {hit.margin:.4f}"]
    notes += [] if hit.stage_one_rank is None else [f"stage one {hit.stage_one_rank + 1}"]
    return (
        f"<figure>{drawn}<figcaption><div class='id'>{escape(hit.id)}</div>"
        f"<div class='soft'>{', '.join(notes)}</div><ul>{words}</ul></figcaption></figure>"
    )


def _shown(matches: Sequence[Match]) -> list[Match]:
    """The strongest that count, in their order."""
    counted = [match for match in matches if match.weight != 0]
    strongest = sorted(range(len(counted)), key=lambda place: -abs(counted[place].score * counted[place].weight))
    return [counted[place] for place in sorted(strongest[:MAX_ROWS])]


def _box(number: int, match: Match, size: tuple[int, int]) -> str:
    """A frame over the thumbnail, placed in per cent of the picture; nothing for a box without area."""
    width, height = size
    left, top = max(0, match.box[0]), max(0, match.box[1])
    right, bottom = min(width, match.box[2]), min(height, match.box[3])
    if right <= left or bottom <= top:
        return ""
    across, down = (left / width, (right - left) / width), (top / height, (bottom - top) / height)
    shares = {"left": across[0], "top": down[0], "width": across[1], "height": down[1]}
    style = "; ".join(f"{side}: {100 * share:.2f}%" for side, share in shares.items())
    return f"<span class='box' style='{style}; border-color: {_colour(number)}'></span>"


def _colour(number: int) -> str:
    return "rgb({}, {}, {})".format(*COLOURS[number % len(COLOURS)])


def _thumbnail(picture: Image.Image) -> str:
    """The picture, its longer side `SIDE` pixels, as a data address."""
    factor = SIDE / max(picture.size)
    small = picture.resize((max(1, round(picture.width * factor)), max(1, round(picture.height * factor))))
    data = io.BytesIO()
    small.save(data, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
