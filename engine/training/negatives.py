"""Losses for a comparison of negatives: the same batches of items, only what a score is held against differs.

Image i and text i belong together, n is the hard negative of i (`engine.training.head_data`):

    in_batch:  images and texts of a group of g items against each other, symmetric InfoNCE over g × g scores
    captions:  each image against its own hard negative caption, cross-entropy over {i, n}
    quads:     both choices within each 2 × 2 quad, cross-entropy over {i, n} of texts and of images

So g, 2 or 4 pairs are scored for each item; groups keep that in bounds for heads that run once for each pair. The loss
of the groups may be added to the other two.
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
from engine.training.losses import quad_loss, quad_rows

Negatives = Literal["in_batch", "captions", "quads"]
NEGATIVES: tuple[Negatives, ...] = get_args(Negatives)


@dataclass(frozen=True)
class NegativesObjective:
    """The loss of one batch of B quads; for `train_head(objective=...)`.

    Attributes:
        negatives: what a pair is held against.
        group: items g that are negatives of each other; must divide B.
        batch_weight: of the groups' loss, where it is added to that of captions or quads.
    """

    negatives: Negatives
    group: int = 8
    batch_weight: float = 0.0

    def __post_init__(self) -> None:
        check_choice("NegativesObjective", "negatives", self.negatives, NEGATIVES)
        if self.group < 2 or self.batch_weight < 0:
            raise ValueError(
                "NegativesObjective: group must be at least 2 and batch_weight at least 0, got "
                f"{self.group} and {self.batch_weight}"
            )

    @property
    def grouped(self) -> bool:
        """Whether items of a group are held against each other."""
        return self.negatives == "in_batch" or self.batch_weight > 0

    def __call__(self, head: Head, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """The loss of a head on features as `HeadData.batch` orders them: B pairs, then their B hard negatives."""
        size = len(images) // 2
        return self.loss(head.scale() * head.chosen(images, texts, *self.rows(size)), size)

    def of_encoder(self, encoder: WholeEncoder, pixels: Tensor, captions: Captions) -> Tensor:
        """The same loss of a whole encoder, on a batch of `PixelQuads`."""
        size = len(pixels) // 2
        image_rows, text_rows = self.rows(size)
        # What is not scored is not encoded: in-batch and caption negatives need the first picture of each quad only.
        used = pixels[: int(image_rows.max()) + 1], Captions(*(part[: int(text_rows.max()) + 1] for part in captions))
        return self.loss(encoder.scale() * encoder(*used)[image_rows, text_rows], size)

    def rows(self, size: int) -> tuple[Tensor, Tensor]:
        """Image and text of each pair to be scored: those of groups, then those with hard negatives, item by item.

        Raises ValueError for a batch that groups do not divide.
        """
        if self.grouped and size % self.group:
            raise ValueError(f"NegativesObjective: the batch must be a multiple of {self.group} items, got {size}")
        pair = torch.arange(size)
        images, texts = [], []
        if self.grouped:
            first = pair // self.group * self.group
            images.append(pair.repeat_interleave(self.group))
            texts.append((first[:, None] + torch.arange(self.group)).flatten())
        if self.negatives != "in_batch":
            own, other = (rows.view(size, 2, 2) for rows in quad_rows(pair, pair + size))
            choices = 2 if self.negatives == "quads" else 1
            images.append(own[:, :choices].flatten())
            texts.append(other[:, :choices].flatten())
        return torch.cat(images), torch.cat(texts)

    def loss(self, logits: Tensor, size: int) -> Tensor:
        """The loss of logits in the order of `rows`."""
        grouped, hard = logits.split([size * self.group if self.grouped else 0, self._hard_pairs * size])
        loss = logits.new_zeros(())
        if self.negatives == "quads":
            loss = quad_loss(hard.view(size, 2, 2))
        elif self.negatives == "captions":
            loss = functional.cross_entropy(hard.view(size, 2), hard.new_zeros(size, dtype=torch.long))
        if not self.grouped:
            return loss
        blocks = grouped.view(-1, self.group, self.group)  # (B / g, images, texts)
        own = torch.arange(self.group, device=logits.device).expand(len(blocks), self.group)
        # The choices stand in dimension 1.
        by_image, by_text = functional.cross_entropy(blocks.transpose(1, 2), own), functional.cross_entropy(blocks, own)
        in_batch = (by_image + by_text) / 2
        return in_batch if self.negatives == "in_batch" else loss + self.batch_weight * in_batch

    @property
    def _hard_pairs(self) -> int:
        """Pairs of each item that have a hard negative at their side."""
        return {"in_batch": 0, "captions": 2, "quads": 4}[self.negatives]
