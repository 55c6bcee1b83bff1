"""Regions as windows in open_clip's image towers: class rows through a CLIP ViT, the pool of SigLIP and PE.

A CLIP ViT is walked block by block with a class row for each window. A tower that pools by attention mixes its
patches as always, and its pool's query looks at one window of them; where a class token stands before the patches
(PE), every window's pool sees it too, as the pool of the whole picture does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.encoders.windows import attend_windows, class_rows_attention

Windows = Callable[[Tensor, Tensor], Tensor]


def class_token_windows(visual: Any) -> Windows | None:
    """For open_clip's own ViT: None where it does not pool its class token, or has attention of its own kind."""
    blocks = visual.transformer.resblocks
    plain = all(type(block.attn) is nn.MultiheadAttention and not hasattr(block, "ln_1_kv") for block in blocks)
    if visual.attn_pool is not None or visual.pool_type != "tok" or not plain:
        return None
    grid = (int(visual.grid_size[0]), int(visual.grid_size[1]))

    def windows(pixels: Tensor, boxes: Tensor) -> Tensor:
        n_rows = boxes.shape[1]
        x = visual._embeds(pixels)
        x = torch.cat([x, x[:, :1].expand(-1, n_rows, -1)], dim=1)
        for block in blocks:
            x = x + block.ls_1(_attention(block.attn, block.ln_1(x), boxes, grid))
            x = x + block.ls_2(block.mlp(block.ln_2(x)))
        states = visual.ln_post(x[:, x.shape[1] - n_rows :])
        return states if visual.proj is None else states @ visual.proj

    return windows


def _attention(attention: Any, x: Tensor, windows: Tensor, grid: tuple[int, int]) -> Tensor:
    """`nn.MultiheadAttention` of a sequence that ends with a class row for each window."""
    batch, length, width = x.shape
    n_rows = windows.shape[1]
    qkv = functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    qkv = qkv.view(batch, length, 3, attention.num_heads, width // attention.num_heads)
    q, k, v = qkv[:, : length - n_rows].permute(2, 0, 3, 1, 4)  # each (B, H, T, hd)
    mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    rows = class_rows_attention(qkv, n_rows, windows, grid)
    # Rows of all pictures as one matrix, as the tower itself has it: in an exported folder both share the weight.
    return attention.out_proj(torch.cat([mixed, rows], dim=1).reshape(batch * length, width)).view(batch, length, width)


def pool_windows(visual: Any, trunk: Any) -> Windows | None:
    """For timm's towers: None where they do not pool by one latent query, or hold more than one prefix token."""
    from timm.layers import AttentionPoolLatent

    pool = getattr(trunk, "attn_pool", None)
    prefix = trunk.num_prefix_tokens
    if not isinstance(pool, AttentionPoolLatent) or pool.latent_len != 1 or prefix > 1:
        return None
    grid = (int(trunk.patch_embed.grid_size[0]), int(trunk.patch_embed.grid_size[1]))

    def windows(pixels: Tensor, boxes: Tensor) -> Tensor:
        pooled = _pool(pool, trunk.forward_features(pixels), boxes, grid, prefix)
        return visual.head(trunk.head(trunk.head_drop(trunk.fc_norm(pooled))))

    return windows


def _pool(pool: Any, states: Tensor, windows: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
    """timm's `AttentionPoolLatent` of each window, `(B, W, C)`."""
    batch, length, _ = states.shape
    n_windows = windows.shape[1]
    if pool.pos_embed is not None:
        states = states + pool.pos_embed.unsqueeze(0).to(states.dtype)
    q = pool.q_norm(pool.q(pool.latent).view(1, 1, pool.num_heads, pool.head_dim))
    k, v = pool.kv(states).view(batch, length, 2, pool.num_heads, pool.head_dim).unbind(2)
    k = pool.k_norm(k)
    of_windows = (batch, n_windows, pool.num_heads, pool.head_dim)
    before = {"own_k": k[:, :1].expand(of_windows), "own_v": v[:, :1].expand(of_windows)} if prefix else {}
    pooled = attend_windows(
        q.to(k.dtype).expand(of_windows), k[:, prefix:], v[:, prefix:], windows, grid=grid, **before
    )
    pooled = pool.proj_drop(pool.proj(pooled.flatten(2)))
    return pooled if pool.mlp is None else pooled + pool.mlp(pool.norm(pooled))
