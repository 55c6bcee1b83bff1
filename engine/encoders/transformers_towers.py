"""How to read single positions of the CLIP, SigLIP and SigLIP 2 towers of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.encoders.towers import Tower, each_alone, readout_of


def image_tower(model: Any, grid: tuple[int, int] | None) -> Tower:
    """The image tower; `grid` is None where each image has its own (SigLIP 2 at native aspect ratio)."""
    vision = model.vision_model
    clip = hasattr(model, "visual_projection")
    layer = vision.encoder.layers[-1]

    def project(states: Tensor) -> Tensor:
        states = vision.post_layernorm(states)
        return model.visual_projection(states) if clip else each_alone(vision.head, states)

    def attend(states: Tensor) -> Tensor:
        return layer.self_attn(hidden_states=layer.layer_norm1(states), attention_mask=None)[0]

    return Tower(
        blocks=vision.encoder.layers,
        width=vision.config.hidden_size,
        project=project,
        attend=attend,
        prefix=1 if clip else 0,
        grid=grid,
    )


def text_tower(model: Any) -> Tower:
    """The text tower."""
    text = model.text_model
    head = model.text_projection if hasattr(model, "text_projection") else text.head

    def project(states: Tensor) -> Tensor:
        return head(text.final_layer_norm(states))

    return Tower(
        blocks=text.encoder.layers,
        width=text.config.hidden_size,
        project=project,
        readout=lambda: readout_of(text.final_layer_norm, head),
    )
