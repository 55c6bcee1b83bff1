"""The embedded model exported: the same features and scores, a folder that checks itself, and what it refuses."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import engine
from bench.peak_memory import resident_kib
from engine.encoders.export_manifest import MANIFEST_FILE, file_facts, read_manifest
from engine.encoders.exported import ExportedEncoder, load_exported
from engine.encoders.golden import compare, lowest_cosine
from engine.encoders.registry import load_encoder
from engine.export.checking import check_export
from engine.export.folder import ExportSettings, export_model
from engine.features import Needs, RegionPlan
from engine.retrieval.index import Index
from engine.scenes.items import controlled_items
from engine.scorers.sgi import SGI

CLOSE = {"rtol": 0, "atol": 2e-6}
LAYERS = Needs(patches=True, tokens=True, image_layers=(1, 2, 3, 6), text_layers=(4, 5, 8))


@pytest.fixture(scope="module")
def source() -> engine.Engine:
    return engine.load("scenes", device="cpu", segmenter="rules")


@pytest.fixture(scope="module")
def exported(exported_scenes: Path) -> engine.Engine:
    return engine.load(str(exported_scenes), device="cpu", segmenter="rules")


def pictures(count: int) -> list[np.ndarray]:
    items = controlled_items("color", (count + 1) // 2, seed=3)
    return [picture for item in items for picture in item.images()][:count]


def captions(count: int) -> list[str]:
    items = controlled_items("size", (count + 1) // 2, seed=4)
    return [caption for item in items for caption in item.captions][:count]


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_every_output_equals_the_source_at_every_batch(batch, source, exported):
    shown, texts = pictures(batch), captions(batch)
    for needs in (Needs(), LAYERS):
        a, b = (each.encode_images(shown, scorer=needs) for each in (source, exported))
        torch.testing.assert_close(b.embedding, a.embedding, **CLOSE)
        assert (b.tap, b.grid, b.aligned, b.fingerprint) == (a.tap, a.grid, a.aligned, a.fingerprint)
        c, d = (each.encode_texts(texts, scorer=needs) for each in (source, exported))
        torch.testing.assert_close(d.embedding, c.embedding, **CLOSE)
        assert torch.equal(c.token_mask, d.token_mask) and torch.equal(c.attention_mask, d.attention_mask)
        assert torch.equal(c.end, d.end) and (c.token_texts, c.texts) == (d.token_texts, d.texts)
    torch.testing.assert_close(b.patches, a.patches, **CLOSE)
    torch.testing.assert_close(d.tokens, c.tokens, **CLOSE)
    assert set(b.hidden) == {1, 2, 3, 6} and set(d.hidden) == {4, 5, 8}
    for one, other in ((a, b), (c, d)):
        for layer, state in one.hidden.items():
            torch.testing.assert_close(other.hidden[layer], state, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(
    "scorer",
    [
        "global",
        "max_sim",
        "linear",
        engine.SGI(crops="native"),
        engine.SGI(crops="rescaled"),
        engine.SGI(crops="windows"),
        engine.SGI(crops="windows", head="scenes", full_image=False),
    ],
)
def test_scores_are_those_of_the_source(scorer, source, exported):
    shown, texts = pictures(4), captions(4)
    wanted = source.score(shown, texts, scorer=scorer)
    torch.testing.assert_close(exported.score(shown, texts, scorer=scorer), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        exported.score(shown, texts, scorer=scorer, pairs=True), wanted.diag(), rtol=0, atol=1e-5
    )


def test_probabilities_labels_and_explanations_work(source, exported):
    shown, labels = pictures(3), ["ring", "star", "circle"]
    torch.testing.assert_close(exported.classify(shown, labels), source.classify(shown, labels), rtol=0, atol=1e-4)
    a, b = (each.explain(shown[0], captions(1), scorer="sgi") for each in (source, exported))
    assert [match.box for match in a.matches] == [match.box for match in b.matches]


def test_features_of_both_go_together(source, exported):
    features = source.encode_images(pictures(2))
    torch.testing.assert_close(exported.score(features, captions(2)), source.score(features, captions(2)), **CLOSE)


def test_the_facts_are_those_of_the_source(source, exported, exported_scenes):
    theirs, ours = source.spec, exported.spec
    assert ours.name == str(exported_scenes)
    for name in ("family", "fingerprint", "logit_scale", "logit_bias", "activation", "text_rules", "resize", "mean"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert dict(ours.taps) == {"projected": True}


def test_windows_of_pictures_that_have_different_numbers_of_them(source, exported):
    boxes = [np.array([[0, 0, 60, 60], [-5, 40, 30, 90], [80, 80, 82, 82]]), np.array([[10, 0, 20, 96]])]
    plan = Needs(regions=RegionPlan(mode="windows"))
    a, b = (each.encode_images(pictures(2), scorer=plan, regions=boxes) for each in (source, exported))
    assert torch.equal(a.region_mask, b.region_mask) and a.region_plan == b.region_plan
    torch.testing.assert_close(b.regions, a.regions, **CLOSE)


def test_an_export_without_windows_says_so(exported_copy, tmp_path):
    (exported_copy / "image_windows.onnx").unlink()
    held = read_manifest_as_is(exported_copy).graphs
    graphs = {name: graph for name, graph in held.items() if name != "image_windows"}
    rewrite(exported_copy, graphs=graphs)
    loaded = engine.load(str(exported_copy), device="cpu")
    with pytest.raises(ValueError, match=r"mode='windows' .* needs a graph that was not exported"):
        loaded.encode_images(pictures(1), scorer=Needs(regions=RegionPlan(mode="windows")))
    with pytest.raises(ValueError, match=r"must give windows, got: .* was not exported.*; or .*SGI\(crops='native'\)"):
        Index.create(tmp_path / "index", model=loaded)
    assert len(Index.create(tmp_path / "index", model=loaded, vectors=[SGI(crops="native")])) == 0


def test_two_loads_and_many_threads_give_identical_vectors(exported, exported_scenes):
    shown = pictures(2)
    wanted = exported.encode_images(shown).embedding
    again = engine.load(str(exported_scenes), device="cpu")
    found: list[torch.Tensor] = []

    def encode() -> None:
        for _ in range(5):
            found.append(again.encode_images(shown).embedding)

    threads = [threading.Thread(target=encode) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15 and all(torch.equal(each, wanted) for each in found)


def test_unknown_words_are_still_named(exported):
    name = re.escape(exported.spec.name)
    with pytest.warns(UserWarning, match=f"^{name}: the embedded model knows 135 words and not xylophone"):
        exported.encode_texts(["a red xylophone"])


def test_weights_lie_once_in_the_folder(exported_scenes):
    state = sum(tensor.numel() * 4 for tensor in load_encoder("scenes", device="cpu").state_dict().values())
    heads = sum(path.stat().st_size for path in (exported_scenes / "heads").iterdir())
    # Of the last blocks a part of some weights lies beside the whole.
    assert state < (exported_scenes / "weights.bin").stat().st_size < 1.15 * (state + heads)


def test_changing_batch_sizes_leave_no_memory_behind(exported):
    encoder, pixels = exported.encoder, torch.rand(16, 3, 96, 96)
    sizes = torch.randint(1, 17, (100,), generator=torch.Generator().manual_seed(5)).tolist()

    def run(size: int) -> None:
        encoder.encode_pixels(pixels[:size], tap="projected")
        encoder.encode_tokens(encoder.tokenize(captions(2)[:1] * size), token_vectors=True)

    run(16)
    before = resident_kib()
    for size in sizes:
        run(size)
    # `bench/bench_encoder.py` runs a thousand.
    assert resident_kib() - before < 50 << 10


# What is refused.


def rewrite(folder: Path, **changes: object) -> None:
    """A manifest with other facts, itself unbroken, of the files as they now are."""
    manifest = read_manifest_as_is(folder)
    names = [path for path in manifest.files if (folder / path).is_file()]
    replace(manifest, files={name: file_facts(folder / name) for name in names}, **changes).write(folder)


def read_manifest_as_is(folder: Path):
    from engine.encoders import export_manifest

    plain = json.loads((folder / MANIFEST_FILE).read_text())
    for name in ("kind", "format_version", "digest"):
        plain.pop(name)
    return export_manifest._read(plain)


def test_a_changed_or_missing_file_is_refused_by_name(exported_copy):
    (exported_copy / "weights.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"weights\.bin must be of \d+ bytes, got 1"):
        engine.load(str(exported_copy))
    (exported_copy / "weights.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"weights\.bin is missing; the folder is one unit"):
        engine.load(str(exported_copy))


@pytest.mark.parametrize("name", ["weights.bin", "image_global.onnx", "golden.safetensors", "tokenizer/words.json"])
def test_one_changed_byte_is_refused(name, exported_copy):
    content = bytearray((exported_copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (exported_copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} was changed since it was exported"):
        engine.load(str(exported_copy))


def test_a_changed_manifest_is_refused(exported_copy):
    path = exported_copy / MANIFEST_FILE
    path.write_text(path.read_text().replace('"hard_swish"', '"gelu"'))
    with pytest.raises(ValueError, match=r"manifest\.json was changed since it was written"):
        engine.load(str(exported_copy))
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(ValueError, match="kind 'peaksim export' and format 1, got 'peaksim export' of format 9"):
        engine.load(str(exported_copy))


def test_outputs_far_from_the_golden_ones_are_refused_by_name(exported_copy):
    golden = load_file(exported_copy / "golden.safetensors")
    golden["text_all/out/hidden.4"] = golden["text_all/out/hidden.4"].roll(1, dims=-1)
    save_file(golden, exported_copy / "golden.safetensors")
    rewrite(exported_copy)
    message = r"output 'hidden\.4' of text_all must have a cosine of at least 0\.9999 to the golden vectors on provider"
    with pytest.raises(ValueError, match=message):
        engine.load(str(exported_copy))
    del golden["text_all/out/hidden.4"]
    save_file(golden, exported_copy / "golden.safetensors")
    rewrite(exported_copy)
    with pytest.raises(ValueError, match=r"golden file lacks 'text_all/out/hidden\.4'"):
        engine.load(str(exported_copy))


def test_other_pixels_and_other_tokens_are_refused(exported_copy):
    facts = read_manifest_as_is(exported_copy)
    rewrite(exported_copy, pixels={**facts.pixels, "mode": "crop"})
    with pytest.raises(ValueError, match=r"golden picture picture\.0 must become the pixels it became"):
        engine.load(str(exported_copy))
    rewrite(exported_copy, pixels=facts.pixels)
    words = json.loads((exported_copy / "tokenizer" / "words.json").read_text())["words"]
    (exported_copy / "tokenizer" / "words.json").write_text(json.dumps({"words": words[::-1]}))
    rewrite(exported_copy)
    with pytest.raises(ValueError, match="gives other tokens here than where it was exported"):
        engine.load(str(exported_copy))


def test_numbers_that_are_not_finite_are_refused(exported):
    graph = exported.encoder.graphs["image_global"]
    golden = {"image_global/in/pixels": torch.full((1, 3, 96, 96), float("nan"))}
    golden["image_global/out/embedding"] = torch.ones(1, 128)
    with pytest.raises(ValueError, match=r"output 'embedding' of image_global\.onnx must be finite"):
        compare("image_global", graph, golden, "cpu")
    assert np.isnan(lowest_cosine(torch.full((2, 3), float("nan")), torch.ones(2, 3)))


def test_what_a_folder_cannot_give_is_said(exported, exported_scenes):
    message = r"text layer 1 was not exported \(held: [2-8, ]+\); export 'scenes' again with --text-layers"
    with pytest.raises(ValueError, match=message):
        exported.encode_texts(captions(1), scorer=Needs(text_layers=(1,)))
    with pytest.raises(ValueError, match="text layers are 1 to 8, got 9"):
        exported.encode_texts(captions(1), scorer=Needs(text_layers=(9,)))
    with pytest.raises(ValueError, match=r"tap must be one that gives patches \('projected'\), got 'value'"):
        exported.encode_images(pictures(1), scorer=Needs(patches=True, tap="value"))
    with pytest.raises(ValueError, match=r"pixels must be of shape \(batch, 3, 96, 96\) .* got \(2, 3, 64, 64\)"):
        exported.encoder.encode_pixels(torch.zeros(2, 3, 64, 64))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("{}?provider=cuda", {}, ImportError, r"provider 'cuda' was wanted.*'peaksim\[gpu\]'"),
        ("{}?provider=tensorrt", {}, ImportError, r"provider 'tensorrt' was wanted.*'peaksim\[gpu\]' tensorrt"),
        ("{}?provider=rocm", {}, ValueError, "provider must be one of 'cpu', 'cuda', 'tensorrt', got 'rocm'"),
        ("{}?precision=fp16", {}, ValueError, "precision 'fp16' was wanted, the model was exported in fp32"),
        ("{}?resize=crop", {}, ValueError, "option must be one of provider, precision, got 'resize'"),
        ("{}", {"dtype": "float16"}, ValueError, "was exported in fp32, got dtype='float16'"),
        ("{}", {"device": "meta"}, ValueError, "device"),
    ],
)
def test_wrong_options_are_refused(name, options, error, message, exported_scenes):
    with pytest.raises(error, match=message):
        engine.load(name.format(exported_scenes), **options)


def test_an_empty_name_is_no_export_of_the_working_directory(exported_scenes, monkeypatch):
    monkeypatch.chdir(exported_scenes)
    with pytest.raises(ValueError, match="or a folder that `peaksim export` wrote, got ''"):
        engine.load("")
    assert engine.load(".", device="cpu").spec.family == "scenes"


def test_settings_that_fit_are_accepted(exported_scenes):
    found = engine.load(f"{exported_scenes}?provider=cpu&precision=fp32", device="cpu", dtype="float32")
    assert isinstance(found.encoder, ExportedEncoder) and found.encoder.provider == "cpu"


def test_missing_onnx_runtime_says_how_to_get_it(exported_scenes, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'peaksim\[cpu\]', or 'peaksim\[gpu\]' for CUDA"):
        load_exported(exported_scenes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, "precision must be one of 'fp32', 'fp16', 'int8', got 'bf16'"),
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ExportSettings(**options)


def test_what_cannot_be_exported_is_refused_and_nothing_is_left(tmp_path, exported):
    for settings, message in (
        (ExportSettings(taps=("hidden",)), "tap must be one of 'projected', 'value', got 'hidden'"),
        (ExportSettings(image_layers=(7,)), "image layers are 1 to 6, got 7"),
        (ExportSettings(text_layers=(0,)), "text layers are 1 to 8, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            export_model("scenes", tmp_path / "out", settings)
    with pytest.raises(ValueError, match="export knows the embedded model, open_clip's and transformers'"):
        export_model(exported.encoder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ValueError, match="must be a new or an empty folder"):
        export_model("scenes", tmp_path / "full")
    with pytest.raises(ValueError, match=r"full\?a must have no '\?', which begins the options"):
        export_model("scenes", tmp_path / "full?a")


# The command.


def test_a_check_runs_several_times_for_its_latency(exported_scenes):
    rows = check_export(exported_scenes, device="cpu", runs=2)
    manifest = read_manifest("test", exported_scenes)
    assert len(rows) == sum(len(graph.outputs) for graph in manifest.graphs.values())
    assert min(manifest.cosines.values()) > 0.999999
