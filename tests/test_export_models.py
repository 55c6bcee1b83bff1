"""Encoders of open_clip and transformers exported: true layer types at tiny widths, and ViT-B/32 as it is."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.encoders.export_manifest import read_manifest
from engine.encoders.exported import ExportedEncoder, load_exported
from engine.encoders.registry import load_encoder
from engine.encoders.towers import DualEncoder
from engine.export.folder import ExportSettings, export_model
from tests import tiny_open_clip, tiny_transformers

OPEN_CLIP = ("clip", "clip-quickgelu", "clip-average", "siglip", "siglip2", "pe")
TRANSFORMERS = ("clip", "siglip", "siglip2")
MODELS = [*(f"open_clip:{name}" for name in OPEN_CLIP), *(f"hf:{name}" for name in TRANSFORMERS)]
TEXTS = ["a photo of two red dog", "no person", "small cube and large ball " * 8, "a"]
Pair = tuple[DualEncoder, ExportedEncoder]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Each model and its export, made when it is first asked for."""
    root = tmp_path_factory.mktemp("models")

    class Made(dict[str, Pair]):
        def __missing__(self, name: str) -> Pair:
            kind, _, family = name.partition(":")
            write = (tiny_open_clip if kind == "open_clip" else tiny_transformers).write_folder
            source = load_encoder(f"{kind}:{write(root / kind / family, family)}", device="cpu")
            assert isinstance(source, DualEncoder)
            settings = ExportSettings(taps=("projected", "value"), image_layers=(1,))
            folder = export_model(source, root / "exported" / kind / family, settings)
            self[name] = source, load_exported(folder, device="cpu")
            return self[name]

    return Made()


def pictures(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (40, 40 + row % 9, 3), dtype=np.uint8)) for row in range(count)]


def apart(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    """Largest difference, in units of the largest number that was wanted."""
    assert found is not None and wanted is not None and found.dtype == wanted.dtype == torch.float32
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_every_output_equals_the_source_at_every_batch(model, batch, pairs):
    source, exported = pairs[model]
    pixels = torch.stack([source.preprocess(picture) for picture in pictures(batch)])
    layers = exported.manifest.image_layers
    for tap in (None, "projected", "value", "hidden"):
        held = () if tap is None else layers
        a, b = (each.encode_pixels(pixels, tap=tap, layers=held) for each in (source, exported))
        assert (a.tap, a.grid, a.aligned, a.fingerprint) == (b.tap, b.grid, b.aligned, b.fingerprint)
        assert apart(b.embedding, a.embedding) < 1e-5
        assert tap is None or apart(b.patches, a.patches) < 2e-5
        assert all(apart(b.hidden[layer], a.hidden[layer]) < 2e-5 for layer in held)
    if "image_windows" in exported.graphs:
        rows, columns = source.spec.grid
        cells = [[0, 0, columns, rows], [1, 0, 2, 2], [0, 0, 0, 0], [-3, 1, 1, rows + 4], [0, 0, 1, 1]]
        windows = torch.tensor(cells, dtype=torch.int32).repeat(batch, 1, 1)
        assert apart(exported.encode_windows(pixels, windows), source.encode_windows(pixels, windows)) < 1e-5
    texts = [TEXTS[row % len(TEXTS)] for row in range(batch)]
    assert torch.equal(exported.tokenize(texts).ids, source.tokenize(texts).ids)
    for vectors in (False, True):
        layers = exported.manifest.text_layers if vectors else ()
        tokens = source.tokenize(texts)
        c, d = (each.encode_tokens(tokens, token_vectors=vectors, layers=layers) for each in (source, exported))
        assert apart(d.embedding, c.embedding) < 1e-5
        assert not vectors or apart(d.tokens, c.tokens) < 2e-5
        assert torch.equal(c.token_mask, d.token_mask) and torch.equal(c.truncated, d.truncated)
        assert all(apart(d.hidden[layer], c.hidden[layer]) < 2e-5 for layer in layers)


@pytest.mark.parametrize("model", MODELS)
def test_facts_pixels_and_text_rules_travel(model, pairs):
    source, exported = pairs[model]
    names = ("family", "fingerprint", "logit_scale", "logit_bias", "probability", "activation", "text_rules", "mean")
    for name in names:
        assert getattr(exported.spec, name) == getattr(source.spec, name), name
    assert set(exported.manifest.spec.taps) == {"projected", "value", "hidden"}
    for picture in pictures(3):
        assert torch.equal(exported.preprocess(picture), source.preprocess(picture))
        assert torch.equal(exported.preprocess_region(picture), source.preprocess_region(picture))
    a, b = (each.tokenize(["A CAT, on the left!", *TEXTS]) for each in (source, exported))
    assert torch.equal(a.ids, b.ids) and torch.equal(a.end, b.end) and a.token_texts == b.token_texts
    assert min(exported.manifest.cosines.values()) > 0.99999
    # open_clip's towers that pool a class token or by attention have windows, others and transformers' have none.
    has_windows = model.startswith("open_clip:") and model != "open_clip:clip-average"
    assert ("image_windows" in exported.graphs) == has_windows


@pytest.mark.parametrize("family", ["resnet", "coca"])
def test_towers_without_aligned_patches_export_what_they_have(family, tmp_path):
    source = load_encoder(f"open_clip:{tiny_open_clip.write_folder(tmp_path / 'model', family)}", device="cpu")
    exported = load_exported(export_model(source, tmp_path / "out"), device="cpu")
    assert not any(exported.spec.taps.values())
    pixels = torch.stack([source.preprocess(picture) for picture in pictures(3)])
    assert apart(exported.encode_pixels(pixels).embedding, source.encode_pixels(pixels).embedding) < 1e-5
    tokens = source.tokenize(TEXTS)
    assert torch.equal(exported.tokenize(TEXTS).ids, tokens.ids)
    a, b = (each.encode_tokens(tokens, token_vectors=True) for each in (source, exported))
    assert apart(b.embedding, a.embedding) < 1e-5 and apart(b.tokens, a.tokens) < 2e-5


def test_what_no_folder_can_hold_is_refused(tmp_path):
    name = f"hf:{tiny_transformers.write_folder(tmp_path / 'naflex', 'siglip2-naflex')}"
    with pytest.raises(ValueError, match="export wants a square input, got a model of native aspect ratio"):
        export_model(name, tmp_path / "out")
    name = f"open_clip:{tiny_open_clip.write_folder(tmp_path / 'clip', 'clip')}?resize=source"
    with pytest.raises(ValueError, match="resize='source' runs the source library's own code, which no folder"):
        export_model(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_vit_b_32_at_its_true_size():
    # Not in `tmp_path`, whose folders are kept: the weights alone are 600 MB.
    with tempfile.TemporaryDirectory() as place:
        source = tiny_open_clip.vit_b_32()
        # The exporter runs both on ten pictures and captions, and refuses what differs.
        folder = export_model(source, Path(place) / "out")
        manifest = read_manifest("test", folder)
        numbers = sum(parameter.numel() for parameter in source._model.parameters())
        assert numbers == 151_277_313
        assert 3.99 * numbers < (folder / "weights.bin").stat().st_size < 4.01 * numbers
        assert manifest.spec.grid == (7, 7) and manifest.spec.activation == "quick_gelu"
        assert manifest.image_layers == (2, 4, 6, 12) and manifest.text_layers == (6, 7, 8, 12)
        assert len(manifest.cosines) == 15 and min(manifest.cosines.values()) > 0.99999
