"""Exported models on a GPU: `python -m bench.gpu_export_check`. First whether they are right, then how fast.

1. The embedded model with its heads, and a ViT-B/32 of random weights, are exported in fp32 and fp16.
2. On CUDA, and on TensorRT where ONNX Runtime has it (its engines are built first, and that none is built while loading
   or scoring is seen by the files of its cache): golden vectors, then every output against torch at batches the
   graphs were not made with, then scores of every scorer that is at hand.
3. Milliseconds of batches of 1, 8 and 64 beside torch eager in the same dtype, taking turns.

Everything goes to `bench/results/gpu_export_check.json`; the exit code is 1 when something is wrong. `--dry-run` goes
through all of it on the CPU with a tiny model; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.encoders.base import Encoder
from engine.encoders.exported import WINDOWS, ExportedEncoder, load_exported
from engine.encoders.exported_text import tokenizer_of
from engine.encoders.golden import lowest_cosine
from engine.encoders.onnx_providers import PROVIDERS, onnx_runtime
from engine.encoders.registry import load_encoder
from engine.export.folder import ExportSettings, export_model
from engine.export.warming import warm_tensorrt

RESULTS = Path(__file__).parent / "results" / "gpu_export_check.json"
BATCHES = (1, 7, 64)
TEXTS = ("a large red ring", "no blue square", "a green star and a small circle")
ROUNDS = 9


def main(argv: Sequence[str] | None = None) -> int:
    """Check every model, precision and provider; 1 when anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with a tiny model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "fp16"])
    options = parser.parse_args(argv)
    device = "cpu" if options.dry_run else "cuda"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for name, make in models(Path(place), dry=options.dry_run).items():
            source = make()
            for precision in options.precisions:
                heads = ("max_sim_head", "peakpatch") if name == "scenes" else ()
                settings = ExportSettings(precision=precision, heads=heads)
                folder = export_model(source, Path(place) / f"{name}-{precision}", settings)
                for provider in providers(device):
                    row = {"model": name, "precision": precision, "provider": provider}
                    rows.append({**row, **examine(source, folder, device, provider)})
                    print(json.dumps({key: value for key, value in rows[-1].items() if key != "golden"}), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__}
    facts["onnxruntime"] = onnx_runtime("check").__version__
    options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1))
    wrong = [row for row in rows if row["wrong"]]
    print(f"{len(rows)} combinations, {len(wrong)} wrong; {options.out}")
    return 1 if wrong or not rows else 0


def models(place: Path, *, dry: bool) -> dict[str, Callable[[], Encoder]]:
    """What is exported, by name."""
    from tests import tiny_open_clip

    if dry:
        return {"tiny": lambda: load_encoder(f"open_clip:{tiny_open_clip.write_folder(place / 'tiny', 'clip')}")}
    return {
        "scenes": lambda: load_encoder("scenes", device="cpu"),
        "vit_b_32": lambda: load_encoder(f"open_clip:{tiny_open_clip.write_vit_b_32(place / 'vit')}", device="cpu"),
    }


def providers(device: str) -> list[str]:
    """Those of this installation that run on the device."""
    if device == "cpu":
        return ["cpu"]
    found = onnx_runtime("check").get_available_providers()
    return [name for name in ("cuda", "tensorrt") if PROVIDERS[name] in found]


def examine(source: Encoder, folder: Path, device: str, provider: str) -> dict[str, Any]:
    """Golden rows, cosines to the source, milliseconds; `wrong` lists what is not as it must be."""
    wrong: list[str] = []
    try:
        built = set()
        if provider == "tensorrt":
            warm_tensorrt(folder, device=device, told=print)
            built = files(folder / "tensorrt")
        found = load_exported(folder, device=device, provider=provider)
        golden = found.verify(runs=3)
        cosines = compared(source, found)
        times = timed(source, found)
        if files(folder / "tensorrt") != built:
            wrong.append("an engine was built while loading or running")
    except Exception as error:  # whatever it is, the other combinations go on
        return {"wrong": [f"{type(error).__name__}: {error}"]}
    least = found.manifest.least_cosine
    wrong += [f"{name}: cosine {value:.6f}" for name, value in cosines.items() if not value >= least]
    return {"wrong": wrong, "cosines": cosines, "milliseconds": times, "golden": [asdict(row) for row in golden]}


def files(folder: Path) -> set[tuple[str, int]]:
    """Every file below a folder with its time of writing."""
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def compared(source: Encoder, found: ExportedEncoder) -> dict[str, float]:
    """The lowest cosine of each output to the source's, over all batches."""
    rng = np.random.default_rng(1)
    cosines: dict[str, float] = {}
    manifest = found.manifest
    for batch in BATCHES:
        pictures = [Image.fromarray(rng.integers(0, 256, (50, 40, 3), dtype=np.uint8)) for _ in range(batch)]
        pixels = torch.stack([source.preprocess(picture) for picture in pictures])
        tokens = tokenizer_of(source)([TEXTS[row % len(TEXTS)] for row in range(batch)])
        images = [x.encode_pixels(pixels, tap="projected", layers=manifest.image_layers) for x in (source, found)]
        texts = [x.encode_tokens(tokens, token_vectors=True, layers=manifest.text_layers) for x in (source, found)]
        pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
            "image embedding": (images[0].embedding, found.encode_pixels(pixels).embedding),
            "patches": (images[0].patches, images[1].patches),
            "text embedding": (texts[0].embedding, found.encode_tokens(tokens).embedding),
            "tokens": (texts[0].tokens, texts[1].tokens),
            **{f"image {n}": (images[0].hidden[n], images[1].hidden[n]) for n in manifest.image_layers},
            **{f"text {n}": (texts[0].hidden[n], texts[1].hidden[n]) for n in manifest.text_layers},
        }
        if WINDOWS in manifest.graphs:
            rows, columns = source.spec.grid or (1, 1)
            cells = [[0, 0, columns, rows], [0, 0, 1, rows], [1, 1, 2, 2]]
            windows = torch.tensor(cells, dtype=torch.int32).repeat(batch, 1, 1)
            pairs["windows"] = source.encode_windows(pixels, windows), found.encode_windows(pixels, windows)
        for name, (wanted, got) in pairs.items():
            assert wanted is not None and got is not None
            cosines[name] = min(cosines.get(name, 1.0), lowest_cosine(got.cpu(), wanted.cpu()))
    return cosines


def timed(source: Encoder, found: ExportedEncoder) -> dict[str, dict[str, float]]:
    """Median milliseconds of batches of pictures, the export beside torch eager where both are on one device."""
    times: dict[str, dict[str, float]] = {}
    size, rivals = source.spec.image_size, {"export": found, "eager": on_device(source, found)}
    for batch in (1, 8, 64):
        pixels = torch.rand(batch, 3, size, size, device=found.device)
        taken: dict[str, list[float]] = {name: [] for name in rivals}
        for turn in range(ROUNDS + 1):
            for name, encoder in rivals.items():
                began = time.perf_counter()
                encoder.encode_pixels(pixels)
                if found.device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    taken[name].append(1e3 * (time.perf_counter() - began))
        times[str(batch)] = {name: statistics.median(some) for name, some in taken.items()}
    return times


def on_device(source: Encoder, found: ExportedEncoder) -> Encoder:
    """The source where the export runs, in the export's dtype where its family has it."""
    if found.device.type == "cpu":
        return source
    half = found.manifest.precision == "fp16" and source.spec.family != "scenes"
    return load_encoder(source.spec.name, device=found.device, dtype="float16" if half else "float32")


if __name__ == "__main__":
    sys.exit(main())
