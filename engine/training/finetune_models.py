"""Full fine-tuning of models of any family, on captioned pictures: every weight, with the loop of the heads.

Batches are pictures and captions, not stored features: each picture is decoded again whenever it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.datasets.base import ImageRef
from engine.datasets.captioned import CaptionedImages, CaptionedItem, Problem, usable
from engine.encoders.base import Encoder
from engine.encoders.registry import load_encoder
from engine.encoders.scenes import ScenesEncoder
from engine.encoders.towers import DualEncoder
from engine.heads.base import Trainable
from engine.images import ImageError, ImageSource, decode
from engine.scenes.items import ControlledItem, picture_of
from engine.training.captioned_data import drawn_captions, shape_of, source_of
from engine.training.finetune import Captions, WholeEncoder, objective
from engine.training.heads import BatchLoss, Evaluate, HeadTrainConfig, Report, train_head
from engine.training.held_out import AMONG, Scored, apart, shares

# Logit scales are kept below this, as in Radford et al. 2021 (CLIP).
MAX_SCALE = 100.0


@dataclass(frozen=True)
class Began:
    """The model that a fine-tuning began with."""

    model: str


class WholeDualEncoder(Trainable):
    """A model of open_clip or transformers, all of whose weights are trained where they are.

    Args:
        encoder: of float32, loaded for this; `encoder()` is the same one with the weights as they have become.
    """

    name: ClassVar[str] = "finetune"

    def __init__(self, encoder: DualEncoder) -> None:
        super().__init__()
        self.model = encoder.unfreeze()
        self.config = Began(encoder.spec.name)
        self.fingerprint = encoder.spec.fingerprint
        self._encoder = encoder

    def forward(self, pixels: Tensor, captions: Captions) -> Tensor:
        """Cosines `(n_images, n_texts)`."""
        f, g = self._encoder.embed(pixels, captions.ids)
        return functional.normalize(f.float(), dim=-1) @ functional.normalize(g.float(), dim=-1).T

    def scale(self) -> Tensor:
        """The model's own logit scale, trained on."""
        return self.model.get_parameter("logit_scale").exp().clamp(max=MAX_SCALE)

    def encoder(self) -> DualEncoder:
        """The encoder, whose weights go on changing while the training does."""
        return self._encoder

    def save(self, path: str | PathLike[str], *, facts: object = None) -> Path:
        """Write the model beside `path`; the folder, for `open_clip:<folder>` or `hf:<folder>`."""
        folder = Path(path).parent
        self._encoder.save(folder)
        return folder


@dataclass(frozen=True)
class PixelItems:
    """Captioned pictures as pixels and tokens, read anew for each batch.

    Attributes:
        data: items whose pictures can all be read; see `readable`.
        encoder: whose rules are followed.
    """

    data: CaptionedImages
    encoder: Encoder

    def __len__(self) -> int:
        return len(self.data)

    @property
    def source(self) -> str:
        """What the items are: a run goes on with the same ones alone."""
        return self.data.fingerprint

    def batch(self, items: Tensor) -> tuple[Tensor, Captions]:
        """Pixels and captions, first of the pairs, then of their hard negatives."""
        images, texts = shape_of(self.data)
        chosen = [self.data.items[item] for item in items.tolist()]
        refs = [item.images[k] for k in range(images) for item in chosen]
        pixels = torch.stack([self.encoder.preprocess(decode(source_of(ref))) for ref in refs])
        rows = drawn_captions(items, [len(item.captions) for item in chosen])
        captions = [item.captions[row] for item, row in zip(chosen, rows, strict=True)]
        if texts == 2:
            captions += [item.negatives[row] for item, row in zip(chosen, rows, strict=True)]
        tokens = self.encoder.tokenize(captions)
        return pixels, Captions(tokens.ids, tokens.end)


def readable(data: CaptionedImages) -> CaptionedImages:
    """The items whose pictures can be read; every picture is opened once. Raises ValueError when none is left."""
    kept, problems = [], list(data.problems)
    for item in data.items:
        try:
            for ref in item.images:
                decode(source_of(ref))
        except ImageError as error:
            problems.append(Problem(error.source if ref.path else ref.name, error.reason))
        else:
            kept.append(item)
    return usable(data.name, kept, problems)


def held_out_items(data: CaptionedImages, items: int) -> tuple[CaptionedImages, CaptionedImages | None]:
    """The data without `items` of them (spread evenly, at most a tenth), and those; None where that is none."""
    kept, chosen = apart(len(data), items)
    if not chosen:
        return data, None
    one, two = (tuple(data.items[row] for row in rows) for rows in (kept, chosen))
    return replace(data, items=one), replace(data, items=two)


@dataclass(frozen=True)
class HeldOutItemFigures:
    """How a model that is being trained does on items it is not trained on: `shares` of their cosines.

    Attributes:
        data: the items; see `readable`.
    """

    data: CaptionedImages

    def __call__(self, trained: WholeEncoder | WholeDualEncoder) -> dict[str, float]:
        """The shares of the model as it is now."""
        return shares(self._scored(trained))

    def _scored(self, trained: WholeEncoder | WholeDualEncoder) -> Iterator[Scored]:
        device = next(trained.parameters()).device
        read = PixelItems(self.data, trained.encoder())
        images, texts = shape_of(self.data)
        for start in range(0, len(read), AMONG):
            items = torch.arange(start, min(start + AMONG, len(read)))
            pixels, captions = read.batch(items)
            size = len(items)
            # Image side, item, text side, item; what is held against its negative lies within one item.
            scores = trained(pixels.to(device), captions.to(device)).view(images, size, texts, size)
            within = scores.diagonal(dim1=1, dim2=3)  # (images, texts, items)
            yield Scored(
                scores[0, :, 0],
                within[0, 1] if texts == 2 else None,
                within.permute(2, 0, 1) if images == texts == 2 else None,
            )


def quads_of_scenes(items: Sequence[ControlledItem]) -> CaptionedImages:
    """Rendered quads as captioned pictures."""
    made = []
    for row, item in enumerate(items):
        name = f"{item.category} {item.split} {item.render_seed} {row}"
        one, two = (ImageRef(f"{name} {k}", load=partial(_rendered, item, k)) for k in range(2))
        made.append(CaptionedItem(name, one, (item.captions[0],), (item.captions[1],), two))
    return CaptionedImages("quads", tuple(made))


def finetune_model(
    model: str,
    data: CaptionedImages,
    config: HeadTrainConfig,
    *,
    device: str = "auto",
    evaluate: Evaluate | None = None,
    report: Report | None = None,
) -> str:
    """Fine-tune all weights of a model, or go on with it; the name under which the result loads.

    Args:
        model: as for `engine.load`; it is loaded in float32 and stays as it is on disk.
        data: items with the images and texts that the loss needs.
        config: as for `train_head`; the model is written into its output folder.
        evaluate: gets what is trained, whose `encoder()` can be given to an `Engine`.
        report: as for `train_head`.

    Raises ValueError for a family that cannot be trained, and what `load_encoder` and `train_head` raise.
    """
    images, texts = shape_of(data)
    config = config.fitted(images, texts)
    encoder = load_encoder(model, device=device, dtype="float32")
    if not isinstance(encoder, ScenesEncoder | DualEncoder):
        raise ValueError(f"finetune: the weights of {model} cannot be trained; take scenes, open_clip: or hf:")
    whole: Trainable = WholeEncoder(encoder) if isinstance(encoder, ScenesEncoder) else WholeDualEncoder(encoder)
    folder = train_head(
        whole.to(encoder.device),
        PixelItems(data, encoder),
        config,
        objective=BatchLoss(objective(config, images_per_item=images), whole_batch=True),
        evaluate=evaluate,
        report=report,
    )
    return f"{model.partition(':')[0]}:{folder}"


def _rendered(item: ControlledItem, side: int) -> ImageSource:
    return picture_of(item.scenes[side], item.render_seed, item.settings)
