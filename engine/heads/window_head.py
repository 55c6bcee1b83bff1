"""The window head: embeddings of all regions of an image from one pass of its encoder.

A region that is cut out and encoded on its own costs a pass of the tower. This head reads the patch states of one pass
over the whole picture, and for each region asks them, in a few cross-attention blocks, what the encoder would have made
of that region alone, at its native scale:

    x = seed + W_g · geometry(box)
    x = x + attention(norm(x), patches of the box and x itself);   x = x + mlp(norm(x))      for each block
    region = unit(W_o · norm(x))

Each block reads the states of one layer. Where the encoder gives its class token's way through its blocks, the head
begins as a copy of that (`take_path`): the class token, kept to a window. It is trained by regression on such
embeddings (`engine.training.windows`); the attention is `engine.ops.window_attention`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.choices import check_choice, check_numbers
from engine.features import ClassPath, ImageFeatures
from engine.heads.base import EncoderFacts, HeadConfig, StoredHead, check_belongs
from engine.heads.inputs import check_grid, chosen_layers, encoder_sizes, grid_of, patch_states, unit
from engine.ops.window_attention import window_attention

Activation = Literal["gelu", "quick_gelu", "hard_swish"]
Start = Literal["copy", "random"]
ACTIVATIONS = {
    "gelu": functional.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "hard_swish": functional.hardswish,
}
# Waves of each coordinate of a box, besides the coordinate itself.
_WAVES = 3
# A box that has less than this of a patch's width (or height) is not said to hold it: of the border pixels alone
# nothing can be told.
_LEAST_SHARE = 0.125


@dataclass(frozen=True)
class WindowHeadConfig(HeadConfig):
    """Sizes of a `WindowHead`."""

    layers: tuple[int, ...] = ()
    """Image blocks, from 1, each read by a block of the head in turn; none takes the four before the last."""
    heads: int = 0
    """Attention heads of each block; 0 takes those that are copied, else one for 64 channels, four at least."""
    hidden: int = 0
    """Width inside the MLPs; 0 takes that of what is copied, else four times that of the states."""
    activation: Activation = "gelu"
    """Of the MLPs."""
    start: Start = "copy"
    """copy begins as the class token's own way through the encoder, where that can be had; random does not."""
    dropout: float = 0.0
    """Of the patch states while training."""
    image_width: int = 0
    """Width of the encoder's image states, and of the head; 0 takes the encoder's."""
    embed_dim: int = 0
    """Width of the encoder's embeddings; 0 takes its own."""
    grid: tuple[int, ...] = ()
    """Rows and columns of the encoder's patches; none takes its own."""

    def __post_init__(self) -> None:
        check_choice("WindowHeadConfig", "activation", self.activation, get_args(Activation))
        check_choice("WindowHeadConfig", "start", self.start, get_args(Start))
        sizes = ("heads", "hidden", "image_width", "embed_dim")
        check_numbers(self, integers=dict.fromkeys(sizes, 0) | {"layers": 1, "grid": 1})
        check_grid("WindowHeadConfig", self.grid)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"WindowHeadConfig: dropout must be from 0 to below 1, got {self.dropout}")
        if self.heads and self.image_width % self.heads:
            raise ValueError(
                f"WindowHeadConfig: image_width must be a multiple of heads, got {self.image_width} and {self.heads}"
            )

    def fitted(self, encoder: EncoderFacts) -> WindowHeadConfig:
        """Layers and sizes of the encoder where none were given. Raises ValueError for one without a patch grid."""
        who, depth = WindowHead.name, encoder.image_layers
        default = tuple(range(max(1, depth - 4), depth)) or (depth,)
        width, grid = encoder.image_width, grid_of(who, encoder)
        heads = max(4, width // 64)
        sizes = {"image_width": width, "embed_dim": encoder.embed_dim, "grid": grid}
        return replace(
            self,
            layers=chosen_layers(who, "image", self.layers, default, depth),
            heads=self.heads or (1 if width % heads else heads),
            hidden=self.hidden or 4 * width,
            **encoder_sizes(who, encoder, self, sizes),
        )


class WindowBlock(nn.Module):
    """One query a window attends to the window's patches and to itself; then an MLP. `(B, R, W)` to the same.

    The block of a pre-norm vision transformer, as its class token uses it, with weights of its own for the patches.
    """

    def __init__(self, config: WindowHeadConfig) -> None:
        super().__init__()
        width = config.image_width
        self.heads = config.heads
        self.activation = ACTIVATIONS[config.activation]
        self.norm_patches = nn.LayerNorm(width)
        self.patches = nn.Linear(width, 2 * width)
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, config.hidden)
        self.down = nn.Linear(config.hidden, width)

    def forward(self, x: Tensor, states: Tensor, windows: Tensor, grid: tuple[int, int]) -> Tensor:
        """`states (B, P, W)` of the patches, `windows` int32 `(B, R, 4)` in cells of the grid."""
        (batch, rows, width), heads = x.shape, self.heads
        q, own_k, own_v = self.qkv(self.norm_attention(x)).view(batch, rows, 3, heads, width // heads).unbind(2)
        kv = self.patches(self.norm_patches(states)).view(batch, states.shape[1], 2, heads, width // heads)
        k, v = kv.unbind(2)
        mixed = window_attention(q, k, v, windows, grid=grid, own_k=own_k, own_v=own_v)
        x = x + self.out(mixed.flatten(2))
        return x + self.down(self.activation(self.up(self.norm_mlp(x))))

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Begin as a block of the encoder, see `ClassPath`."""
        width = self.out.out_features
        state = {name: weights[name] for name in self.state_dict() if name in weights}
        for part in ("weight", "bias"):
            state[f"norm_patches.{part}"] = weights[f"norm_attention.{part}"]
            state[f"patches.{part}"] = weights[f"qkv.{part}"][width:]
        self.load_state_dict(state)


class WindowHead(StoredHead):
    """Embeddings of regions, in the space of the encoder's own, from the patch states of one pass.

    Args:
        config: fitted to an encoder.
        encoder, fingerprint: the encoder it belongs to.
    """

    name: ClassVar[str] = "window_head"
    config_type = WindowHeadConfig
    config: WindowHeadConfig

    def __init__(self, config: WindowHeadConfig, *, encoder: str = "", fingerprint: str = "") -> None:
        super().__init__(config, encoder=encoder, fingerprint=fingerprint)
        width = config.image_width
        self.dropout = nn.Dropout(config.dropout)
        self.seed = nn.Parameter(0.02 * torch.randn(width))
        self.geometry = nn.Linear(6 * (1 + 2 * _WAVES), width)
        self.blocks = nn.ModuleList(WindowBlock(config) for _ in config.layers)
        self.norm = nn.LayerNorm(width)
        self.outward = nn.Linear(width, config.embed_dim)

    def take_path(self, path: ClassPath, seed: Tensor) -> None:
        """Begin as the class token's own way through the tower, which is left untouched.

        Args:
            path: the blocks that follow each of `layers`, and what makes an embedding of their last state.
            seed: `(W,)`, the state of a class token before them, such as the mean over some pictures.

        Raises ValueError for weights of other sizes.
        """
        config = self.config
        width = config.image_width
        wanted = (len(config.layers), config.heads, config.hidden, config.activation, (config.embed_dim, width))
        found = (len(path.blocks), path.heads, path.hidden, path.activation, tuple(path.projection.shape))
        if wanted != found:
            raise ValueError(
                f"{self.name}: the path must have blocks, heads, hidden, activation and projection of {wanted}, got "
                f"{found}; a start of its own (start='random') may have other sizes"
            )
        with torch.no_grad():
            for block, weights in zip(self.blocks, path.blocks, strict=True):
                assert isinstance(block, WindowBlock)
                block.take(weights)
            self.seed.copy_(seed)
            self.norm.weight.copy_(path.norm_weight)
            self.norm.bias.copy_(path.norm_bias)
            self.outward.weight.copy_(path.projection)
            # What a box's place and size change is learned from nothing.
            for tensor in (self.outward.bias, self.geometry.weight, self.geometry.bias):
                tensor.zero_()

    @property
    def layers(self) -> tuple[int, ...]:
        """Image layers whose states `regions` reads."""
        return self.config.layers

    @property
    def tag(self) -> str:
        """Name of this very head: its kind and a digest of its weights. Regions of equal tags were made alike."""
        digest = hashlib.sha256(repr(self.config).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().float().numpy().tobytes())
        return f"{self.name}-{digest.hexdigest()[:12]}"

    def check_belongs(self, who: str, fingerprint: str) -> None:
        """Raise ValueError when this is the fingerprint of another encoder than the head's."""
        check_belongs(who, self, fingerprint)

    def regions(self, images: ImageFeatures, boxes: Tensor) -> Tensor:
        """Embeddings `(B, R, D)`, unit norm, float32, of boxes of pictures; differentiable with respect to the head.

        A box over all that the patches cover has the picture's global embedding, as it is.

        Args:
            images: features with hidden states of `layers`, and `views`.
            boxes: integers `(B, R, 4)`, half-open pixel rectangles x0, y0, x1, y1 of the upright image.

        Raises ValueError for features of another encoder, or without what is read.
        """
        check_belongs(f"{self.name}: the images", self, images.fingerprint)
        absent = [f"image layer {layer}" for layer in self.layers if layer not in images.hidden]
        absent += ["views"] if images.views is None else []
        if absent:
            raise ValueError(f"{self.name}: needs {', '.join(absent)}, which the features do not hold")
        assert images.views is not None
        rows, columns = self.config.grid
        places = box_cells(boxes, images.views, (rows, columns))  # (B, R, 4), float32
        states = [patch_states(images, [layer], rows * columns, self.seed) for layer in self.layers]
        found = self(states, places)
        whole = (places == places.new_tensor([0, 0, columns, rows])).all(dim=2, keepdim=True)
        return torch.where(whole, images.embedding[:, None].float(), found)

    def forward(self, states: Sequence[Tensor], places: Tensor) -> Tensor:
        """Embeddings `(B, R, D)` of `places (B, R, 4)`, boxes in cells of the grid.

        `states` are those of the patches for each of `layers`: `(B, P, W)`.
        """
        rows, columns = self.config.grid
        windows = cells_within(places, (rows, columns))
        x = self.seed + self.geometry(_waves(places, (rows, columns)).to(self.seed))
        for block, patches in zip(self.blocks, states, strict=True):
            x = block(x, self.dropout(patches), windows, (rows, columns))
        return unit(self.outward(self.norm(x)))


def box_cells(boxes: Tensor, views: Tensor, grid: tuple[int, int]) -> Tensor:
    """Pixel boxes `(B, R, 4)` in cells of the grid that covers `views (B, 4)`: float32, cut to the grid.

    >>> box_cells(torch.tensor([[[24, 0, 72, 96]]]), torch.tensor([[0, 0, 96, 96]]), (6, 6))
    tensor([[[1.5000, 0.0000, 4.5000, 6.0000]]])
    """
    origin = views[:, None, [0, 1, 0, 1]].double()
    extent = (views[:, None, [2, 3, 2, 3]] - views[:, None, [0, 1, 0, 1]]).double()
    sides = torch.tensor([grid[1], grid[0]] * 2, dtype=torch.float64, device=boxes.device)
    cells = (boxes.double() - origin) * sides / extent
    return cells.clamp(min=0).minimum(sides).float()


def cells_within(places: Tensor, grid: tuple[int, int]) -> Tensor:
    """The patches that a box touches, int32 `(B, R, 4)`: all it has at least an eighth of, in width and in height.

    A box too narrow to have any gets the one that holds its middle.

    >>> cells_within(torch.tensor([[[1.5, 0.0, 4.5, 2.05]]]), (6, 6)).tolist()
    [[[1, 0, 5, 2]]]
    """
    sides = torch.tensor([grid[1], grid[0]], device=places.device)
    low, high = places[..., :2], places[..., 2:]
    first, end = (low + _LEAST_SHARE).floor(), (high - _LEAST_SHARE).ceil()
    middle = ((low + high) / 2).floor().minimum(sides - 1)
    empty = end <= first
    first, end = torch.where(empty, middle, first), torch.where(empty, middle + 1, end)
    return torch.cat([first, end], dim=-1).to(torch.int32)


def _waves(places: Tensor, grid: tuple[int, int]) -> Tensor:
    """Edges and extents of boxes as shares of the grid, with sines and cosines of them: `(B, R, 6 (1 + 2 · waves))`."""
    sides = torch.tensor([grid[1], grid[0]] * 2, dtype=places.dtype, device=places.device)
    edges = places / sides
    shares = torch.cat([edges, edges[..., 2:] - edges[..., :2]], dim=-1)
    angles = shares[..., None] * (math.pi * 2.0 ** torch.arange(_WAVES, device=places.device))
    return torch.cat([shares, angles.sin().flatten(-2), angles.cos().flatten(-2)], dim=-1)
