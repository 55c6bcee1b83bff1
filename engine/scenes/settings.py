"""How scenes look: the standard settings that training uses, and shifted ones for tests out of its domain."""

from __future__ import annotations

from dataclasses import dataclass

# One more whenever a seed comes to give other pictures, captions or segments than before: results of two formats are
# not of the same items and are never set side by side.
ITEMS_FORMAT = 1


@dataclass(frozen=True)
class RenderSettings:
    """How scenes look: palette, sizes, angles, backgrounds, and how often the view is not the whole scene.

    ``palette`` follows ``COLORS``; sizes in pixels; ``contrast`` and ``tone`` in grey levels of 255.
    """

    name: str
    palette: tuple[tuple[int, int, int], ...]
    small_px: float = 18.0
    large_px: float = 29.0
    size_jitter: float = 0.1
    max_angle_deg: float = 10.0
    color_jitter: float = 9.0
    tone: tuple[float, float] = (92.0, 168.0)
    contrast: tuple[float, float] = (3.0, 11.0)
    plain_share: float = 0.3
    zoom_share: float = 0.25
    paste_share: float = 0.15


STANDARD = RenderSettings(
    name="standard",
    palette=(
        (214, 32, 36),
        (28, 150, 52),
        (246, 246, 246),
        (36, 70, 216),
        (244, 216, 36),
        (18, 18, 20),
        (136, 44, 176),
        (246, 130, 20),
        (56, 208, 224),
    ),
)
SHIFTED = RenderSettings(
    name="shifted",
    palette=(
        (188, 26, 62),
        (62, 158, 36),
        (234, 232, 220),
        (54, 96, 190),
        (224, 206, 74),
        (38, 34, 42),
        (120, 62, 152),
        (228, 116, 48),
        (92, 200, 206),
    ),
    size_jitter=0.15,
    max_angle_deg=30.0,
    contrast=(12.0, 26.0),
    plain_share=0.0,
    zoom_share=0.0,
    paste_share=0.0,
)
