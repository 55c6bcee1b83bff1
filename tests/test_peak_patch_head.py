"""The PeakPatch head: sizes of the paper, equality with plain torch, switches, storage, and other encoders."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from engine.encoders.base import EncoderSpec
from engine.encoders.scenes import ScenesEncoder
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.features import ImageFeatures, TextFeatures, TextReadout
from engine.heads.ecn import ECN, ECNConfig
from engine.heads.peak_patch import PeakPatch, PeakPatchConfig
from engine.heads.registry import load_head
from engine.heads.scn import SCN, SCNConfig
from tests.fake_encoder import FakeEncoder

W, D, T = 24, 16, 7


def spec(**changes: object) -> EncoderSpec:
    facts = {"name": "vit", "fingerprint": "f1", "embed_dim": D, "text_width": W, "text_layers": 12}
    return replace(FakeEncoder().spec, **{**facts, **changes})


def readout(width: int = W, dim: int = D) -> TextReadout:
    return TextReadout(torch.rand(width) + 0.5, torch.randn(width), torch.randn(dim, width))


def texts(n: int = 5, layers: tuple[int, ...] = (6, 7, 8)) -> TextFeatures:
    end = torch.arange(n) % (T - 2) + 1
    return TextFeatures(
        functional.normalize(torch.randn(n, D), dim=-1),
        attention_mask=torch.arange(T) <= end[:, None],
        end=end,
        hidden={layer: torch.randn(n, T, W) for layer in layers},
        texts=tuple(f"caption {i}" for i in range(n)),
        fingerprint="f1",
    )


def images(n: int = 4) -> ImageFeatures:
    return ImageFeatures(functional.normalize(torch.randn(n, D), dim=-1), fingerprint="f1")


def head(**options: object) -> PeakPatch:
    made = PeakPatch.build(spec(), PeakPatchConfig(heads=4, **options), seed=1)
    made.take_readout(readout())
    with torch.no_grad():
        # The last layers start near zero: without this no difference could be seen.
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return made.eval()


def plain_scores(made: PeakPatch, v: torch.Tensor, captions: TextFeatures) -> torch.Tensor:
    """The paper's formulas with torch modules only, caption by caption and pair by pair."""
    config, out = made.config, made.readout
    f = captions.embedding
    if made.ecn is not None:
        rows = []
        for row in range(len(captions)):
            end = int(captions.end[row])
            peak = out.normalised(captions.hidden[config.peak][row, : end + 1])
            anchor = out.normalised(captions.hidden[config.anchor][row, end])
            parts = [peak[end]]
            if config.use_pool:
                query = made.ecn.query[None]
                pooled, _ = made.ecn.attention(query, peak[None], peak[None])
                parts.append(made.ecn.pool_norm(pooled[0, 0]))
            if config.use_anchor:
                parts.append(anchor)
            parts.append(peak.mean(0))
            rows.append(made.ecn.mlp(torch.cat(parts)[None])[0])
        f = functional.normalize(f + made.ecn.log_alpha.exp() * torch.stack(rows), dim=-1)
    if made.scn is None:
        return v @ f.T
    low = torch.stack([out.embed(captions.hidden[config.low][row, captions.end[row]]) for row in range(len(captions))])
    scores = torch.empty(len(v), len(f))
    for i in range(len(v)):
        for j in range(len(f)):
            context = [made.scn.text(torch.cat([low[j], f[j]])[None]), made.scn.cross((v[i] * f[j])[None])]
            sims = torch.stack([v[i] @ low[j], v[i] @ f[j]])[None]
            step = made.scn.head(torch.cat([sims, *context], dim=1))
            scores[i, j] = v[i] @ f[j] + config.bound * torch.tanh(step)[0, 0]
    return scores


def test_the_sizes_are_those_of_the_paper():
    clip = spec(embed_dim=512, text_width=512)
    config = PeakPatchConfig().fitted(clip)
    assert (config.peak, config.anchor, config.low, config.heads) == (8, 6, 7, 8)
    assert sum(p.numel() for p in ECN(config).parameters()) == 4_728_833
    assert sum(p.numel() for p in SCN(config).parameters()) == 493_825
    assert PeakPatch.build(clip).parameter_count == 5_222_658


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("parts", ["both", "ecn", "scn"])
@pytest.mark.parametrize("switches", [{}, {"use_anchor": False}, {"use_pool": False}])
def test_scores_equal_plain_torch(parts, switches, backend):
    made, v, captions = head(parts=parts, **switches), images(), texts()
    with torch.no_grad():
        wanted = plain_scores(made, v.embedding, captions)
        found = made.score_all(v, captions, backend=backend)
        pairs = made.score_pairs(v, captions[:4], backend=backend)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pairs, wanted.diagonal(), rtol=1e-4, atol=1e-5)


def test_gradients_equal_plain_torch():
    made, v, captions = head(), images(), texts()
    weights = torch.randn(4, 5)
    found = torch.autograd.grad((made.matrix(v, captions) * weights).sum(), list(made.parameters()))
    wanted = torch.autograd.grad((plain_scores(made, v.embedding, captions) * weights).sum(), list(made.parameters()))
    for (name, _), mine, theirs in zip(made.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_switches_leave_parameters_and_layers_out():
    whole, no_anchor, no_pool = head(), head(use_anchor=False, parts="ecn"), head(use_pool=False)
    assert no_pool.parameter_count == whole.parameter_count - W * 2 * W - (4 * W * W + 4 * W) - W - 2 * W
    assert whole.needs().text_layers == (6, 7, 8) and no_anchor.needs().text_layers == (8,)
    assert head(parts="scn").needs().text_layers == (7,)


def test_matrix_in_blocks_is_the_matrix(monkeypatch):
    made, v, captions = head(), images(), texts()
    with torch.no_grad():
        whole = made.matrix(v, captions)
        monkeypatch.setattr("engine.heads.peak_patch._BLOCK_VALUES", 1)
        torch.testing.assert_close(made.matrix(v, captions), whole)


def test_a_new_head_changes_next_to_nothing():
    made, v, captions = PeakPatch.build(spec()).eval(), images(), texts()
    made.take_readout(readout())
    assert (made.matrix(v, captions) - v.embedding @ captions.embedding.T).abs().max() < 0.02


def test_dropout_is_for_training_alone():
    made, v, captions = head(), images(), texts()
    torch.testing.assert_close(made.matrix(v, captions), made.matrix(v, captions), rtol=0, atol=0)
    made.train()
    assert not torch.equal(made.matrix(v, captions), made.matrix(v, captions))


def test_the_correction_is_bounded_and_the_embedding_unit():
    made, v, captions = head(bound=0.05), images(), texts(4)
    found = made.correct_pairs(v, captions)
    assert found.correction.abs().max() < 0.05
    corrected = made.corrected(captions)
    torch.testing.assert_close(corrected.embedding.norm(dim=1), torch.ones(4))
    torch.testing.assert_close((v.embedding * corrected.embedding).sum(1), found.cosine[:, 0])
    assert corrected.texts == captions.texts


def test_a_stored_head_is_the_head(tmp_path, monkeypatch):
    made, v, captions = head(use_anchor=False), images(), texts()
    made.save(tmp_path / "head.safetensors", facts={"steps": 3})
    again = load_head(tmp_path / "head.safetensors", fingerprint="f1")
    assert isinstance(again, PeakPatch) and again.config == made.config
    torch.testing.assert_close(again.matrix(v, captions), made.matrix(v, captions), rtol=0, atol=0)
    with pytest.raises(ValueError, match="must come from the encoder the head was trained on, vit"):
        again.matrix(v, replace(captions, fingerprint="another"))


def test_the_readout_reads_the_embedding_off_the_last_layer():
    torch.manual_seed(0)
    model = ScenesModel(ScenesModelConfig(width=32, heads=2, image_layers=1, text_layers=3, stem_width=8, embed_dim=24))
    encoder = ScenesEncoder(model, ("a", "red", "circle"), name="tiny", device=torch.device("cpu"))
    found = encoder.encode_texts(["a red circle", "red"], layers=(1, 3))
    states = found.hidden[3][torch.arange(2), found.end]
    torch.testing.assert_close(encoder.text_readout().embed(states), found.embedding)
    made = PeakPatch.build(encoder.spec)
    made.take_readout(encoder.text_readout())
    torch.testing.assert_close(made.readout.embed(states), found.embedding)


def test_a_readout_with_bias_or_without_projection():
    states = torch.randn(3, W)
    given = readout()._replace(projection_bias=torch.randn(D))
    wanted = functional.layer_norm(states, (W,), given.norm_weight, given.norm_bias) @ given.projection.T
    made = head()
    made.take_readout(given)
    torch.testing.assert_close(made.readout.embed(states), functional.normalize(wanted + given.projection_bias, dim=-1))
    square = PeakPatch.build(spec(embed_dim=W))
    square.take_readout(readout()._replace(projection=None, norm_eps=1e-3))
    assert square.config.norm_eps == 1e-3
    torch.testing.assert_close(square.readout.embed(states).norm(dim=1), torch.ones(3))


def test_what_is_refused():
    with pytest.raises(ValueError, match="was not given its encoder's readout; call take_readout"):
        PeakPatch.build(spec()).matrix(images(), texts())
    with pytest.raises(ValueError, match=r"readout must map 24 numbers to 16, got \(24, 8\)"):
        head().take_readout(readout(dim=8))
    with pytest.raises(ValueError, match="texts must hold end, got None"):
        head().matrix(images(), replace(texts(), end=None))
    with pytest.raises(ValueError, match="needs text layer 8, which the features do not hold"):
        head().matrix(images(), texts(layers=(6, 7)))
    with pytest.raises(ValueError, match="as many images as texts, got 4 images and 5 texts"):
        head().pairs(images(), texts())
    with pytest.raises(ValueError, match="parts must be one of 'both', 'ecn', 'scn', got 'all'"):
        PeakPatchConfig(parts="all")
    with pytest.raises(ValueError, match="peak must be a text layer, 1 to 12, got 13"):
        PeakPatchConfig(peak=13).fitted(spec())
    with pytest.raises(ValueError, match="width must be vit's 24, got 32"):
        PeakPatchConfig(width=32).fitted(spec())
    with pytest.raises(ValueError, match="needs the layers of a text tower, vit gives none"):
        PeakPatchConfig().fitted(spec(text_layers=0))
    with pytest.raises(ValueError, match="ECN: heads must divide width 24, got 5"):
        ECN(ECNConfig(width=24, embed_dim=8, hidden=8, heads=5))
    with pytest.raises(ValueError, match="SCNConfig: context must be at least 1, got 0"):
        SCN(SCNConfig(embed_dim=4, score_hidden=4))
    for bound in (0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"PeakPatchConfig: bound must be finite and above 0, got {bound}"):
            PeakPatchConfig(bound=bound)
    with pytest.raises(ValueError, match="norm_eps must be finite, at least 0, got nan"):
        PeakPatchConfig(norm_eps=math.nan)
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1, got 1"):
        PeakPatchConfig(dropout=1)
    with pytest.raises(ValueError, match="hidden must be at least 0, got -1"):
        PeakPatchConfig(hidden=-1)
