"""Pictures in: safe decoding to upright sRGB, and resizing by named policies."""

from engine.images.decoding import DEFAULT_MAX_PIXELS, DecodedImages, ImageFailure, decode, decode_many
from engine.images.errors import ImageError
from engine.images.opening import ImageSource, describe
from engine.images.resizing import Interpolation, ResizePolicy, normalise, resize

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "DecodedImages",
    "ImageError",
    "ImageFailure",
    "ImageSource",
    "Interpolation",
    "ResizePolicy",
    "decode",
    "decode_many",
    "describe",
    "normalise",
    "resize",
]
