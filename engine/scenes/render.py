"""Pixels of scenes, and training batches that are a pure function of seed and step.

Each look (shape, material, size, angle) is drawn once, six times oversampled, and kept as three small planes:
``keep`` (what stays of the background), and the weights of the object's own color and of its second shade. An
object is then one small matrix product and one blend. Backgrounds come from a bank of smooth noise tiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from engine.scenes.captions import caption_of
from engine.scenes.settings import STANDARD, RenderSettings
from engine.scenes.world import (
    ATTRIBUTES,
    CANVAS,
    COLORS,
    Object,
    SceneSpec,
    sample_scene,
    visible_fraction,
)

_OVERSAMPLING = 6
_ANGLE_STEP_DEG = 5.0
_N_TILES = 192
_COLOR_INDEX = {word: i for i, word in enumerate(COLORS)}
_ATTRIBUTE_INDEX = {word: i for i, word in enumerate(ATTRIBUTES)}
_PATTERNED = frozenset(("striped", "dotted", "checkered"))


class Sprite(NamedTuple):
    """One look: ``keep (S, S)`` and ``weights (2, S * S)`` of own color and second shade, float32."""

    keep: np.ndarray
    weights: np.ndarray


class TrainingBatch(NamedTuple):
    """Images uint8 ``(B, 96, 96, 3)``, captions, presence float32 ``(B, 26)`` and counts int64 ``(B,)``."""

    images: np.ndarray
    captions: list[str]
    presence: np.ndarray
    counts: np.ndarray


def _inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Bool mask of ``shape`` at coordinates in [-1, 1], y pointing down."""
    r = np.hypot(x, y)
    if shape == "circle":
        return r <= 0.96
    if shape == "ring":
        return (r <= 0.98) & (r >= 0.47)
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) <= 0.84
    if shape == "cross":
        ax, ay = np.abs(x), np.abs(y)
        return ((ax <= 0.34) & (ay <= 0.97)) | ((ay <= 0.34) & (ax <= 0.97))
    if shape == "triangle":
        return (y <= 0.82) & (y >= 1.86 * np.abs(x) - 0.98)
    if shape == "arrow":
        head = (x >= 0.02) & (np.abs(y) <= 0.98 - x) & (np.abs(y) <= 0.92)
        return head | ((x >= -0.97) & (x <= 0.05) & (np.abs(y) <= 0.33))
    if shape == "moon":
        return (np.hypot(x - 0.08, y) <= 0.98) & (np.hypot(x - 0.62, y) > 0.82)
    if shape == "heart":
        hx, hy = np.abs(x) / 0.84, (0.12 - y) / 0.84
        return (hx * hx + hy * hy - 0.92) ** 3 - hx * hx * hy**3 <= 0
    assert shape == "star"
    # Five points: fold the plane into one half-tooth and keep what lies inside its edge.
    angle = np.arctan2(x, -(y - 0.06))
    tooth = np.abs((angle + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
    rr = np.hypot(x, y - 0.06)
    px, py = rr * np.cos(tooth), rr * np.sin(tooth)
    outer, inner = 1.04, 0.48
    ix, iy = inner * np.cos(np.pi / 5), inner * np.sin(np.pi / 5)
    return (px - outer) * iy - py * (ix - outer) <= 0


def _eroded(mask: np.ndarray, steps: int) -> np.ndarray:
    """``mask`` without its outermost ``steps`` pixels (alternating 4- and 8-neighbourhoods, near a disc)."""
    out = np.pad(mask, 1)
    for step in range(steps):
        next_out = out.copy()
        for axis in (0, 1):
            next_out &= np.roll(out, 1, axis) & np.roll(out, -1, axis)
        if step % 2:
            rows = np.roll(out, 1, 0) & np.roll(out, -1, 0)
            next_out &= np.roll(rows, 1, 1) & np.roll(rows, -1, 1)
        out = next_out
    return out[1:-1, 1:-1]


def _surface(
    material: str, mask: np.ndarray, x: np.ndarray, y: np.ndarray, size_px: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Opacity, weight of the own color and weight of the second shade of a material, inside a mask."""
    one, zero = np.ones_like(x), np.zeros_like(x)
    if material == "rubber":
        return one, one, zero
    if material == "metal":
        along = (x + y) / 1.5  # -1 at the upper left, +1 at the lower right
        shine = np.exp(-(((along + 0.42) / 0.2) ** 2)) * 0.9
        dark = np.clip(0.68 - 0.5 * along, 0.22, 1.0)
        return one, dark * (1 - shine), shine
    if material == "glass":
        width_px = 1.5 if size_px < 22 else 0.085 * size_px
        rim = mask & ~_eroded(mask, round(width_px * _OVERSAMPLING))
        opacity = np.where(rim, 1.0, 0.4)
        return opacity, opacity * np.where(rim, 0.72, 1.0), np.where(rim, 0.28, 0.0)
    if material == "striped":
        second = np.floor((y + 1.02) / 0.255) % 2 == 1
    elif material == "checkered":
        second = (np.floor((x + 1.2) / 0.4) + np.floor((y + 1.2) / 0.4)) % 2 == 1
    else:
        assert material == "dotted"
        pitch = 0.56
        row = np.floor(y / (pitch * 0.87) + 0.5)
        dx = (x / pitch + 0.5 * (row % 2) + 0.5) % 1.0 - 0.5
        dy = (y / (pitch * 0.87) + 0.5) % 1.0 - 0.5
        second = np.hypot(dx * pitch, dy * pitch * 0.87) <= 0.165
    return one, np.where(second, 0.0, 1.0), np.where(second, 1.0, 0.0)


@lru_cache(maxsize=16384)
def sprite(shape: str, material: str, size_px: int, angle_step: int) -> Sprite:
    """The planes of one look; ``angle_step`` counts steps of five degrees."""
    # A turned square reaches beyond its box.
    extent = 1.0 if abs(angle_step) <= 2 else 1.2
    side = 2 * int(np.ceil(size_px * extent / 2)) if extent > 1 else size_px
    n = side * _OVERSAMPLING
    axis = (np.arange(n) + 0.5) / n * 2 - 1
    axis = axis * side / size_px
    gx, gy = np.meshgrid(axis, axis)
    angle = np.deg2rad(angle_step * _ANGLE_STEP_DEG)
    x = gx * np.cos(angle) + gy * np.sin(angle)
    y = gy * np.cos(angle) - gx * np.sin(angle)
    mask = _inside(shape, x, y)
    opacity, own, second = _surface(material, mask, x, y, size_px)

    def smoothed(plane: np.ndarray) -> np.ndarray:
        blocks = (plane * mask).reshape(side, _OVERSAMPLING, side, _OVERSAMPLING)
        return blocks.mean(axis=(1, 3), dtype=np.float64).astype(np.float32)

    keep = 1 - smoothed(opacity)
    weights = np.stack([smoothed(own).ravel(), smoothed(second).ravel()])
    keep.flags.writeable = False
    weights.flags.writeable = False
    return Sprite(keep, weights)


@lru_cache(maxsize=1)
def _noise_tiles() -> np.ndarray:
    """Smooth backgrounds of mean 0 and greatest magnitude 1, ``(_N_TILES, 96, 96)`` float32."""
    rng = np.random.default_rng(20260)
    tiles = np.empty((_N_TILES, CANVAS, CANVAS), np.float32)
    ramp = np.linspace(-1, 1, CANVAS)
    for index in range(_N_TILES):
        coarse = (3, 5, 8, 14)[index % 4]
        noise = Image.fromarray(rng.standard_normal((coarse, coarse)).astype(np.float32))
        tile = np.asarray(noise.resize((CANVAS, CANVAS), Image.Resampling.BICUBIC), dtype=np.float64)
        direction = rng.uniform(0, 2 * np.pi)
        gradient = np.cos(direction) * ramp[None, :] + np.sin(direction) * ramp[:, None]
        tile = tile * rng.uniform(0.3, 1.0) + gradient * rng.uniform(0.0, 1.2)
        tile += 0.12 * rng.standard_normal(tile.shape)
        tile -= tile.mean()
        tiles[index] = tile / np.abs(tile).max()
    tiles.flags.writeable = False
    return tiles


def _background(rng: np.random.Generator, settings: RenderSettings) -> np.ndarray:
    u = rng.random(8)
    low, high = settings.tone
    tone = (low + (high - low) * u[0] + 22.0 * (u[1:4] - 0.5)).astype(np.float32)
    if u[4] < settings.plain_share:
        return np.repeat(tone, CANVAS * CANVAS).reshape(3, CANVAS, CANVAS)
    tile = _noise_tiles()[int(u[5] * _N_TILES)]
    if u[6] < 0.5:
        tile = tile[:, ::-1]
    weakest, strongest = settings.contrast
    canvas = np.empty((3, CANVAS, CANVAS), np.float32)
    np.multiply(tile, np.float32(weakest + (strongest - weakest) * u[7]), out=canvas[0])
    np.add(canvas[0], tone[1], out=canvas[1])
    np.add(canvas[0], tone[2], out=canvas[2])
    canvas[0] += tone[0]
    return canvas


@lru_cache(maxsize=8)
def _shades(settings: RenderSettings) -> tuple[np.ndarray, np.ndarray]:
    """Own colors and second shades of the patterned materials, ``(9, 3)`` float32 each."""
    own = np.array(settings.palette, np.float32)
    light = own.mean(axis=1, keepdims=True)
    # A pattern on a dark color is lighter than it, on any other darker.
    second = np.where(light < 45, own + 92, own * 0.38)
    return own, second.astype(np.float32)


def _paint(canvas: np.ndarray, thing: Object, spec: SceneSpec, settings: RenderSettings) -> None:
    group = spec.groups[thing.group]
    keep, weights = sprite(
        group.shape, group.material, thing.size_px, round(thing.angle_deg / _ANGLE_STEP_DEG)
    )
    side = keep.shape[0]
    own, second = _shades(settings)
    index = _COLOR_INDEX[group.color]
    colors = np.empty((3, 2), np.float32)
    colors[:, 0] = thing.tint
    colors[:, 0] *= settings.color_jitter
    colors[:, 0] += own[index]
    # The bright rim of black glass stays black: grey would be no color of this world.
    plain = own[index] if group.material == "glass" and group.color == "black" else 255.0
    colors[:, 1] = second[index] if group.material in _PATTERNED else plain
    paint = (colors @ weights).reshape(3, side, side)
    x, y = round(thing.x - side / 2), round(thing.y - side / 2)
    if x < 0 or y < 0 or x + side > CANVAS or y + side > CANVAS:
        left, top = max(0, -x), max(0, -y)
        right, bottom = min(side, CANVAS - x), min(side, CANVAS - y)
        keep = keep[top:bottom, left:right]
        paint = paint[:, top:bottom, left:right]
        x, y = max(x, 0), max(y, 0)
    region = canvas[:, y : y + keep.shape[0], x : x + keep.shape[1]]
    region *= keep
    region += paint


def _border_color(picture: np.ndarray) -> np.ndarray:
    edges = (picture[0], picture[-1], picture[:, 0], picture[:, -1])
    return np.concatenate(edges).mean(axis=0)


def _seen_through(picture: np.ndarray, spec: SceneSpec, rng: np.random.Generator) -> np.ndarray:
    """The picture that the view of ``spec`` makes of the whole scene's ``picture``."""
    kind, x, y, side = spec.view
    if kind == "zoom":
        how = Image.Resampling.BILINEAR if rng.random() < 0.5 else Image.Resampling.BICUBIC
        return np.asarray(Image.fromarray(picture).resize((CANVAS, CANVAS), how, (x, y, x + side, y + side)))
    window = picture[y : y + side, x : x + side]
    # Fill with the border of the picture or of the window: both are ways to guess a background.
    fill = _border_color(picture if rng.random() < 0.5 else window)
    out = np.empty_like(picture)
    out[:] = np.round(fill)
    start = (CANVAS - side) // 2
    out[start : start + side, start : start + side] = window
    return out


def render(spec: SceneSpec, rng: np.random.Generator, settings: RenderSettings = STANDARD) -> np.ndarray:
    """Draw a scene as uint8 ``(96, 96, 3)``.

    ``rng`` decides the background alone (and how a view is resampled or filled): two scenes drawn from
    equal states share it. Later objects cover earlier ones where they touch.
    """
    canvas = _background(rng, settings)
    for thing in spec.objects:
        _paint(canvas, thing, spec, settings)
    np.clip(canvas, 0, 255, out=canvas)
    picture = np.empty((CANVAS, CANVAS, 3), np.uint8)
    # Plane by plane: several times faster than a transposed copy.
    for channel in range(3):
        picture[:, :, channel] = canvas[channel]
    return picture if spec.view.kind == "full" else _seen_through(picture, spec, rng)


def presence_of(spec: SceneSpec) -> np.ndarray:
    """Which attributes are to be seen: float32 ``(26,)`` in the order of ``ATTRIBUTES``.

    1 where at least half of one object with the attribute is in view, else 0. In a zoomed picture both
    sizes are 0.5, since scale is lost.
    """
    target = np.zeros(len(ATTRIBUTES), np.float32)
    _, x, y, side = spec.view
    for index, group in enumerate(spec.groups):
        if index not in spec.visible and not any(
            o.group == index and visible_fraction(o, x, y, side) >= 0.5 for o in spec.objects
        ):
            continue
        target[_ATTRIBUTE_INDEX[group.shape]] = 1
        target[_ATTRIBUTE_INDEX[group.color]] = 1
        target[_ATTRIBUTE_INDEX[group.size]] = 1
        target[_ATTRIBUTE_INDEX[group.material]] = 1
    if spec.zoomed:
        target[_ATTRIBUTE_INDEX["small"]] = target[_ATTRIBUTE_INDEX["large"]] = 0.5
    return target


def training_batch(
    seed: int, step: int, batch_size: int, *, max_groups: int = 3, settings: RenderSettings = STANDARD
) -> TrainingBatch:
    """One batch of training pictures and captions, a pure function of its arguments.

    Args:
        seed, step: together the state of the random generator, so that training resumes at any step.
        batch_size: number of samples ``B``.
        max_groups: most groups a scene may hold, 1 to 3.
        settings: how scenes look.

    Returns:
        ``TrainingBatch``: ``images`` uint8 ``(B, 96, 96, 3)``; ``captions``; ``presence`` as in
        ``presence_of``, float32 ``(B, 26)``; ``counts`` int64 ``(B,)``: the number of objects where one group
        is all there is, else -1.

    >>> batch = training_batch(0, 0, 2)
    >>> batch.images.shape, len(batch.captions), batch.presence.shape
    ((2, 96, 96, 3), 2, (2, 26))
    """
    rng = np.random.default_rng((seed, step))
    images = np.empty((batch_size, CANVAS, CANVAS, 3), np.uint8)
    captions = []
    presence = np.empty((batch_size, len(ATTRIBUTES)), np.float32)
    counts = np.full(batch_size, -1, np.int64)
    for index in range(batch_size):
        spec = sample_scene(rng, max_groups=max_groups, settings=settings)
        images[index] = render(spec, rng, settings)
        captions.append(caption_of(spec, rng))
        presence[index] = presence_of(spec)
        if len(spec.groups) == 1:
            counts[index] = spec.groups[0].count
    return TrainingBatch(images, captions, presence, counts)
