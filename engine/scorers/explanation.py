"""Why a score is what it is: which part of a caption found which part of the image, in words and drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from engine.atomic_files import written_whole
from engine.scorers.base import Match

# Colours that people with any colour vision tell apart (after Okabe and Ito 2008), on light and dark
# pictures.
COLOURS = (
    (230, 159, 0),
    (0, 114, 178),
    (0, 158, 115),
    (204, 121, 167),
    (213, 94, 0),
    (86, 180, 233),
    (240, 228, 66),
    (120, 120, 120),
    (153, 50, 204),
    (255, 255, 255),
    (128, 0, 0),
    (0, 255, 127),
)
# The picture is enlarged until its longer side has this many pixels, so that boxes and words can be told
# apart.
MIN_SIDE = 480
MAX_ROWS = 12
_TEXT_SIZE, _LINE, _MARGIN, _FRAME = 15, 22, 10, 5


@dataclass(frozen=True)
class Explanation:
    """The parts of one score.

    Attributes:
        text: the caption.
        scorer: name of the scorer.
        total: the score, as `Engine.score` gives it.
        matches: each counted part of the caption with the box it found; `total` is the sum of score × weight,
            except under a soft maximum, which lies above it.
        image: the upright picture, None when it was explained from features.
    """

    text: str
    scorer: str
    total: float
    matches: tuple[Match, ...]
    image: Image.Image | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        head = f"{self.scorer} {self.total:+.4f}  {self.text!r}"
        width = max((len(match.text) for match in self.matches), default=0)
        rows = [
            f"  {match.text:<{width}}  {match.score:+.4f} × {match.weight:+.3f}  box {match.box}"
            for match in self.matches
        ]
        return "\n".join([head, *rows])

    def draw(self, path: str | PathLike[str] | None = None) -> Image.Image:
        """The picture with a box for each match and a legend below; also saved when a path is given.

        Small pictures are enlarged. The strongest `MAX_ROWS` matches are shown, in the order of the caption.

        Raises:
            ValueError: the explanation was made from features and holds no picture; a path without the suffix of a
                picture format.
            OSError: the file cannot be written; one that was there stays as it was.
        """
        suffix = "" if path is None else Path(path).suffix
        kind = Image.registered_extensions().get(suffix.lower())
        if path is not None and kind is None:
            raise ValueError(f"Explanation.draw: path must end in a picture's suffix, e.g. .png, got {str(path)!r}")
        if self.image is None:
            raise ValueError("Explanation.draw: needs the picture, but it was explained from features; give the image")
        factor = max(1.0, MIN_SIDE / max(self.image.size))
        size = (max(1, round(self.image.width * factor)), max(1, round(self.image.height * factor)))
        filters = Image.Resampling
        # Whole steps keep the pixels of tiny pictures square; photographs are smoothed.
        resample = filters.NEAREST if factor >= 3 else filters.BICUBIC
        picture = self.image.resize(size, resample) if factor > 1 else self.image.copy()
        shown, hidden = self._shown()
        font = ImageFont.load_default(_TEXT_SIZE)
        _draw_boxes(picture, shown, factor)
        legend = _legend(self, shown, hidden, font, max(picture.width, MIN_SIDE))
        sheet = Image.new("RGB", (max(picture.width, legend.width), picture.height + legend.height), "white")
        sheet.paste(picture, ((sheet.width - picture.width) // 2, 0))
        sheet.paste(legend, (0, picture.height))
        if path is not None:
            with written_whole(path) as unfinished:
                sheet.save(unfinished, format=kind)
        return sheet

    def _shown(self) -> tuple[list[Match], int]:
        by_share = sorted(range(len(self.matches)), key=lambda i: -abs(self.matches[i].score * self.matches[i].weight))
        kept = sorted(by_share[:MAX_ROWS])
        return [self.matches[i] for i in kept], len(self.matches) - len(kept)


def _draw_boxes(picture: Image.Image, matches: list[Match], factor: float) -> None:
    draw = ImageDraw.Draw(picture)
    seen: dict[tuple[int, int, int, int], int] = {}
    for number, match in enumerate(matches):
        if match.box[2] <= match.box[0] or match.box[3] <= match.box[1]:
            continue
        # Matches that share a box are drawn one inside the other, so that each stays visible.
        inset = seen.get(match.box, 0)
        seen[match.box] = inset + _FRAME
        left, top, right, bottom = (round(edge * factor) for edge in match.box)
        left, top = max(left, 0) + inset, max(top, 0) + inset
        right, bottom = min(right, picture.width) - 1 - inset, min(bottom, picture.height) - 1 - inset
        if right <= left or bottom <= top:
            continue
        # A black line on both sides keeps a colour visible on a background of its own.
        draw.rectangle((left, top, right, bottom), outline="black", width=_FRAME)
        if right - left > 2 and bottom - top > 2:
            inner = (left + 1, top + 1, right - 1, bottom - 1)
            draw.rectangle(inner, outline=COLOURS[number % len(COLOURS)], width=_FRAME - 2)


def _legend(
    explanation: Explanation,
    matches: list[Match],
    hidden: int,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
    width: int,
) -> Image.Image:
    head = f"{explanation.scorer} {explanation.total:+.3f}   {explanation.text}"
    lines: list[tuple[str, tuple[int, int, int] | None]] = [
        (line, None) for line in _wrap(head, font, width - 2 * _MARGIN)
    ]
    indent = _MARGIN + _LINE
    for number, match in enumerate(matches):
        note = "" if match.weight != 0 else "   (not counted)"
        words = _wrap(f"{match.score:+.3f}  {match.text}{note}", font, width - indent - _MARGIN)
        lines.append((words[0], COLOURS[number % len(COLOURS)]))
        lines += [(line, None) for line in words[1:]]
    if hidden:
        lines.append((f"and {hidden} weaker ones", None))
    sheet = Image.new("RGB", (width, 2 * _MARGIN + _LINE * len(lines)), "white")
    draw = ImageDraw.Draw(sheet)
    n_head = len(_wrap(head, font, width - 2 * _MARGIN))
    for row, (line, colour) in enumerate(lines):
        top = _MARGIN + row * _LINE
        if colour is not None:
            draw.rectangle((_MARGIN, top + 3, _MARGIN + 13, top + 16), fill=colour, outline="black")
        draw.text((_MARGIN if row < n_head else indent, top), line, fill="black", font=font)
    return sheet


def _wrap(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Lines of at most `width` pixels, broken at spaces; a longer word has a line of its own."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
