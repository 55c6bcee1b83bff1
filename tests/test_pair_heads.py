"""TFLocal, TFGlobal and the linear alignment: sizes, plain forms, what they may and may not see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.heads.linear import LinearAlignment
from engine.heads.pair_transformer import PairSizes, PairTransformer, parameter_count
from engine.heads.registry import HEADS
from engine.heads.tfglobal import TFGlobal, TFGlobalConfig
from engine.heads.tflocal import TFLocal, TFLocalConfig
from engine.heads.window_head import WindowHead
from tests.head_cases import FACTS, Facts, make_images, make_texts

PAGE = (Path(__file__).parent.parent / "docs" / "heads.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class ViTB32(Facts):
    """The widths of CLIP's ViT-B/32."""

    name: str = "ViT-B-32"
    fingerprint: str = "b32"
    embed_dim: int = 512
    grid: tuple[int, int] | None = (7, 7)
    image_layers: int = 12
    text_layers: int = 12
    image_width: int = 768
    text_width: int = 512


def test_tflocal_has_the_papers_size_at_the_widths_of_vit_b_32():
    with torch.device("meta"):
        head = TFLocal(TFLocalConfig().fitted(ViTB32()))
    assert head.parameter_count == 13_268_993 == parameter_count(head.config.sizes)
    assert (head.config.width, head.config.heads, head.config.mlp) == (512, 8, 2048)
    assert (head.config.image_layers, head.config.text_layers) == ((12,), (12,))


@pytest.mark.parametrize(
    ("kind", "count"),
    [("max_sim_head", 663_298), ("tfglobal", 13_137_921), ("linear", 262_145), ("window_head", 33_511_424)],
)
def test_the_others_have_the_sizes_that_the_docs_give(kind, count):
    with torch.device("meta"):
        head = (HEADS | {"window_head": WindowHead})[kind].build(ViTB32(), seed=0)
    assert head.parameter_count == count
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` | ") and line.endswith("yes |"))
    assert f"{count:,}" in row


@pytest.mark.parametrize("sizes", [PairSizes(5, 7, 8, 1, 2, 12), PairSizes(16, 16, 64, 3, 1, 100)])
def test_the_count_is_that_of_the_module(sizes):
    assert sum(weight.numel() for weight in PairTransformer(sizes).parameters()) == parameter_count(sizes)


def sequence(body: PairTransformer, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """What the layers read of one pair, ``(1, 1 + P + T, width)``: the score token, patches, tokens."""
    return torch.cat(
        [
            body.score_token[0],
            body.image_in(functional.layer_norm(image, image.shape[-1:])) + body.sides[0],
            body.text_in(functional.layer_norm(text, text.shape[-1:])) + body.sides[1],
        ]
    )[None]


def twins(body: PairTransformer) -> Iterator[nn.TransformerEncoderLayer]:
    """Torch's own encoder layers with the same weights."""
    for layer in body.layers:
        twin = nn.TransformerEncoderLayer(
            body.sizes.width,
            body.sizes.heads,
            body.sizes.mlp,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        names = {
            "self_attn.in_proj_weight": layer.qkv.weight,
            "self_attn.in_proj_bias": layer.qkv.bias,
            "self_attn.out_proj.weight": layer.out.weight,
            "self_attn.out_proj.bias": layer.out.bias,
            "linear1.weight": layer.up.weight,
            "linear1.bias": layer.up.bias,
            "linear2.weight": layer.down.weight,
            "linear2.bias": layer.down.bias,
            "norm1.weight": layer.norm_attention.weight,
            "norm1.bias": layer.norm_attention.bias,
            "norm2.weight": layer.norm_mlp.weight,
            "norm2.bias": layer.norm_mlp.bias,
        }
        twin.load_state_dict(names)
        yield twin


def plain(body: PairTransformer, image: torch.Tensor, text: torch.Tensor) -> float:
    """One pair through torch's own encoder layers with the same weights."""
    x = sequence(body, image, text)
    for twin in twins(body):
        x = twin(x)
    return float(body.score(body.norm(x[0, 0])))


def test_tflocal_is_a_plain_transformer_over_each_pair():
    head = TFLocal.build(FACTS, TFLocalConfig(layers=2, width=16, heads=2)).eval()
    images, texts = make_images(2), make_texts(3)
    expected = torch.zeros(2, 3)
    with torch.no_grad():
        for i in range(2):
            for j in range(3):
                text = texts.hidden[2][j][texts.attention_mask[j]]
                expected[i, j] = plain(head.transformer, images.hidden[2][i, 1:], text)
        torch.testing.assert_close(head.matrix(images, texts), expected, rtol=1e-4, atol=1e-5)


def test_a_patch_is_read_with_those_within_reach_and_no_others():
    head = TFLocal.build(FACTS, TFLocalConfig(layers=1, width=16, heads=2, reach=1)).eval()
    assert head.around is not None and TFLocal.build(FACTS).around is None
    seen: list[torch.Tensor] = []
    head.around.register_forward_hook(lambda module, inputs, output: seen.append(output))
    images, texts = make_images(1), make_texts(2)
    states = images.hidden[2].clone()
    states[:, 1] += torch.arange(16.0)  # the patch in the first row and column of 2 × 3
    before, after = head.matrix(images, texts), head.matrix(replace(images, hidden={2: states}), texts)
    changed = (seen[0] - seen[1]).abs().amax(dim=-1)[0] > 1e-6
    assert changed.tolist() == [True, True, False] * 2
    assert (before - after).abs().max() > 1e-6
    with pytest.raises(ValueError, match="TFLocalConfig: reach must be at least 0, got -1"):
        TFLocalConfig(reach=-1)


def test_bfloat16_is_attended_as_float32_is():
    head = TFLocal.build(FACTS, TFLocalConfig(layers=2, width=16, heads=2)).eval()
    images, texts = make_images(3), make_texts(4)
    expected = head.matrix(images, texts)
    with torch.autocast("cpu", torch.bfloat16):
        found = head.matrix(images, texts)
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_blocks_of_pairs_change_nothing(monkeypatch):
    head = TFLocal.build(FACTS, TFLocalConfig(layers=2)).eval()
    images, texts = make_images(3), make_texts(4)
    whole = head.matrix(images, texts)
    seen: list[int] = []
    pairs = head.transformer.pairs
    monkeypatch.setattr("engine.heads.pair_transformer.BLOCK_VALUES", 2 * 13 * 64)
    monkeypatch.setattr(head.transformer, "pairs", lambda a, b: (seen.append(len(a.x)), pairs(a, b))[1])
    torch.testing.assert_close(head.matrix(images, texts), whole, rtol=1e-5, atol=1e-6)
    assert seen == [2] * 6


def test_each_side_is_projected_once_whatever_the_pairs():
    head = TFLocal.build(FACTS, TFLocalConfig(layers=2)).eval()
    counts: list[int] = []
    head.transformer.image_in.register_forward_hook(lambda module, inputs, output: counts.append(len(output)))
    images, texts = make_images(3), make_texts(4)
    scores = head.matrix(images, texts)
    rows, columns = torch.tensor([2, 0, 2]), torch.tensor([3, 1, 0])
    torch.testing.assert_close(head.chosen(images, texts, rows, columns), scores[rows, columns], rtol=1e-5, atol=1e-6)
    assert counts == [3, 3]


def test_padding_is_not_seen_and_the_class_token_neither():
    head = TFLocal.build(FACTS).eval()
    images, texts = make_images(2), make_texts(3)
    noisy = replace(
        texts, hidden={k: torch.where(texts.attention_mask[..., None], v, 50.0) for k, v in texts.hidden.items()}
    )
    classless = {k: torch.cat([torch.full_like(v[:, :1], 9.0), v[:, 1:]], dim=1) for k, v in images.hidden.items()}
    expected = head.matrix(images, texts)
    torch.testing.assert_close(head.matrix(replace(images, hidden=classless), noisy), expected, rtol=1e-5, atol=1e-6)


def test_tfglobal_sees_the_embeddings_alone():
    head = TFGlobal.build(FACTS).eval()
    images, texts = make_images(2), make_texts(3)
    other = replace(images, hidden={k: v + 1 for k, v in images.hidden.items()}, patches=images.patches.flip(1))
    assert torch.equal(head.matrix(other, texts), head.matrix(images, texts))
    assert head.needs() == type(head.needs())()
    tall = TFGlobal.build(FACTS, TFGlobalConfig(layers=2, width=24, heads=3, mlp=30))
    assert tall.transformer.sizes == PairSizes(12, 12, 24, 2, 3, 30)


def test_attention_goes_from_words_to_patches():
    head = TFLocal.build(FACTS, TFLocalConfig(layers=2)).eval()
    images, texts = make_images(3), make_texts(3)
    found = head.attention(images, texts)
    assert found.shape == (3, 5, 6)
    assert bool((found >= 0).all()) and bool((found.sum(dim=-1) < 1).all()) and float(found.detach().sum()) > 0


def test_attention_is_that_of_torchs_own_layers():
    head = TFLocal.build(FACTS, TFLocalConfig(layers=2, width=16, heads=2)).eval()
    with torch.no_grad():
        # As drawn, queries and keys are small and everyone looks everywhere alike.
        for layer in head.transformer.layers:
            layer.qkv.weight.mul_(3)
    images, texts = make_images(3), make_texts(3)
    found = head.attention(images, texts)
    for row in range(3):
        text = texts.hidden[2][row][texts.attention_mask[row]]
        x = sequence(head.transformer, images.hidden[2][row, 1:], text)
        shares = torch.zeros(len(text), 6)
        for twin in twins(head.transformer):
            seen = twin.norm1(x)
            _, weights = twin.self_attn(seen, seen, seen, need_weights=True)  # (1, 7 + T, 7 + T), mean over heads
            # Rows ask: those of the text, after the score token and 6 patches.
            shares += weights[0, 7:, 1:7] / 2
            x = twin(x)
        assert shares.std() > 0.01
        torch.testing.assert_close(found[row, : len(text)], shares, rtol=1e-4, atol=1e-6)


def test_linear_alignment_starts_as_the_cosine_and_is_the_formula():
    head = LinearAlignment.build(FACTS).eval()
    images, texts = make_images(3), make_texts(4)
    torch.testing.assert_close(head.matrix(images, texts), images.embedding @ texts.embedding.T)
    assert head.parameter_count == FACTS.embed_dim**2 + 1 and float(head.scale().detach()) == pytest.approx(1.0)
    with torch.no_grad():
        head.a.copy_(torch.randn(12, 12))
    for i in range(3):
        for j in range(4):
            turned = head.a @ texts.embedding[j]
            expected = images.embedding[i] @ turned / turned.norm()
            torch.testing.assert_close(head.matrix(images, texts)[i, j], expected)
    # The paper's size at the widths of ViT-B/32.
    assert LinearAlignment.build(ViTB32()).a.numel() == 262_144


@pytest.mark.parametrize("make", [lambda: TFLocalConfig(width=12, heads=5), lambda: TFLocalConfig(layers=0)])
def test_sizes_that_do_not_fit_are_refused(make):
    with pytest.raises(ValueError, match="needs at least one layer and a width that is a multiple of heads, got"):
        TFLocal.build(FACTS, make())


def test_tfglobal_refuses_sizes_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"TFGlobalConfig: needs at least one layer .* got 0 layers, width 16, 1 heads"
    ):
        TFGlobal.build(FACTS, TFGlobalConfig(layers=0))
