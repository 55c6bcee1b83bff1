"""Heads as graphs: what each side is read into, and what is made of a pair; the rest of a head stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.encoders.onnx_graph import BATCH
from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import Head, shipped_head
from engine.heads.ecn import ECN
from engine.heads.inputs import kept_tokens, patch_states, token_states, unit
from engine.heads.max_sim_head import MaxSimHead
from engine.heads.neighbourhood import Neighbourhood
from engine.heads.pair_transformer import PairTransformer, Side
from engine.heads.peak_patch import PeakPatch
from engine.heads.registry import load_head
from engine.heads.scn import SCN
from engine.heads.tfglobal import TFGlobal
from engine.heads.tflocal import TFLocal
from engine.ops.peak_patch import AttentionPool, folded_keys

LENGTH = "length"
Axes = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True)
class HeadPart:
    """One graph of a head: its name, a module of tensors, examples, names of outputs and of free dimensions."""

    name: str
    module: nn.Module
    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    axes: Axes


def find_head(name: str, fingerprint: str) -> Head:
    """A head by its file, or one that is shipped for the embedded model by its name.

    Raises FileNotFoundError, and ValueError for a head of another encoder.
    """
    path = Path(name)
    return load_head(path if path.is_file() or path.suffix else shipped_head(name), fingerprint=fingerprint)


def head_parts(who: str, head: Head, images: ImageFeatures, texts: TextFeatures) -> list[HeadPart]:
    """The graphs of a head, with features of the same number of images and texts as examples.

    Raises ValueError for a kind of head that has none.
    """
    if isinstance(head, TFLocal):
        like, patches = head.transformer.score_token, head.config.grid[0] * head.config.grid[1]
        states = patch_states(images, head.config.image_layers, patches, like)
        seen, _ = kept_tokens(texts)
        tokens = token_states(texts, head.config.text_layers, like)
        sides = _PairSide(head.transformer, image=True, around=head.around), _PairSide(head.transformer, image=False)
        return _pair_parts(head.name, sides, states, tokens, seen)
    if isinstance(head, TFGlobal):
        image, text = images.embedding[:, None], texts.embedding[:, None]
        sides = _PairSide(head.transformer, image=True), _PairSide(head.transformer, image=False)
        return _pair_parts(head.name, sides, image, text, torch.ones(len(texts), 1, dtype=torch.bool))
    if isinstance(head, MaxSimHead):
        return _max_sim_parts(head, images, texts)
    if isinstance(head, PeakPatch):
        return _peak_patch_parts(head, images, texts)
    raise ValueError(
        f"{who}: heads of kind max_sim_head, peakpatch, tflocal and tfglobal are exported, got {head.name}, which "
        "needs no graph: score with it as it is"
    )


class _PairSide(nn.Module):
    """One side of a `PairTransformer`, after the neighbourhood where there is one: states to what its layers read."""

    def __init__(self, transformer: PairTransformer, *, image: bool, around: Neighbourhood | None = None) -> None:
        super().__init__()
        self.transformer, self.image, self.around = transformer, image, around

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        if self.around is not None:
            states = self.around(states)
        # The mask only passes through.
        kept = torch.ones(1, 1, dtype=torch.bool)
        side = (self.transformer.image_side if self.image else self.transformer.text_side)(states, kept)
        return side.x, side.qkv


class _Pairs(nn.Module):
    """A score for each pair of sides."""

    def __init__(self, transformer: PairTransformer) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, *sides: Tensor) -> tuple[Tensor]:
        return (self.transformer.pairs(Side(*sides[:3]), Side(*sides[3:])),)


def _pair_parts(
    name: str, sides: tuple[_PairSide, _PairSide], image: Tensor, text: Tensor, seen: Tensor
) -> list[HeadPart]:
    """Of TFLocal and TFGlobal: each side alone, and the pairs; a text is as long as the longest beside it."""
    parts: list[HeadPart] = []
    pairs: dict[str, tuple[Tensor, Mapping[int, str]]] = {}
    whole = torch.ones(image.shape[:2], dtype=torch.bool)
    for side, module, states, kept in (("image", sides[0], image, whole), ("text", sides[1], text, seen)):
        free = {0: BATCH} if side == "image" else {0: BATCH, 1: LENGTH}
        outputs = ("x", "qkv")
        parts.append(
            HeadPart(f"{name}_{side}", module, {"states": states}, outputs, dict.fromkeys(("states", *outputs), free))
        )
        with torch.no_grad():
            x, qkv = module(states)
        pairs |= {f"{side}.x": (x, free), f"{side}.qkv": (qkv, free), f"{side}.kept": (kept, free)}
    axes = {port: free for port, (_, free) in pairs.items()} | {"scores": {0: BATCH}}
    inputs = {port: value for port, (value, _) in pairs.items()}
    return [*parts, HeadPart(f"{name}_pairs", _Pairs(sides[0].transformer), inputs, ("scores",), axes)]


class _MaxSimImage(nn.Module):
    """Patch states to patch vectors."""

    def __init__(self, head: MaxSimHead) -> None:
        super().__init__()
        self.side = head.image_side

    def forward(self, states: Tensor) -> tuple[Tensor]:
        return (unit(self.side(states)),)


class _MaxSimText(nn.Module):
    """Token states and masks to word vectors, their gates, and which words count."""

    def __init__(self, head: MaxSimHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, states: Tensor, seen: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.head.read_tokens(states, seen, words)


def _max_sim_parts(head: MaxSimHead, images: ImageFeatures, texts: TextFeatures) -> list[HeadPart]:
    patches = patch_states(images, head.config.image_layers, head.patches, head.gate.weight)
    seen, words = kept_tokens(texts)
    inputs = {"states": token_states(texts, head.config.text_layers, head.gate.weight), "seen": seen, "words": words}
    outputs = ("vectors", "gates", "kept")
    batch, free = {0: BATCH}, {0: BATCH, 1: LENGTH}
    return [
        HeadPart(
            f"{head.name}_image", _MaxSimImage(head), {"states": patches}, ("vectors",),
            {"states": batch, "vectors": batch},
        ),
        HeadPart(f"{head.name}_text", _MaxSimText(head), inputs, outputs, dict.fromkeys((*inputs, *outputs), free)),
    ]  # fmt: skip


class _Pool(nn.Module):
    """`peak_patch_features`'s attention of one query, its products with weights alone made beforehand."""

    keys: Tensor
    to_value: Tensor
    value_bias: Tensor

    def __init__(self, ecn: ECN) -> None:
        super().__init__()
        pool = AttentionPool.of(ecn.query, ecn.attention, ecn.pool_norm)
        width = ecn.config.width
        bias = torch.zeros(3 * width) if pool.in_bias is None else pool.in_bias.detach()
        to_value = pool.in_weight.detach()[2 * width :].view(pool.heads, -1, width)
        self.register_buffer("keys", folded_keys(pool, torch.float32).detach().T.contiguous())
        self.register_buffer("to_value", to_value.transpose(1, 2).contiguous())
        self.register_buffer("value_bias", bias[2 * width :].clone())
        self.out, self.norm = ecn.attention.out_proj, ecn.pool_norm

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """`(B, W)` of normalised tokens `(B, T, W)`, zero where they are masked."""
        scores = (tokens @ self.keys).transpose(1, 2).masked_fill(~mask[:, None], -torch.inf)  # (B, heads, T)
        # Of a caption with nothing kept the softmax is no number, which the mask takes away again.
        attention = scores.softmax(dim=-1).masked_fill(~mask[:, None], 0)
        pooled = (attention @ tokens).transpose(0, 1)  # (heads, B, W)
        values = (pooled @ self.to_value).transpose(0, 1).flatten(1)
        return self.norm(self.out(values + mask.any(1, keepdim=True) * self.value_bias))


class _Captions(nn.Module):
    """PeakPatch's captions: embedding, mask, end and layers to the corrected embedding and the earlier one.

    The same as `PeakPatch.captions`, in torch's own operations: those of the package have no graph.
    """

    def __init__(self, head: PeakPatch, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.config, self.layers = head.config, layers
        self.norm = nn.LayerNorm(head.config.width, eps=head.config.norm_eps)
        self.norm.load_state_dict({"weight": head.norm_weight, "bias": head.norm_bias})
        self.project = nn.Linear(head.config.width, head.config.embed_dim)
        self.project.load_state_dict({"weight": head.projection, "bias": head.projection_bias})
        self.ecn, self.with_low = head.ecn, head.scn is not None
        self.pool = _Pool(head.ecn) if head.ecn is not None and head.config.use_pool else None

    def forward(self, embedding: Tensor, mask: Tensor, end: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        hidden = dict(zip(self.layers, states, strict=True))
        found = [embedding]
        if self.ecn is not None:
            delta = self.ecn.mlp(self._features(hidden, mask, end))
            found = [functional.normalize(embedding + self.ecn.log_alpha.exp() * delta, dim=-1)]
        if self.with_low:
            low = self.project(self.norm(_at(hidden[self.config.low], end)))
            found.append(functional.normalize(low, dim=-1))
        return tuple(found)

    def _features(self, hidden: Mapping[int, Tensor], mask: Tensor, end: Tensor) -> Tensor:
        config, kept = self.config, mask[..., None]
        peak = hidden[config.peak]
        tokens = self.norm(peak.masked_fill(~kept, 0)).masked_fill(~kept, 0)
        mean = tokens.sum(1) / kept.sum(1).clamp(min=1)
        parts = [self.norm(_at(peak, end))]
        if self.pool is not None:
            parts.append(self.pool(tokens, mask))
        if config.use_anchor:
            parts.append(self.norm(_at(hidden[config.anchor], end)))
        return torch.cat([*parts, mean], dim=1)


def _at(states: Tensor, end: Tensor) -> Tensor:
    """States `(B, T, W)` at positions `end (B,)`."""
    return states.gather(1, end[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)


class _Step(nn.Module):
    """PeakPatch's score correction of images `(N, D)` and captions `(N, K, D)`, or `(1, K, D)` for all of them."""

    def __init__(self, scn: SCN) -> None:
        super().__init__()
        self.scn = scn

    def forward(self, image: Tensor, text: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        of_text = self.scn.text(torch.cat([low, text], dim=-1))
        v, t, early = (functional.normalize(x, dim=-1) for x in (image[:, None], text, low))
        cross = v * t
        sims = torch.stack([(v * early).sum(-1), cross.sum(-1)], dim=-1)
        of_text = of_text.expand(cross.shape[0], -1, -1)
        found = self.scn.head(torch.cat([sims, of_text, self.scn.cross(cross)], dim=-1)).squeeze(-1)
        return sims[..., 1], self.scn.config.bound * found.tanh()


def _peak_patch_parts(head: PeakPatch, images: ImageFeatures, texts: TextFeatures) -> list[HeadPart]:
    head.check_texts(texts)
    assert texts.attention_mask is not None and texts.end is not None  # `check_texts` has seen to it
    layers = head.needs().text_layers
    inputs = {"embedding": texts.embedding, "mask": texts.attention_mask, "end": texts.end}
    inputs |= {f"hidden.{layer}": texts.hidden[layer] for layer in layers}
    outputs = ("text",) if head.scn is None else ("text", "low")
    captions = _Captions(head, layers)
    both = {port: {0: BATCH, 1: LENGTH} for port in inputs if port == "mask" or port.startswith("hidden")}
    axes = {port: both.get(port, {0: BATCH}) for port in (*inputs, *outputs)}
    parts = [HeadPart(f"{head.name}_text", captions, inputs, outputs, axes)]
    if head.scn is not None:
        with torch.no_grad():
            text, low = captions(*inputs.values())
        own = {0: "own", 1: "captions"}
        sides = {"image": images.embedding, "text": text[None], "low": low[None]}
        free = {"image": {0: BATCH}, "text": own, "low": own}
        found = {"cosine": {0: BATCH, 1: "captions"}, "correction": {0: BATCH, 1: "captions"}}
        parts.append(HeadPart(f"{head.name}_pairs", _Step(head.scn), sides, tuple(found), {**free, **found}))
    return parts
