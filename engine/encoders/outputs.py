"""Similarities as the logits or probabilities that a checkpoint was trained to give."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from engine.choices import check_choice
from engine.encoders.base import EncoderSpec

Output = Literal["similarity", "logit", "probability"]


def check_output(who: str, spec: EncoderSpec, output: str, *, pairs: bool) -> None:
    """Raise ValueError for an unknown output, or one that these scores cannot be."""
    check_choice(who, "output", output, get_args(Output))
    if pairs and output == "probability" and spec.probability == "softmax":
        raise ValueError(
            f"{who}: a softmax probability is one among several texts and pairs have one each; use "
            "pairs=False, or output='logit'"
        )


def as_output(spec: EncoderSpec, similarity: Tensor, output: Output) -> Tensor:
    """`similarity (n_images, n_texts)` or `(n,)` as it is, as `scale * similarity + bias`, or as probabilities.

    The latter are a softmax over the texts of each image, or the sigmoid of each logit, as the checkpoint was trained.
    """
    if output == "similarity":
        return similarity
    logits = spec.logit_scale * similarity + spec.logit_bias
    if output == "logit":
        return logits
    return logits.softmax(dim=1) if spec.probability == "softmax" else logits.sigmoid()
