"""What every encoder is: a frozen dual encoder with its preprocessing and text rules as one unit.

A family implements four steps (`preprocess`, `encode_pixels`, `tokenize`, `encode_tokens`); batching,
regions and the joining of features are written once, here. A region fills the input whatever its shape, also
where the family cuts or pads whole pictures (`preprocess_region`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.choices import CropMode, Fill, Probability
from engine.crops import crops
from engine.encoders.inputs import as_texts, check_batch_size, check_inside, check_regions
from engine.encoders.regions import by_head, region_boxes, with_regions
from engine.encoders.windows import pad_windows, window_cells
from engine.features import ClassPath, ImageFeatures, RegionPlan, TextFeatures, TextReadout
from engine.images import Interpolation, ResizePolicy, normalise, resize

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EncoderSpec:
    """Facts about an encoder that travel with its weights.

    Attributes:
        name: what `engine.load` was given.
        family: `"scenes"`, `"clip"`, `"siglip"`, `"siglip2"`, `"pe"`, …
        embed_dim: width D of the shared space.
        image_size: side of the square input in pixels.
        grid: rows and columns of the patch grid, None for towers without patches.
        image_layers, text_layers: number of transformer blocks of each tower.
        image_width, text_width: hidden widths of each tower.
        context_length: text positions, start and end included.
        mean, std: per-channel normalisation of pixels in 0..1.
        resize: `"crop"` (shorter side, then centre crop), `"squash"` or `"pad"`.
        interpolation: `"bicubic"` or `"bilinear"`.
        logit_scale, logit_bias: logit = scale * cosine + bias, from the checkpoint.
        probability: `"softmax"` over the texts of an image, or `"sigmoid"` for each pair.
        activation: `"gelu"`, `"quick_gelu"`, …
        taps: patch taps by name; the value says whether the tap is in the text's space.
        text_rules: one sentence on case, padding and end token.
        fingerprint: changes whenever weights, preprocessing or text rules change.
    """

    name: str
    family: str
    embed_dim: int
    image_size: int
    grid: tuple[int, int] | None
    image_layers: int
    text_layers: int
    image_width: int
    text_width: int
    context_length: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resize: ResizePolicy
    interpolation: Interpolation
    logit_scale: float
    logit_bias: float
    probability: Probability
    activation: str
    taps: Mapping[str, bool] = field(default_factory=dict)
    text_rules: str = ""
    fingerprint: str = ""

    @property
    def default_tap(self) -> str | None:
        """The first aligned tap, else the first tap, else None."""
        aligned = [name for name, is_aligned in self.taps.items() if is_aligned]
        return next(iter(aligned or self.taps), None)


@dataclass(frozen=True)
class Tokens:
    """Tokenized captions: `ids` and masks `(B, T)`, the end position `(B,)`, and what was cut.

    `attention_mask` keeps start, word pieces and end; `word_mask` the word pieces alone.
    """

    ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    end: Tensor
    truncated: Tensor
    texts: tuple[str, ...]
    token_texts: tuple[tuple[str, ...], ...]


class NonFiniteError(ValueError):
    """The embedding of one input is not finite; `row` is its place among the inputs."""

    def __init__(self, who: str, row: int) -> None:
        super().__init__(f"{who}: row {row} has a non-finite embedding; check its input and the dtype")
        self.row = row


class Encoder(ABC):
    """A frozen dual encoder. Methods may be called from several threads."""

    spec: EncoderSpec
    device: torch.device

    @abstractmethod
    def preprocess(self, image: Image.Image) -> Tensor:
        """An upright RGB image as normalised input `(3, image_size, image_size)`, float32."""

    def preprocess_region(self, image: Image.Image) -> Tensor:
        """A region as normalised input, all of it: squashed to the square whatever `spec.resize` says.

        Cutting the middle out would lose what lies at the edges of a long window. The whole image as a region
        is squashed too, so its embedding differs from the global one where `spec.resize` is not
        `"squash"`. A family whose input is no such square overrides this.
        """
        spec = self.spec
        square = resize(image, spec.image_size, "squash", interpolation=spec.interpolation)
        return normalise(square, spec.mean, spec.std)

    @abstractmethod
    def encode_pixels(self, pixels: Tensor, *, tap: str | None = None, layers: Sequence[int] = ()) -> ImageFeatures:
        """Features of one batch `(B, 3, image_size, image_size)`.

        `tap` names the patch tap to read (a key of `spec.taps`), None reads no patches. `layers` are
        1-indexed image blocks whose outputs go to `hidden`.
        """

    def encode_windows(self, pixels: Tensor, windows: Tensor) -> Tensor:
        """Embeddings `(B, W, D)`, unit norm, of windows of a batch of pictures, from one pass of the tower.

        `windows` are int32 `(B, W, 4)`: half-open boxes x0, y0, x1, y1 in cells of the patch grid. A window over
        the whole grid has the picture's global embedding (up to rounding). Optional: this form raises ValueError.
        """
        raise ValueError(
            f"{self.spec.name}: mode='windows' needs a tower with a class token or an attention-pooling head; "
            f"got {self.spec.family} in {type(self).__name__}"
        )

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Token ids under the family's text rules; too long captions keep their end token and are flagged."""

    @abstractmethod
    def encode_tokens(self, tokens: Tokens, *, token_vectors: bool = False, layers: Sequence[int] = ()) -> TextFeatures:
        """Features of one batch of captions; `token_vectors` adds `tokens` in the shared space."""

    def text_readout(self) -> TextReadout:
        """The frozen end of the text tower, which reads states of all layers. Optional: here it raises ValueError."""
        raise ValueError(f"{self.spec.name}: this text tower's layers cannot be read in the shared space")

    def class_path(self, layers: Sequence[int]) -> ClassPath | None:
        """The blocks that follow each of these 1-indexed image layers; None for towers that do not give them."""
        return None

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the encoder as one folder that loads again. Optional: this form raises ValueError."""
        raise ValueError(f"{self.spec.name}: save is not known to {type(self).__name__}, got {str(folder)!r}")

    def encode_images(
        self,
        images: Sequence[Image.Image],
        *,
        tap: str | None = None,
        layers: Sequence[int] = (),
        regions: RegionPlan | None = None,
        boxes: Sequence[np.ndarray] | None = None,
        batch_size: int = 64,
        progress: Progress | None = None,
    ) -> ImageFeatures:
        """Features of upright RGB images, in order.

        Args:
            images: PIL images as `engine.images.decode` makes them.
            tap: patch tap to read, None for no patches.
            layers: 1-indexed image blocks whose outputs are kept.
            regions: also encode the regions of this plan, each squashed to the input (`preprocess_region`).
            boxes: for each image its own rectangles `(R, 4)`, taken in place of the plan's grid and its whole image;
                the plan's mode and fill still apply.
            batch_size: images (and crops) in one pass.
            progress: called with (images done, images in all).

        Raises:
            ValueError: no images, an unknown tap or grid, an image without regions, a region without a pixel of its
                image, a batch size below 1, or features that are not finite.
        """
        check_batch_size("encode_images", batch_size)
        if len(images) == 0:
            raise ValueError("encode_images: needs at least one image, got none")
        self._check_tap(tap)
        check_regions("encode_images", boxes, len(images))
        parts = []
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            own = None if boxes is None else boxes[start : start + batch_size]
            if own is not None:
                check_inside("encode_images", own, batch, range(start, start + len(batch)))
            part = self._encode_batch(batch, tap, layers, regions, own, batch_size)
            _check_finite("encode_images", part.embedding, start)
            parts.append(part)
            if progress is not None:
                progress(start + len(batch), len(images))
        return ImageFeatures.cat(parts)

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        token_vectors: bool = False,
        layers: Sequence[int] = (),
        batch_size: int = 64,
        progress: Progress | None = None,
    ) -> TextFeatures:
        """Features of captions, in order.

        Raises:
            ValueError: no captions or a batch size below 1.
            TypeError: what is no string.
        """
        check_batch_size("encode_texts", batch_size)
        if isinstance(texts, str):
            raise TypeError("encode_texts: texts must be a list of strings, got one string")
        if len(texts) == 0:
            raise ValueError("encode_texts: needs at least one text, got none")
        texts = as_texts("encode_texts", texts)
        parts = []
        for start in range(0, len(texts), batch_size):
            batch = texts[start : start + batch_size]
            part = self.encode_tokens(self.tokenize(batch), token_vectors=token_vectors, layers=layers)
            _check_finite("encode_texts", part.embedding, start)
            parts.append(part)
            if progress is not None:
                progress(start + len(batch), len(texts))
        return TextFeatures.cat(parts)

    def encode_crops(self, pictures: Iterable[Image.Image], *, batch_size: int = 64) -> Tensor:
        """Global embeddings `(n, D)` of many regions cut out, `batch_size` at a time.

        Each fills the input, see `preprocess_region`. Equal ones are encoded once. They are
        common: plain backgrounds, and pictures that differ in one object.

        Raises:
            ValueError: a batch size below 1.
        """
        check_batch_size("encode_crops", batch_size)
        place: dict[tuple[tuple[int, int], bytes], int] = {}
        rows: list[int] = []
        pending: list[Tensor] = []
        done: list[Tensor] = []
        for picture in pictures:
            key = picture.size, hashlib.blake2b(picture.tobytes(), digest_size=16).digest()
            if key not in place:
                place[key] = len(place)
                pending.append(self.preprocess_region(picture))
            rows.append(place[key])
            if len(pending) == batch_size:
                done.append(self.encode_pixels(torch.stack(pending).to(self.device)).embedding)
                pending = []
        if pending:
            done.append(self.encode_pixels(torch.stack(pending).to(self.device)).embedding)
        return torch.cat(done)[torch.tensor(rows, device=self.device)]

    def _encode_batch(
        self,
        images: Sequence[Image.Image],
        tap: str | None,
        layers: Sequence[int],
        plan: RegionPlan | None,
        own: Sequence[np.ndarray] | None,
        batch_size: int,
    ) -> ImageFeatures:
        pixels = torch.stack([self.preprocess(image) for image in images]).to(self.device)
        sizes = torch.tensor([(image.height, image.width) for image in images], dtype=torch.int32)
        views = torch.tensor([view(self.spec.resize, *size) for size in sizes.tolist()], dtype=torch.int32)
        boxes = [] if plan is None else region_boxes(images, plan, own)
        head = None if plan is None else plan.head
        if plan is not None and head is not None:
            # The head reads the states of the one pass that makes everything else.
            part = self.encode_pixels(pixels, tap=tap, layers=sorted({*layers, *head.layers}))
            part = replace(part, sizes=sizes.to(self.device), views=views.to(self.device))
            found = by_head(head, part, boxes, str(plan) if own is None else plan.of_own_boxes)
            return replace(found, hidden={layer: found.hidden[layer] for layer in layers})
        windows = self._encode_boxes(pixels, boxes, views) if plan is not None and plan.mode == "windows" else None
        if windows is not None and tap is None and not layers:
            # The window over the whole grid is the global embedding: no pass of its own.
            part = ImageFeatures(embedding=windows[:, 0], fingerprint=self.spec.fingerprint)
        else:
            part = self.encode_pixels(pixels, tap=tap, layers=layers)
        part = replace(part, sizes=sizes.to(self.device), views=views.to(self.device))
        if plan is None:
            return part
        if windows is None:
            flat = self._encode_cut_out(images, boxes, plan, batch_size)
        else:
            flat = torch.cat([rows[1 : 1 + len(held)] for rows, held in zip(windows, boxes, strict=True)])
        return with_regions(part, flat, boxes, str(plan) if own is None else plan.of_own_boxes)

    def _encode_cut_out(
        self, images: Sequence[Image.Image], boxes: Sequence[np.ndarray], plan: RegionPlan, batch_size: int
    ) -> Tensor:
        """Embeddings of all boxes of all images, each cut out and encoded as a picture of its own."""
        mean = [round(255 * value) for value in self.spec.mean]
        fill = cast(Fill, (mean[0], mean[1], mean[2]) if plan.fill == "mean" else plan.fill)
        return self._encode_regions(images, boxes, cast(CropMode, plan.mode), fill, batch_size)

    def _encode_boxes(self, pixels: Tensor, boxes: Sequence[np.ndarray], views: Tensor) -> Tensor:
        """Embeddings `(B, 1 + W, D)` of the whole of each picture and of its boxes as windows."""
        # A tower without a grid has no windows either: encode_windows says so.
        rows, columns = self.spec.grid or (1, 1)
        whole = np.array([[0, 0, columns, rows]], dtype=np.int32)
        cells = [
            np.concatenate([whole, window_cells(held, tuple(shown), (rows, columns))])
            for held, shown in zip(boxes, views.tolist(), strict=True)
        ]
        return self.encode_windows(pixels, pad_windows(cells, pixels.device))

    def _encode_regions(
        self, images: Sequence[Image.Image], boxes: Sequence[np.ndarray], mode: CropMode, fill: Fill, batch_size: int
    ) -> Tensor:
        """Global embeddings of all regions, image by image. A family with a faster way overrides this."""
        pictures = (
            picture
            for image, rectangles in zip(images, boxes, strict=True)
            for picture in crops(image, rectangles, mode=mode, fill=fill)
        )
        return self.encode_crops(pictures, batch_size=batch_size)

    def _check_tap(self, tap: str | None) -> None:
        if tap is not None and tap not in self.spec.taps:
            known = ", ".join(repr(name) for name in self.spec.taps) or "none"
            raise ValueError(f"{self.spec.name}: tap must be one of {known}, got {tap!r}")

    def _check_layers(self, tower: str, layers: Sequence[int], count: int) -> None:
        for layer in layers:
            if not 1 <= layer <= count:
                held = f"1 to {count}" if count else "none: it can only be read at its end"
                raise ValueError(f"{self.spec.name}: {tower} layers are {held}, got {layer}")


def view(resize: ResizePolicy, height: int, width: int) -> tuple[int, int, int, int]:
    """The rectangle x0, y0, x1, y1 of an upright image that the square input shows under a resize policy.

    `"squash"` shows the whole image, `"crop"` its central square, `"pad"` the square around it, which reaches beyond
    the image's edges.

    Raises:
        ValueError: another policy.
    """
    if resize == "squash":
        return 0, 0, width, height
    if resize not in ("crop", "pad"):
        raise ValueError(f"view: resize must be 'crop', 'squash' or 'pad', got {resize!r}")
    side = min(height, width) if resize == "crop" else max(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def fingerprint(parts: Mapping[str, object], state: Mapping[str, Tensor]) -> str:
    """A short hex digest of settings and weights; equal only for the same numbers and the same rules."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(f"{name}={parts[name]!r};".encode())
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_finite(who: str, embedding: Tensor, start: int) -> None:
    bad = (~embedding.isfinite().all(dim=1)).nonzero().flatten()
    if len(bad):
        raise NonFiniteError(who, start + int(bad[0]))
