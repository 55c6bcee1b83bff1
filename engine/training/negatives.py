"""One loss for a comparison of negatives: the same batches of items, only what a score is held against differs.

Items of a batch stand in groups of g. Image i and text i belong together, n is the hard negative of i:

    in_batch:  images and texts of a group against each other, symmetric InfoNCE over g × g scores
    captions:  the same, and each image also against its own hard negative caption (g + 1 texts)
    quads:     that of in_batch, plus the cross-entropy of both choices within each 2 × 2 quad

So each is the first with more on top, and the number of scored pairs an item is g, g + 1 or g + 3. Groups keep that
number in bounds for heads that must run once for each pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from engine.choices import check_choice
from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import Head
from engine.training.finetune import Captions, WholeEncoder
from engine.training.losses import quad_loss

Negatives = Literal["in_batch", "captions", "quads"]
NEGATIVES: tuple[Negatives, ...] = get_args(Negatives)


@dataclass(frozen=True)
class NegativesObjective:
    """The loss of one batch of B quads; for `train_head(objective=...)`.

    Attributes:
        negatives: what a pair is held against.
        group: items g that are negatives of each other; must divide B.
    """

    negatives: Negatives
    group: int = 8

    def __post_init__(self) -> None:
        check_choice("NegativesObjective", "negatives", self.negatives, NEGATIVES)
        if self.group < 2:
            raise ValueError(f"NegativesObjective: group must be at least 2, got {self.group}")

    def __call__(self, head: Head, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """The loss of a head on features as `HeadData.batch` orders them: B pairs, then their B hard negatives."""
        size = len(images) // 2
        return self.loss(head.scale() * head.chosen(images, texts, *self.rows(size)), size)

    def of_encoder(self, encoder: WholeEncoder, pixels: Tensor, captions: Captions) -> Tensor:
        """The same loss of a whole encoder, on a batch of `PixelQuads`."""
        size = len(pixels) // 2
        image_rows, text_rows = self.rows(size)
        # In-batch and caption negatives look at the first picture of each quad only.
        used = pixels[: int(image_rows.max()) + 1], Captions(*(part[: int(text_rows.max()) + 1] for part in captions))
        return self.loss(encoder.scale() * encoder(*used)[image_rows, text_rows], size)

    def rows(self, size: int) -> tuple[Tensor, Tensor]:
        """Image and text of each pair to be scored, `(size * g,)` of the groups, then those of the hard negatives.

        Raises ValueError for a batch that groups do not divide.
        """
        if size % self.group:
            raise ValueError(f"NegativesObjective: the batch must be a multiple of {self.group} items, got {size}")
        pair = torch.arange(size)
        first = pair // self.group * self.group
        images = [pair.repeat_interleave(self.group)]
        texts = [(first[:, None] + torch.arange(self.group)).flatten()]
        if self.negatives != "in_batch":
            images.append(pair)
            texts.append(pair + size)
        if self.negatives == "quads":
            images += [pair + size, pair + size]
            texts += [pair, pair + size]
        return torch.cat(images), torch.cat(texts)

    def loss(self, logits: Tensor, size: int) -> Tensor:
        """The loss of logits in the order of `rows`."""
        blocks = logits[: size * self.group].view(-1, self.group, self.group)  # (B / g, images, texts)
        own = torch.arange(self.group, device=logits.device).expand(len(blocks), self.group)
        hard = logits[size * self.group :].view(-1, size)
        by_image, by_text = blocks.transpose(1, 2), blocks  # classes stand in dimension 1
        if self.negatives == "captions":
            by_image = torch.cat([by_image, hard.view(-1, 1, self.group)], dim=1)
        loss = (functional.cross_entropy(by_image, own) + functional.cross_entropy(by_text, own)) / 2
        if self.negatives == "quads":
            matched = blocks.diagonal(dim1=1, dim2=2).reshape(1, size)
            loss = loss + quad_loss(torch.cat([matched, hard]).T.view(size, 2, 2))
        return loss
