"""From a decoded Pillow image of any mode to upright 8-bit sRGB, as a viewer shows it on a white page."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageCms

from engine.images.errors import ImageError
from engine.images.opening import eight_bit

_BITS_TAG, _PHOTOMETRIC_TAG, _ORIENTATION_TAG = 258, 262, 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# PNG keeps its transparent colour in the file's own depth, while the pixels arrive stretched (or cut) to 8
# bits.
_KEY_SCALES = {"L;2": 85.0, "L;4": 17.0, "RGB;16B": 1 / 256}
# A profile that moves no colour further than rounding does is sRGB under another name: those pixels stay
# exact.
_SAME_COLOUR = 2

ColourKey = int | tuple[int, ...] | bytes | None


def upright(image: Image.Image) -> Image.Image:
    """Turn the picture as its EXIF (or XMP) orientation asks; damaged metadata means "as it is"."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
        method = _UPRIGHT.get(orientation)
    except Exception:
        # Metadata comes from anywhere and fails in any way; viewers then show the pixels as they lie.
        return image
    return image if method is None else image.transpose(method)


def colour_key(image: Image.Image) -> ColourKey:
    """Read the transparent colour of an image that is not loaded yet, in units of its decoded pixels."""
    key = image.info.get("transparency")
    tiles = getattr(image, "tile", None)
    rawmode = tiles[0][3] if tiles else None
    scale = _KEY_SCALES.get(rawmode, 1.0) if isinstance(rawmode, str) else 1.0
    if isinstance(key, int):
        return int(key * scale)
    if isinstance(key, tuple):
        return tuple(int(value * scale) for value in key)
    return key


@dataclass(frozen=True)
class GreyScale:
    """What the numbers of a grey picture of more than 8 bits mean: which is white, or that zero is."""

    white: int = 65535
    zero_is_white: bool = False


def grey_scale(image: Image.Image) -> GreyScale:
    """Read from the tags of a TIFF what Pillow leaves as it was stored: 12 bits, and zero for white."""
    tags = getattr(image, "tag_v2", None)
    if tags is None or not image.mode.startswith(("I", "F")):
        return GreyScale()
    bits = tags.get(_BITS_TAG, (16,))
    depth = bits[0] if isinstance(bits, tuple) else bits
    return GreyScale(4095 if depth == 12 else 65535, tags.get(_PHOTOMETRIC_TAG) == 0)


def to_rgb(image: Image.Image, key: ColourKey, name: str, scale: GreyScale | None = None) -> Image.Image:
    """Convert a loaded image to RGB: depth to 8 bits, colours to sRGB, transparency onto white."""
    base, alpha = _split_alpha(_depth_8(image, key, name, scale or GreyScale()), key)
    rgb = _to_srgb(base, image.info.get("icc_profile"))
    if alpha is None:
        return rgb
    page = Image.new("RGB", rgb.size, (255, 255, 255))
    page.paste(rgb, mask=alpha)
    return page


def _depth_8(image: Image.Image, key: ColourKey, name: str, scale: GreyScale) -> Image.Image:
    """Bring 16-bit and floating-point grey to 8 bits; other modes pass."""
    if image.mode == "F":
        shown = eight_bit(np.asarray(image), name)
        return Image.fromarray(255 - shown if scale.zero_is_white else shown)
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    if values.min() < 0 or values.max() > scale.white:
        raise ImageError(
            name,
            f"integer pixels must lie between 0 and {scale.white}, these go from {values.min()} to {values.max()}",
        )
    if scale.white != 65535:
        shown = ((values.astype(np.uint32) * 255 + scale.white // 2) // scale.white).astype(np.uint8)
    else:
        shown = eight_bit(values.astype(np.uint16), name)
    grey = Image.fromarray(255 - shown if scale.zero_is_white else shown)
    if isinstance(key, int):
        opaque = Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
        return Image.merge("LA", (grey, opaque))
    return grey


def _split_alpha(image: Image.Image, key: ColourKey) -> tuple[Image.Image, Image.Image | None]:
    """Separate colours from transparency, whichever way the mode stores it."""
    if image.mode in ("RGBa", "La"):
        image = image.convert({"RGBa": "RGBA", "La": "LA"}[image.mode])
    if image.mode in ("LA", "RGBA"):
        return image.convert(image.mode[:-1]), image.getchannel("A")
    if image.mode in ("P", "PA"):
        if image.mode == "PA" or image.has_transparency_data:
            rgba = image.convert("RGBA")
            return rgba.convert("RGB"), rgba.getchannel("A")
        return image.convert("RGB"), None
    if image.mode in ("1", "L", "RGB") and key is not None and not isinstance(key, bytes):
        grey = image.convert("L") if image.mode == "1" else image
        values = np.asarray(grey).reshape(grey.height, grey.width, -1)
        hidden = (values == np.asarray(key).reshape(1, 1, -1)).all(axis=2)
        return grey, Image.fromarray(np.where(hidden, 0, 255).astype(np.uint8))
    return image, None


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Apply an embedded profile where it fits the pixels; an unusable one is ignored, as viewers do."""
    if image.mode == "LAB":
        lab = ImageCms.createProfile("LAB")
        return _convert(image, ImageCms.ImageCmsProfile(lab))
    if image.mode not in ("L", "RGB", "CMYK"):
        image = image.convert("RGB")
    if not profile:
        return image.convert("RGB")
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        if space == "RGB" and image.mode == "L":
            image = image.convert("RGB")
        if {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}.get(space) != image.mode:
            return image.convert("RGB")
        if image.mode == "RGB" and _moves_nothing(source):
            return image
        return _convert(image, source)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image.convert("RGB")


def _convert(image: Image.Image, profile: ImageCms.ImageCmsProfile) -> Image.Image:
    """Transform pixels from `profile` to sRGB."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    converted = ImageCms.profileToProfile(
        image, profile, srgb, renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC, outputMode="RGB"
    )
    assert converted is not None
    return converted


def _moves_nothing(profile: ImageCms.ImageCmsProfile) -> bool:
    """Try the profile on a cube of 16 x 16 x 16 colours."""
    levels = np.arange(0, 256, 17, dtype=np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(64, 64, 3)
    shown = np.asarray(_convert(Image.fromarray(cube), profile)).astype(np.int16)
    return int(np.abs(shown - cube).max()) <= _SAME_COLOUR
