"""Exported encoders against torch eager and `torch.compile`, in turn: `pytest bench/bench_encoder.py`.

The embedded model with its weights; `--large` adds a ViT-B/32 of random ones, `--compiled` the baseline that takes
minutes to get ready, and `--exports FOLDER` keeps the exports for the next run. Global embeddings of pictures and of
captions at batches of 1, 8 and 64; end to end, `Engine.score` of pictures and captions with every scorer; and what
1,000 batches of changing sizes leave in memory. Every result is checked against eager float32 before it is timed, int8
within what it is meant to lose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.paired import Paired
from bench.peak_memory import resident_kib
from engine.encoders.base import Encoder, Tokens
from engine.encoders.exported import ExportedEncoder, load_exported
from engine.encoders.exported_text import tokenizer_of
from engine.encoders.golden import lowest_cosine
from engine.encoders.registry import load_encoder
from engine.encoders.tracing import traceable_towers
from engine.engine import Engine
from engine.export.folder import ExportSettings, export_model
from engine.scenes.items import controlled_items
from engine.scorers.base import Scorer
from engine.scorers.max_sim import MaxSim
from engine.scorers.registry import get_scorer
from engine.scorers.sgi import SGI
from tests.tiny_open_clip import vit_b_32

BATCHES = (1, 8, 64)
# Exported with the model; of `linear` there is no graph, and it is scored all the same.
HEADS = ("max_sim_head", "peakpatch", "tflocal", "tfglobal")
SCORERS: dict[str, Scorer] = {
    "global": get_scorer("global"),
    "max_sim": MaxSim(),
    "sgi native": SGI(crops="native"),
    "sgi rescaled": SGI(crops="rescaled"),
    "sgi windows": SGI(crops="windows"),
    "sgi window head": SGI(crops="windows", head="scenes", full_image=False),
    **{name: get_scorer(name) for name in (*HEADS, "linear")},
}
# Those that read heads shipped for the embedded model alone.
TRAINED = (*HEADS, "linear", "sgi window head")
# Times as fast as eager torch: at least, and of the embedded model at batch 1.
LEAST, LEAST_SINGLE = 0.95, 1.3
GROWTH_KIB = 50 << 10
INT8_COSINE = 0.99


@dataclass(frozen=True)
class Models:
    """A model as torch runs it, and its exports."""

    source: Encoder
    fp32: ExportedEncoder
    int8: ExportedEncoder


@pytest.fixture(scope="session", params=["scenes", "vit_b_32"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """A model and its exports in both precisions, sessions with the threads of the benchmarks."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("--threads"))
    if request.param == "vit_b_32" and not request.config.getoption("--large"):
        pytest.skip("the large model wants --large")
    root: Path = request.config.getoption("--exports") or tmp_path_factory.mktemp("exports")
    source = load_encoder("scenes", device="cpu") if request.param == "scenes" else vit_b_32()
    heads = HEADS if request.param == "scenes" else ()
    made = [root / f"{request.param}-{precision}" for precision in ("fp32", "int8")]
    for folder, precision in zip(made, ("fp32", "int8"), strict=True):
        if not folder.exists():
            export_model(source, folder, ExportSettings(precision=precision, heads=heads))
    yield Models(source, *(load_exported(folder, device="cpu", accept_loss=True) for folder in made))
    torch.set_num_threads(before)


def tokens_of(encoder: Encoder, count: int) -> Tokens:
    captions = [caption for item in controlled_items("size", count, seed=4) for caption in item.captions]
    return tokenizer_of(encoder)(captions[:count])


def pixels_of(encoder: Encoder, count: int) -> Tensor:
    size = encoder.spec.image_size
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(7)) * 2 - 1


def near(wanted: Tensor) -> Callable[[Tensor], None]:
    """A check of embeddings: every one has a high cosine to the one that eager torch gives."""

    def check(found: Tensor) -> None:
        assert found.shape == wanted.shape and lowest_cosine(found, wanted) > INT8_COSINE

    return check


def least(models: Models, batch: int) -> float:
    """How many times as fast as eager torch the export must be."""
    return LEAST_SINGLE if batch == 1 and models.source.spec.family == "scenes" else LEAST


def compiled_tower(module: nn.Module) -> Callable[..., Tensor]:
    """The embedding of a tower through `torch.compile`, compiled once for all batches."""
    whole = torch.compile(module, dynamic=True)

    def call(*inputs: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = whole(*inputs)[0]
        return found

    return call


@pytest.fixture(scope="session")
def compiled(models: Models, request: pytest.FixtureRequest) -> tuple[Callable[..., Tensor], ...]:
    if not request.config.getoption("--compiled"):
        return ()
    return tuple(compiled_tower(module) for module in traceable_towers(models.source, (), (), ()))


@pytest.mark.parametrize("batch", BATCHES)
def bench_pictures(paired: Paired, models: Models, compiled: tuple[Callable[..., Tensor], ...], batch: int) -> None:
    """Global embeddings of a batch of pictures, from pixels."""
    pixels = pixels_of(models.source, batch)
    baselines = {"eager": lambda: models.source.encode_pixels(pixels).embedding}
    if compiled:
        baselines["compile"] = lambda: compiled[0](pixels)
    baselines["own int8"] = lambda: models.int8.encode_pixels(pixels).embedding
    row = paired(
        f"pictures, {models.source.spec.name}", str(batch), lambda: models.fp32.encode_pixels(pixels).embedding,
        baselines, expected=near(models.source.encode_pixels(pixels).embedding),
    )  # fmt: skip
    assert row.ratios["eager"] >= least(models, batch)


@pytest.mark.parametrize("batch", BATCHES)
def bench_captions(paired: Paired, models: Models, compiled: tuple[Callable[..., Tensor], ...], batch: int) -> None:
    """Global embeddings of a batch of captions, from tokens."""
    tokens = tokens_of(models.source, batch)
    baselines = {"eager": lambda: models.source.encode_tokens(tokens).embedding}
    if compiled:
        given = (tokens.ids, tokens.end) if models.source.spec.family == "scenes" else (tokens.ids,)
        baselines["compile"] = lambda: compiled[1](*given)
    baselines["own int8"] = lambda: models.int8.encode_tokens(tokens).embedding
    row = paired(
        f"captions, {models.source.spec.name}", str(batch), lambda: models.fp32.encode_tokens(tokens).embedding,
        baselines, expected=near(models.source.encode_tokens(tokens).embedding),
    )  # fmt: skip
    assert row.ratios["eager"] >= least(models, batch)


@pytest.mark.parametrize("scorer", SCORERS)
def bench_score(paired: Paired, models: Models, scorer: str) -> None:
    """`Engine.score` from pictures and captions to scores; regions are many passes, so fewer pictures."""
    if scorer in TRAINED and models.source.spec.family != "scenes":
        pytest.skip("heads are shipped for the embedded model")
    count = 2 if scorer in ("sgi native", "sgi rescaled") else 16
    items = controlled_items("color", count // 2, seed=3)
    pictures = [picture for item in items for picture in item.images()]
    captions = [caption for item in items for caption in item.captions]
    ours, eager, int8 = (Engine(x, segmenter="rules") for x in (models.fp32, models.source, models.int8))

    def through(peaksim: Engine) -> Callable[[], Any]:
        return lambda: peaksim.score(pictures, captions, scorer=SCORERS[scorer])

    wanted = through(eager)()

    # What int8 may lose: heads of the TF kinds give logits, which spread wider than cosines.
    lost = max(0.1, 0.15 * float(wanted.max() - wanted.min()))

    def check(found: Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=0, atol=lost)

    torch.testing.assert_close(through(ours)(), wanted, rtol=0, atol=1e-4)
    baselines = {"eager": through(eager)}
    if scorer not in ("linear", "sgi window head"):
        # Of these two the export holds no head, and the shipped one reads no features of int8.
        baselines["own int8"] = through(int8)
    row = paired(f"score, {models.source.spec.name}", f"{scorer}, {count}", through(ours), baselines, expected=check)
    assert row.ratios["eager"] >= LEAST


def bench_memory(models: Models) -> None:
    """1,000 batches of changing sizes leave less than 50 MB behind that the first ones did not."""
    sizes = torch.randint(1, 33, (1000,), generator=torch.Generator().manual_seed(5)).tolist()
    pixels, tokens = pixels_of(models.source, 32), tokens_of(models.source, 32)
    if models.source.spec.family != "scenes":
        sizes = sizes[:50]

    def run(size: int) -> None:
        models.fp32.encode_pixels(pixels[:size], tap="projected")
        ids = Tokens(
            tokens.ids[:size], tokens.attention_mask[:size], tokens.word_mask[:size], tokens.end[:size],
            tokens.truncated[:size], tokens.texts[:size], tokens.token_texts[:size],
        )  # fmt: skip
        models.fp32.encode_tokens(ids, token_vectors=True)

    run(32)
    before = resident_kib()
    for size in sizes:
        run(size)
    assert resident_kib() - before < GROWTH_KIB
