"""How to read single positions of open_clip's image and text towers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engine.encoders.open_clip_windows import class_token_windows, pool_windows
from engine.encoders.towers import Tower, each_alone, readout_of


def image_tower(model: Any) -> Tower:
    """The image tower of an open_clip model: its own ViT, timm's (SigLIP, PE, EVA), else global only."""
    from open_clip.transformer import VisionTransformer

    visual = model.visual
    if isinstance(visual, VisionTransformer):
        return _own_vit(visual)
    trunk = getattr(visual, "trunk", None)
    if trunk is not None and _is_timm_vit(trunk):
        return _timm_vit(visual, trunk)
    # Residual networks, ConvNeXt, FastViT and the like have no patch sequence that ends in the text's space.
    return Tower()


def text_tower(model: Any) -> Tower:
    """The text tower of an open_clip model: its own transformer, else (Hugging Face towers) global only."""
    text = getattr(model, "text", model)
    if not hasattr(text, "ln_final"):
        return Tower()

    def project(states: Tensor) -> Tensor:
        states = text.ln_final(states)
        projection = text.text_projection
        if projection is None:
            return states
        return projection(states) if isinstance(projection, nn.Module) else states @ projection

    return Tower(
        blocks=text.transformer.resblocks,
        width=text.ln_final.weight.shape[0],
        project=project,
        readout=lambda: readout_of(text.ln_final, text.text_projection),
    )


def _own_vit(visual: Any) -> Tower:
    block = visual.transformer.resblocks[-1]

    def project(states: Tensor) -> Tensor:
        states = visual.ln_post(states)
        return states if visual.proj is None else states @ visual.proj

    def attend(states: Tensor) -> Tensor:
        states = block.ln_1(states)
        if isinstance(block.attn, nn.MultiheadAttention):
            return block.ls_1(block.attn(states, states, states, need_weights=False)[0])
        return block.ls_1(block.ln_attn(block.attn(states)))

    # CoCa pools by learned queries of their own space: no position of the tower ends in the text's.
    pooled = visual.attn_pool is not None
    return Tower(
        blocks=visual.transformer.resblocks,
        width=visual.transformer.width,
        project=None if pooled else project,
        attend=None if pooled else attend,
        prefix=1,
        grid=(visual.grid_size[0], visual.grid_size[1]),
        windows=class_token_windows(visual),
    )


def _is_timm_vit(trunk: nn.Module) -> bool:
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(trunk, Eva | VisionTransformer)


def _timm_vit(visual: Any, trunk: Any) -> Tower:
    def project(states: Tensor) -> Tensor:
        states = trunk.norm(states)
        if trunk.attn_pool is not None:
            states = each_alone(trunk.attn_pool, states)
        return visual.head(trunk.head(trunk.fc_norm(states)))

    return Tower(
        blocks=trunk.blocks,
        width=trunk.embed_dim,
        project=project,
        attend=_timm_attention(trunk.blocks[-1]),
        prefix=trunk.num_prefix_tokens,
        grid=tuple(trunk.patch_embed.grid_size),
        windows=pool_windows(visual, trunk),
    )


def _timm_attention(block: Any) -> Any:
    """The attention branch of a pre-norm block of timm; None for blocks of another order."""
    from timm.models.eva import EvaBlock
    from timm.models.vision_transformer import Block

    if isinstance(block, Block):
        return lambda states: block.ls1(block.attn(block.norm1(states)))
    if isinstance(block, EvaBlock):
        return lambda states: _scaled(block.gamma_1, block.attn(block.norm1(states)))
    return None


def _scaled(scale: Tensor | None, states: Tensor) -> Tensor:
    return states if scale is None else scale * states
