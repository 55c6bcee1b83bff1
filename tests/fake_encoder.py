"""A tiny deterministic encoder: random projections of patch colours and of hashed words, in one space."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from engine.choices import Probability
from engine.encoders.base import Encoder, EncoderSpec, Tokens
from engine.features import ImageFeatures, TextFeatures
from engine.images import ResizePolicy

SIDE, PATCHES, WIDTH = 16, 4, 24
PALETTE = {"red": (255, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 255), "grey": (128, 128, 128)}


class FakeEncoder(Encoder):
    """Patches are projected mean colours; a word is its colour projected, or noise seeded by its letters."""

    def __init__(
        self,
        *,
        taps: Mapping[str, bool] | None = None,
        probability: Probability = "softmax",
        context_length: int = 12,
        resize: ResizePolicy = "squash",
        name: str = "fake",
    ) -> None:
        self.device = torch.device("cpu")
        self.calls: list[int] = []
        self.encoded: list[str] = []
        generator = torch.Generator().manual_seed(7)
        self._colours = torch.randn(3, WIDTH, generator=generator)
        self._second = torch.randn(3, WIDTH, generator=generator)
        self.spec = EncoderSpec(
            name=name,
            family="fake",
            embed_dim=WIDTH,
            image_size=SIDE,
            grid=(PATCHES, PATCHES),
            image_layers=2,
            text_layers=2,
            image_width=WIDTH,
            text_width=WIDTH,
            context_length=context_length,
            mean=(0.5, 0.5, 0.5),
            std=(1.0, 1.0, 1.0),
            resize=resize,
            interpolation="bilinear",
            logit_scale=10.0,
            logit_bias=-1.0,
            probability=probability,
            activation="none",
            taps={"hidden": False, "projected": True} if taps is None else dict(taps),
            fingerprint=f"{name}-1",
        )

    def preprocess(self, image: Image.Image) -> Tensor:
        small = image.resize((SIDE, SIDE), Image.Resampling.BOX)
        return torch.from_numpy(np.asarray(small, dtype=np.float32) / 255 - 0.5).permute(2, 0, 1)

    def encode_pixels(self, pixels: Tensor, *, tap: str | None = None, layers: Sequence[int] = ()) -> ImageFeatures:
        self._check_tap(tap)
        self.calls.append(len(pixels))
        means = functional.avg_pool2d(pixels, SIDE // PATCHES).flatten(2).transpose(1, 2)  # (B, P, 3)
        patches = functional.normalize(means @ self._colours + 1e-3, dim=-1)
        tapped = patches if tap == "projected" else means @ self._second
        return ImageFeatures(
            embedding=functional.normalize(patches.mean(dim=1), dim=-1),
            patches=tapped if tap else None,
            grid=(PATCHES, PATCHES) if tap else None,
            aligned=tap is not None and self.spec.taps[tap],
            tap=tap or "",
            hidden={layer: means * layer for layer in layers},
            fingerprint=self.spec.fingerprint,
        )

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        length = self.spec.context_length
        ids = torch.zeros(len(texts), length, dtype=torch.int64)
        attention, words = ids.bool(), ids.bool()
        end = torch.zeros(len(texts), dtype=torch.int64)
        truncated = torch.zeros(len(texts), dtype=torch.bool)
        shown = []
        for row, text in enumerate(texts):
            pieces = text.lower().split()
            truncated[row] = len(pieces) > length - 2
            pieces = pieces[: length - 2]
            ids[row, 1 : 1 + len(pieces)] = torch.tensor([zlib.crc32(piece.encode()) for piece in pieces]).long()
            attention[row, : len(pieces) + 2] = True
            words[row, 1 : len(pieces) + 1] = True
            end[row] = len(pieces) + 1
            shown.append(("<s>", *pieces, "</s>", *[""] * (length - 2 - len(pieces))))
        return Tokens(ids, attention, words, end, truncated, tuple(texts), tuple(shown))

    def encode_tokens(self, tokens: Tokens, *, token_vectors: bool = False, layers: Sequence[int] = ()) -> TextFeatures:
        self.encoded += tokens.texts
        vectors = torch.stack([torch.stack([self._word(piece) for piece in row]) for row in tokens.token_texts])
        kept = vectors * tokens.word_mask[..., None]
        return TextFeatures(
            embedding=functional.normalize(kept.sum(dim=1) + 1e-3, dim=-1),
            tokens=vectors if token_vectors else None,
            token_mask=tokens.word_mask if token_vectors else None,
            attention_mask=tokens.attention_mask,
            end=tokens.end,
            hidden={layer: vectors * layer for layer in layers},
            truncated=tokens.truncated,
            token_texts=tokens.token_texts,
            texts=tokens.texts,
            fingerprint=self.spec.fingerprint,
        )

    def _word(self, piece: str) -> Tensor:
        if piece in PALETTE:
            colour = torch.tensor(PALETTE[piece], dtype=torch.float32) / 255 - 0.5
            return functional.normalize(colour @ self._colours + 1e-3, dim=-1)
        generator = torch.Generator().manual_seed(zlib.crc32(piece.encode()))
        return functional.normalize(torch.randn(WIDTH, generator=generator), dim=-1)


def picture(*colours: str, side: int = 32) -> Image.Image:
    """Vertical stripes of the named colours from left to right."""
    pixels = np.zeros((side, side, 3), dtype=np.uint8)
    for column, colour in enumerate(colours):
        pixels[:, column * side // len(colours) : (column + 1) * side // len(colours)] = PALETTE[colour]
    return Image.fromarray(pixels)
