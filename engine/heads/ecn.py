"""PeakPatch's embedding correction: what a caption's middle layers still know is put back into its embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.choices import check_numbers
from engine.ops.peak_patch import AttentionPool, peak_patch_features
from engine.ops.peak_patch_correct import peak_patch_correct
from engine.reference.peak_patch import TokenNorm, at_end, normalised

ALPHA = 0.5


@dataclass(frozen=True)
class ECNConfig:
    """Sizes and layers of an `ECN`; 0 stands for what the encoder decides, see `PeakPatchConfig.fitted`.

    Raises ValueError for sizes below 0 or a dropout outside [0, 1).
    """

    width: int = 0
    """Hidden width W of the text tower."""
    embed_dim: int = 0
    """Width D of the shared space."""
    hidden: int = 0
    """Width of the two hidden layers of the correction of captions."""
    heads: int = 0
    """Heads of the attention pool; their number divides the width."""
    dropout: float = 0.1
    """Of the attention and after each hidden layer, while training."""
    peak: int = 0
    """Text layer, from 1, where contrasts are strongest."""
    anchor: int = 0
    """Another text layer, earlier in the paper."""
    use_anchor: bool = True
    """Read the anchor's end token (a switch of the ablation)."""
    use_pool: bool = True
    """Read the attention pool over the peak's tokens (a switch of the ablation)."""

    def __post_init__(self) -> None:
        check_sizes(self, ("width", "embed_dim", "hidden", "heads", "peak", "anchor"))

    @property
    def layers(self) -> tuple[int, ...]:
        """The text layers that are read, in order."""
        return tuple(sorted({self.peak, self.anchor} if self.use_anchor else {self.peak}))


class ECN(nn.Module):
    """The embedding correction network of Lu, Chen and Chaterji 2026 ("PeakPatch").

        corrected = unit(f + α · mlp([peak[end]; pool(peak); anchor[end]; mean of peak]))

    where `pool` is one learned query's attention over the caption's tokens. Tokens are hidden states; the
    encoder's final layer norm, given as `norm`, is applied on the way.
    """

    def __init__(self, config: ECNConfig) -> None:
        super().__init__()
        check_sizes(config, ("width", "embed_dim", "hidden", "heads"), least=1)
        if config.width % config.heads:
            raise ValueError(f"ECN: heads must divide width {config.width}, got {config.heads}")
        self.config = config
        width, hidden = config.width, config.hidden
        if config.use_pool:
            self.query = nn.Parameter(torch.empty(1, width))
            self.attention = nn.MultiheadAttention(width, config.heads, batch_first=True)
            self.pool_norm = nn.LayerNorm(width)
            nn.init.normal_(self.query, std=0.02)
        parts = 2 + config.use_pool + config.use_anchor
        self.mlp = nn.Sequential(
            nn.Linear(parts * width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(config.dropout),
            nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(config.dropout),
            nn.Linear(hidden, config.embed_dim),
        )  # fmt: skip
        linears = [module for module in self.mlp if isinstance(module, nn.Linear)]
        # Starts out as almost no correction at all.
        for linear in linears:
            nn.init.normal_(linear.weight, std=0.02 if linear is not linears[-1] else 0.001)
            nn.init.zeros_(linear.bias)
        self.log_alpha = nn.Parameter(torch.tensor(ALPHA).log())

    def features(
        self, peak: Tensor, anchor: Tensor, norm: TokenNorm, *, mask: Tensor, end: Tensor, backend: str | None = None
    ) -> Tensor:
        """What the network reads of captions, `(B, parts · W)`.

        Args:
            peak: hidden states `(B, T, W)` of the peak layer, before the final norm.
            anchor: those of the anchor layer, `(B, T, W)`, or `(B, W)` at `end`; unused without the anchor.
            norm: the encoder's final layer norm.
            mask: bool `(B, T)`, True = start, words and end.
            end: int64 `(B,)`, position of the end token.
            backend: of the op.
        """
        if not self.config.use_anchor:
            anchor = at_end(peak, end)
        if self.config.use_pool:
            pool = AttentionPool.of(self.query, self.attention, self.pool_norm)
            dropout = self.config.dropout if self.training else 0.0
            found = peak_patch_features(
                peak, anchor, pool, mask=mask, end=end, norm=norm, dropout=dropout, backend=backend
            )
            at_peak, pooled, at_anchor, mean = found.chunk(4, dim=1)
            parts = [at_peak, pooled, at_anchor, mean]
        else:
            tokens = normalised(peak, norm)
            kept = mask[..., None]
            mean = tokens.masked_fill(~kept, 0).sum(1) / kept.sum(1).clamp(min=1)
            parts = [at_end(tokens, end), normalised(at_end(anchor, end), norm), mean]
        if not self.config.use_anchor:
            parts.pop(-2)
        return torch.cat(parts, dim=1)

    def delta(
        self, peak: Tensor, anchor: Tensor, norm: TokenNorm, *, mask: Tensor, end: Tensor, backend: str | None = None
    ) -> Tensor:
        """The correction `(B, D)` before it is scaled by α; arguments as for `features`."""
        return self.mlp(self.features(peak, anchor, norm, mask=mask, end=end, backend=backend))

    def correct(self, f: Tensor, delta: Tensor, *, backend: str | None = None) -> Tensor:
        """Embeddings `f (B, D)` moved by `delta (B, D)` and put back on the sphere, float32."""
        return peak_patch_correct(f, delta, self.log_alpha.exp(), backend=backend)


def check_sizes(config: object, names: Sequence[str], *, least: int = 0) -> None:
    """Raise ValueError for a named field that is no integer from `least` up, or a dropout outside [0, 1)."""
    check_numbers(config, integers=dict.fromkeys(names, least))
    dropout = getattr(config, "dropout", 0.0)
    if not 0 <= dropout < 1:
        raise ValueError(f"{type(config).__name__}: dropout must be at least 0 and below 1, got {dropout}")
