"""The network of the embedded `scenes` model: a small ViT and a causal text transformer.

Both towers are pre-norm transformers whose blocks are written out with plain matrix products, so that every
hidden state has a name and the whole model can be read in one file. The class token of the image tower and the
end token of the text tower, normalised and projected, are the global embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.encoders.windows import class_rows_attention


@dataclass(frozen=True)
class ScenesModelConfig:
    """Sizes of both towers. Everything a checkpoint needs to be rebuilt, besides its words.

    Raises:
        ValueError: a size that is no positive integer, and for sizes that do not divide.
    """

    image_size: int = 96
    """Pixels along one side of a picture."""
    patch_size: int = 16
    """Pixels along one side of a patch."""
    width: int = 128
    """Channels of both towers."""
    heads: int = 4
    """Attention heads of every block."""
    image_layers: int = 6
    """Blocks of the image tower."""
    text_layers: int = 8
    """Blocks of the text tower."""
    stem_width: int = 192
    """Channels of the stem, which makes patches of pixels."""
    embed_dim: int = 128
    """Dimensions of the space that pictures and texts share."""
    context_length: int = 40
    """Positions of a text, its start and its end included."""
    vocabulary: int = 256
    """Rows of the word embedding; at least the number of words and of special ones."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"ScenesModelConfig: {name} must be a positive integer, got {value!r}")
        if self.context_length < 3:
            raise ValueError(
                "ScenesModelConfig: context_length must hold start, end and a word, at least 3, got "
                f"{self.context_length}"
            )
        for whole, part in (("width", "heads"), ("image_size", "patch_size")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"ScenesModelConfig: {whole} must be a multiple of {part}, got {getattr(self, whole)} and "
                    f"{getattr(self, part)}"
                )
        if self.patch_size % 4:
            raise ValueError(f"ScenesModelConfig: patch_size must be a multiple of 4, got {self.patch_size}")

    @property
    def side(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size


class Block(nn.Module):
    """Pre-norm attention and MLP with residuals, `(B, T, width)` to the same."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        # Residual branches start small, so that the sum over the depth keeps its variance.
        for linear in (self.out, self.down):
            nn.init.normal_(linear.weight, std=0.02 / (2 * layers) ** 0.5)
        for linear in (self.qkv, self.up):
            nn.init.normal_(linear.weight, std=width**-0.5)
        for linear in (self.qkv, self.out, self.up, self.down):
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`bias` is added to the attention logits: `(T, T)` or broadcastable to `(B, heads, T, T)`."""
        x = x + self.attention(self.norm_attention(x), bias)
        return x + self.down(functional.hardswish(self.up(self.norm_mlp(x))))

    def attention(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Self-attention of normalised states `(B, T, width)`; `bias` as for `forward`."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        return self.out(self.mix(qkv, bias).reshape(batch, length, width))

    def mix(self, qkv: Tensor, bias: Tensor | None = None) -> Tensor:
        """What each position reads of all: `(B, T, 3, heads, width / heads)` to `(B, T, heads, width / heads)`."""
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width / heads)
        # Plain products: on CPUs they beat scaled_dot_product_attention's bfloat16 backward.
        logits = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)  # (B, heads, T, T)
        if bias is not None:
            logits = logits + bias
        return (logits.softmax(dim=-1) @ v).transpose(1, 2)

    def with_windows(self, x: Tensor, windows: Tensor, grid: tuple[int, int], *, rows_alone: bool) -> Tensor:
        """`forward` of a sequence that ends with a class row for each of `windows (B, W, 4)`.

        Each row sees the patches inside its window and itself; no other position sees it. `rows_alone`: only
        the rows are wanted, and come back.
        """
        batch, length, width = x.shape
        first = length - windows.shape[1]
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = class_rows_attention(qkv, windows.shape[1], windows, grid)
        if rows_alone:
            x = x[:, first:]
        else:
            mixed = torch.cat([self.mix(qkv[:, :first]), mixed], dim=1)
        x = x + self.out(mixed.flatten(2))
        return x + self.down(functional.hardswish(self.up(self.norm_mlp(x))))

    def at(self, x: Tensor, position: Tensor, *, causal: bool = False) -> Tensor:
        """`forward(x)` at one `position (B,)` of each row alone, `(B, width)`: one asks, all answer.

        `causal`: it does not look at what follows it.
        """
        batch, length, width = x.shape
        rows = torch.arange(batch, device=x.device)
        looked_at = self.norm_attention(x)
        (w_q, w_kv), (b_q, b_kv) = (part.split((width, 2 * width)) for part in (self.qkv.weight, self.qkv.bias))
        q = functional.linear(looked_at[rows, position], w_q, b_q).view(batch, self.heads, 1, -1)
        kv = functional.linear(looked_at, w_kv, b_kv).view(batch, length, 2, self.heads, -1)
        k, v = kv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width / heads)
        logits = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)  # (B, heads, 1, T)
        if causal:
            later = torch.arange(length, device=x.device) > position[:, None]
            logits = logits.masked_fill(later[:, None, None], float("-inf"))
        mixed = logits.softmax(dim=-1) @ v
        x = x[rows, position] + self.out(mixed.reshape(batch, width))
        return x + self.down(functional.hardswish(self.up(self.norm_mlp(x))))

    def value_path(self, x: Tensor) -> Tensor:
        """What attention would add to each position if it looked at itself alone, `(B, T, width)`."""
        width = x.shape[-1]
        weight, bias = self.qkv.weight[2 * width :], self.qkv.bias[2 * width :]
        return self.out(functional.linear(self.norm_attention(x), weight, bias))


class ImageTower(nn.Module):
    """Pixels `(B, 3, S, S)` to states `(B, 1 + P, width)`: the class token, then the patches row by row."""

    def __init__(self, config: ScenesModelConfig) -> None:
        super().__init__()
        self.grid = (config.side, config.side)
        # Small strokes first, then windows that reach half a patch beyond the patch: an object that lies across
        # the border of two patches is seen whole by one of them.
        stroke = config.patch_size // 4
        self.strokes = nn.Conv2d(3, 32, stroke, stride=stroke)
        self.stem_in = nn.Conv2d(32, config.stem_width, 6, stride=4, padding=1)
        self.stem_out = nn.Linear(config.stem_width, config.width)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, config.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + config.side**2, config.width))
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, config.image_layers) for _ in range(config.image_layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.projection = nn.Linear(config.width, config.embed_dim, bias=False)

    def last_value_path(self, x: Tensor) -> Tensor:
        """`Block.value_path` of the last block, `(B, T, width)`, from its input."""
        return last_block(self.blocks).value_path(x)

    def embed(self, pixels: Tensor) -> Tensor:
        """Pixels `(B, 3, S, S)` as the first block's input `(B, 1 + P, width)`, class token first."""
        strokes = functional.hardswish(self.strokes(pixels))  # (B, 32, S / 4, S / 4) at 16-pixel patches
        patches = functional.hardswish(self.stem_in(strokes)).flatten(2).transpose(1, 2)  # (B, P, stem)
        states = self.stem_out(patches)
        states = torch.cat([self.class_token.expand(pixels.shape[0], -1, -1), states], dim=1)
        return states + self.positions

    def forward(self, pixels: Tensor, layers: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor], Tensor]:
        """Final states, hidden ones of the 1-indexed `layers`, and the input of the last block: `(B, 1 + P, width)`."""
        x = self.embed(pixels)
        hidden: dict[int, Tensor] = {}
        before_last = x
        for layer, block in enumerate(self.blocks, start=1):
            before_last = x
            x = block(x)
            if layer in layers:
                hidden[layer] = x
        return x, hidden, before_last

    def class_state(self, pixels: Tensor) -> Tensor:
        """The final state of the class token, `(B, width)`, as `forward` has it, for less work."""
        x = self.embed(pixels)
        for block in self.blocks[:-1]:
            x = block(x)
        first = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        return last_block(self.blocks).at(x, first)

    def window_states(self, pixels: Tensor, windows: Tensor) -> Tensor:
        """Final states `(B, W, width)` of a class token for each of `windows (B, W, 4)`, in cells of the grid.

        The token of a window over the whole grid ends as `class_state` does.
        """
        x = self.embed(pixels)
        x = torch.cat([x, x[:, :1].expand(-1, windows.shape[1], -1)], dim=1)
        for layer, block in enumerate(self.blocks, start=1):
            assert isinstance(block, Block)
            x = block.with_windows(x, windows, self.grid, rows_alone=layer == len(self.blocks))
        return x


class TextTower(nn.Module):
    """Token ids `(B, T)` to states `(B, T, width)`; causal, so what follows the end token changes nothing."""

    def __init__(self, config: ScenesModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Parameter(0.01 * torch.randn(config.context_length, config.width))
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, config.text_layers) for _ in range(config.text_layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.projection = nn.Linear(config.width, config.embed_dim, bias=False)

    def forward(self, ids: Tensor, layers: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Final states before the last norm, and hidden states of the 1-indexed `layers`: `(B, T, width)`."""
        length = ids.shape[1]
        x = self.embedding(ids) + self.positions[:length]
        causal = x.new_full((length, length), float("-inf")).triu(1)
        hidden: dict[int, Tensor] = {}
        for layer, block in enumerate(self.blocks, start=1):
            x = block(x, causal)
            if layer in layers:
                hidden[layer] = x
        return x, hidden

    def end_state(self, ids: Tensor, end: Tensor) -> Tensor:
        """The final state at the end token, `(B, width)`, as `forward` has it, for less work."""
        length = ids.shape[1]
        x = self.embedding(ids) + self.positions[:length]
        causal = x.new_full((length, length), float("-inf")).triu(1)
        for block in self.blocks[:-1]:
            x = block(x, causal)
        return last_block(self.blocks).at(x, end, causal=True)


class ScenesModel(nn.Module):
    """Both towers and the learned logit scale (stored as its logarithm)."""

    def __init__(self, config: ScenesModelConfig, *, logit_scale: float = 14.0) -> None:
        super().__init__()
        self.config = config
        self.image = ImageTower(config)
        self.text = TextTower(config)
        self.log_scale = nn.Parameter(torch.tensor(logit_scale).log())

    def embed_texts(self, ids: Tensor, end: Tensor) -> Tensor:
        """Global embeddings `(B, D)`, not normalised; `end (B,)` is the position of the end token."""
        return self.text.projection(self.text.norm(self.text.end_state(ids, end)))


def last_block(blocks: nn.ModuleList) -> Block:
    """The last block of a tower."""
    block = blocks[-1]
    assert isinstance(block, Block)
    return block
