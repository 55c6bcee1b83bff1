"""Full fine-tuning of the embedded encoder on quads: the arm that heads on frozen features are compared with.

Same quads, same losses, same loop as the heads; but every weight of the encoder is trained, and what is scored is the
cosine of the two global embeddings, as in Radford et al. 2021 (CLIP).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.encoders.scenes import ScenesEncoder, WordTokenizer, load_scenes, pixels_from_uint8, save_scenes
from engine.encoders.scenes_model import ScenesModel
from engine.heads.base import Trainable
from engine.scenes.items import ControlledItem
from engine.training.heads import WANTED, BatchLoss, Evaluate, HeadTrainConfig, Report, train_head
from engine.training.losses import contrastive_loss, quad_loss


class Captions(NamedTuple):
    """Token ids `(B, T)` and the position of the end token `(B,)`."""

    ids: Tensor
    end: Tensor

    def to(self, device: torch.device | str) -> Captions:
        """The same on `device`."""
        return Captions(self.ids.to(device), self.end.to(device))


class WholeEncoder(Trainable):
    """Both towers of a `scenes` model, all of whose weights are trained."""

    name: ClassVar[str] = "finetune"

    def __init__(self, encoder: ScenesEncoder) -> None:
        super().__init__()
        # A copy: the encoder that was given stays as it is.
        self.model = ScenesModel(encoder.model_config)
        self.model.load_state_dict(encoder.state_dict())
        self.words = encoder.tokenizer.words
        self.config = encoder.model_config
        self.fingerprint = encoder.spec.fingerprint

    def forward(self, pixels: Tensor, captions: Captions) -> Tensor:
        """Cosines `(n_images, n_texts)` of pixels `(B, 3, S, S)` and captions."""
        tower = self.model.image
        f = functional.normalize(tower.projection(tower.norm(tower.class_state(pixels))).float(), dim=-1)
        g = functional.normalize(self.model.embed_texts(*captions).float(), dim=-1)
        return f @ g.T

    def scale(self) -> Tensor:
        """The model's own logit scale, trained on; at most 200."""
        return self.model.log_scale.exp().clamp(max=200.0)

    def encoder(self) -> ScenesEncoder:
        """An encoder with a copy of the weights as they are now."""
        model = ScenesModel(self.config)
        model.load_state_dict(self.model.state_dict())
        return ScenesEncoder(model, self.words, name="scenes, fine-tuned", device=torch.device("cpu"))

    def save(self, path: str | PathLike[str], *, facts: Mapping[str, object] | None = None) -> Path:
        """Write `model.safetensors` and `model.json` beside `path`; the folder, for `scenes:<folder>`.

        How it was trained stands in the log: the files have no place for `facts`.
        """
        folder = Path(path).parent
        save_scenes(folder, self.model, self.words)
        return folder


@dataclass(frozen=True)
class PixelQuads:
    """Quads as pixels and tokens, drawn anew for each batch.

    Attributes:
        items: the quads.
        tokenizer: of the encoder.
    """

    items: tuple[ControlledItem, ...]
    tokenizer: WordTokenizer
    source: str = ""

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, items: Tensor) -> tuple[Tensor, Captions]:
        """Pixels `(2B, 3, S, S)` and captions: first of the pairs, then of their hard negatives."""
        chosen = [self.items[item] for item in items.tolist()]
        pictures = np.stack([item.images() for item in chosen])  # (B, 2, S, S, 3)
        tokens = self.tokenizer([item.captions[k] for k in range(2) for item in chosen])
        length = int(tokens.end.max()) + 1
        ordered = torch.from_numpy(np.concatenate([pictures[:, 0], pictures[:, 1]]))
        return pixels_from_uint8(ordered), Captions(tokens.ids[:, :length], tokens.end)


def objective(config: HeadTrainConfig, *, images_per_item: int = 2) -> Any:
    """The loss that `config` names, over the full matrix of a batch of B items; by default quads."""

    if config.batch_until != 1:
        raise ValueError(f"finetune: batch_until must be 1, got {config.batch_until}: both losses are of one matrix")

    def loss(encoder: Any, pixels: Tensor, captions: Captions) -> Tensor:
        size = len(pixels) // images_per_item
        logits = encoder.scale() * encoder(pixels, captions)  # (2B, 2B) of quads
        if config.loss != "quads":
            images, texts = WANTED[config.loss]
            return contrastive_loss(logits[: images * size, : texts * size])
        # Blocks of the matrix: image side, item, text side, item; a quad lies within one item.
        quads = logits.view(2, size, 2, size).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
        found = quad_loss(quads)
        if config.batch_weight:
            found = found + config.batch_weight * contrastive_loss(logits[:size, :size])
        return found

    return loss


def finetune(
    items: list[ControlledItem],
    config: HeadTrainConfig,
    *,
    model: str | PathLike[str] | None = None,
    evaluate: Evaluate | None = None,
    report: Report | None = None,
) -> Path:
    """Fine-tune all of a `scenes` model, or go on with it; the folder of the weights.

    Args:
        items: quads, such as `ScenesQuads.draw` gives.
        config: as for `train_head`; its output folder also holds `model.safetensors` and `model.json`.
        model: folder of the model to begin with; None takes the embedded one.
        evaluate: gets the `WholeEncoder`, whose `encoder()` can be given to an `Engine`.
        report: as for `train_head`.

    Raises what `train_head` raises.
    """
    config = config.fitted(2, 2)
    encoder = load_scenes(model)
    data = PixelQuads(tuple(items), encoder.tokenizer)
    return train_head(
        WholeEncoder(encoder),
        data,
        config,
        objective=BatchLoss(objective(config), whole_batch=True),
        evaluate=evaluate,
        report=report,
    )
