"""An encoder, and heads trained on it, as one folder: written, loaded again, compared with its source."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.choices import Precision, check_choice
from engine.encoders.base import Encoder, EncoderSpec, Tokens
from engine.encoders.export_manifest import GOLDEN_FILE, MANIFEST_FILE, Manifest, file_facts
from engine.encoders.exported import (
    IMAGE,
    IMAGE_ALL,
    TEXT,
    TEXT_ALL,
    TOWERS,
    WINDOWS,
    ExportedEncoder,
    load_exported,
)
from engine.encoders.exported_text import tokenizer_of, write_tokenizer
from engine.encoders.golden import golden_input, golden_output, golden_source, lowest_cosine, write_golden
from engine.encoders.onnx_graph import BATCH
from engine.encoders.registry import load_encoder
from engine.encoders.scenes import ScenesEncoder
from engine.encoders.towers import DualEncoder
from engine.encoders.tracing import Traceable, traceable_towers, traceable_windows
from engine.export.graphs import Traced, part_of, trace, write_graphs
from engine.export.heads import find_head, head_parts
from engine.export.layers import default_layers, shipped_needs
from engine.export.precision import half_precision, quantised
from engine.export.unfinished import unfinished_folder
from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import Head

LEAST_COSINES: Mapping[str, float] = {"fp32": 0.9999, "fp16": 0.999, "int8": 0.99}
# Sizes that no trace was made with: what one baked in shows there.
_BATCHES = (1, 2, 7)
_GOLDEN_TEXTS = ("a photo of a large red ring", "no small blue square", "two dogs, one on the left " * 40)
Cost = Callable[[Encoder, ExportedEncoder], Mapping[str, Any]]


@dataclass(frozen=True)
class ExportSettings:
    """What is exported.

    Attributes:
        precision: `"fp32"`; `"fp16"`, for GPUs; `"int8"`, weights and matrix products for CPUs.
        heads: trained heads: files, or names of those shipped for the embedded model.
        taps: patch taps, of those the encoder has; none takes its first one in the text's space. `hidden` comes anyway.
        image_layers, text_layers: 1-indexed layers whose states are wanted beside those that heads read by default.
        max_batch: largest batch that engines of TensorRT are built for.

    Raises ValueError for an unknown precision or a batch below 1.
    """

    precision: Precision = "fp32"
    heads: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()
    image_layers: tuple[int, ...] = ()
    text_layers: tuple[int, ...] = ()
    max_batch: int = 64

    def __post_init__(self) -> None:
        check_choice("export", "precision", self.precision, get_args(Precision))
        if self.max_batch < 1:
            raise ValueError(f"export: max_batch must be at least 1, got {self.max_batch}")


@dataclass
class _Work:
    """An export on its way."""

    encoder: ScenesEncoder | DualEncoder
    settings: ExportSettings
    folder: Path
    graphs: list[Traced] = field(default_factory=list)
    golden: dict[str, Tensor] = field(default_factory=dict)


def export_model(
    model: str | Encoder,
    out: str | PathLike[str],
    settings: ExportSettings | None = None,
    *,
    cost: Cost | None = None,
) -> Path:
    """Write a model as a folder that `engine.load` reads, and see that it gives what its source gives.

    Args:
        model: a name of `engine.load`, read in float32 on the CPU; or such an encoder.
        out: the folder, which must not be there or be empty, and have no '?' in its path. It appears whole or not at
            all (the working directory: with its manifest last).
        settings: what is exported.
        cost: called with source and export; what it gives goes into the manifest as `cost`. An int8 export whose cost
            nobody measured is loaded by those alone who name its precision.

    Returns the absolute path of the folder.

    Raises:
        ValueError: a model that cannot be exported, a folder that holds something, an output that differs from its
            source's, by name.
        ImportError: a package is missing; it says how to get it.
    """
    settings = settings or ExportSettings()
    target = Path(out).expanduser().resolve()
    if "?" in str(target):
        raise ValueError(f"export: {target} must have no '?', which begins the options of a model's name; rename it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"export: {target} must be a new or an empty folder, got one that holds something, or a file")
    encoder = load_encoder(model, device="cpu", dtype="float32") if isinstance(model, str) else model
    spec = _exportable(encoder, settings)
    assert isinstance(encoder, ScenesEncoder | DualEncoder)  # `_exportable` has seen to it
    target.parent.mkdir(parents=True, exist_ok=True)
    with unfinished_folder(target) as place:
        work = _Work(encoder, settings, place / "export")
        work.folder.mkdir()
        manifest = _written(work, spec)
        if work.settings.precision == "int8":
            manifest = _with_own_golden(work, manifest)
        found = load_exported(work.folder, device="cpu", accept_loss=True)
        manifest = replace(manifest, cosines=_compared(work, found))
        if cost is not None:
            manifest = replace(manifest, cost=cost(encoder, found))
        manifest.write(work.folder)
        _settle(work.folder, target)
    return target


def _settle(made: Path, target: Path) -> None:
    """Put a finished folder in its place, in one step."""
    if target != Path.cwd():
        made.replace(target)
        return
    # Replaced, it would no longer be the folder that we and the shell are in. Without a manifest nothing is loaded.
    for path in sorted(made.iterdir(), key=lambda path: path.name == MANIFEST_FILE):
        path.replace(target / path.name)


def _exportable(encoder: Encoder, settings: ExportSettings) -> EncoderSpec:
    """Facts of the encoder as its export has them. Raises ValueError for what cannot be exported."""
    spec = encoder.spec
    if not isinstance(encoder, ScenesEncoder | DualEncoder):
        raise ValueError(f"{spec.name}: export knows the embedded model, open_clip's and transformers', not this kind")
    if isinstance(encoder, DualEncoder) and encoder.device.type != "cpu":
        raise ValueError(f"{spec.name}: export wants an encoder on the CPU, got {encoder.device}")
    pixels = encoder.preprocess(Image.new("RGB", (8, 8)))
    if pixels.shape != (3, spec.image_size, spec.image_size):
        raise ValueError(
            f"{spec.name}: export wants a square input, got a model of native aspect ratio, which makes another grid "
            "for each picture; use one of fixed resolution"
        )
    for tap in settings.taps:
        if tap not in spec.taps:
            known = ", ".join(map(repr, spec.taps)) or "none"
            raise ValueError(f"{spec.name}: tap must be one of {known}, got {tap!r}")
    for tower, layers, count in (
        ("image", settings.image_layers, spec.image_layers),
        ("text", settings.text_layers, spec.text_layers),
    ):
        for layer in layers:
            if not 1 <= layer <= count:
                raise ValueError(f"{spec.name}: {tower} layers are 1 to {count}, got {layer}")
    mark = spec.fingerprint if settings.precision != "int8" else f"{spec.fingerprint}-int8"
    return replace(spec, fingerprint=mark)


def _written(work: _Work, spec: EncoderSpec) -> Manifest:
    """Write everything into the folder of `work`."""
    encoder, settings = work.encoder, work.settings
    heads = [find_head(name, encoder.spec.fingerprint) for name in settings.heads]
    wanted = [default_layers(encoder.spec), *shipped_needs(encoder.spec), *(head.needs() for head in heads)]
    image_layers = tuple(sorted({*settings.image_layers, *(n for needs in wanted for n in needs.image_layers)}))
    text_layers = tuple(sorted({*settings.text_layers, *(n for needs in wanted for n in needs.text_layers)}))
    aligned = tuple(tap for tap, is_aligned in encoder.spec.taps.items() if is_aligned)
    taps = tuple(tap for tap in settings.taps if tap != "hidden") or aligned[:1]
    exact = traceable_towers(encoder, taps, image_layers, text_layers)
    half = half_precision(encoder) if settings.precision == "fp16" else encoder
    traced = exact if half is encoder else traceable_towers(half, taps, image_layers, text_layers)
    pixels, tokens = _golden_inputs(work)
    _add_tower(work, (IMAGE, IMAGE_ALL), (exact[0], traced[0]), {"pixels": pixels})
    _add_tower(work, (TEXT, TEXT_ALL), (exact[1], traced[1]), {"ids": tokens.ids, "end": tokens.end})
    _add_windows(work, half, pixels)
    stated = {}
    if heads:
        images = encoder.encode_pixels(pixels, layers=image_layers)
        texts = encoder.encode_tokens(tokens, layers=text_layers)
        stated = {head.name: _add_head(work, head, images, texts) for head in heads}
    write_graphs(work.folder, work.graphs)
    write_golden(work.folder / GOLDEN_FILE, work.golden)
    rules = write_tokenizer(spec.name, tokenizer_of(encoder), work.folder)
    kept = {tap: aligned for tap, aligned in encoder.spec.taps.items() if tap in taps or tap == "hidden"}
    manifest = Manifest(
        source=spec.name, made_by=importlib.metadata.version("peaksim"), precision=settings.precision,
        spec=replace(spec, taps=kept), pixels=_pixel_facts(encoder),
        regions="crop_batch" if isinstance(encoder, ScenesEncoder) else "pictures", text=rules,
        prefix=encoder._image.prefix if isinstance(encoder, DualEncoder) else 1,
        image_layers=image_layers, text_layers=text_layers,
        graphs={traced.name: traced.signature for traced in work.graphs}, heads=stated, max_batch=settings.max_batch,
        least_cosine=LEAST_COSINES[settings.precision], files=_files(work.folder),
    )  # fmt: skip
    manifest.write(work.folder)
    return manifest


def _add_tower(
    work: _Work, names: tuple[str, str], modules: tuple[Traceable, Traceable], inputs: Mapping[str, Tensor]
) -> None:
    """Trace a tower: all of it, and the part that gives the global embedding alone.

    `modules`: the tower in float32, which the golden outputs are of, and in the precision of the export.
    """
    exact, module = modules
    given = {name: inputs[name] for name in module.inputs}
    whole = trace(names[1], module, given, module.outputs)
    if work.settings.precision == "int8":
        whole = quantised(whole)
    with torch.no_grad():
        wanted = dict(zip(module.outputs, exact(*given.values()), strict=True))
    parts = [part_of(whole, names[0], ("embedding",))]
    if len(module.outputs) > 1:
        parts.append(whole)
    for part in parts:
        work.graphs.append(part)
        work.golden |= {golden_input(part.name, name): given[name] for name in part.signature.inputs}
        work.golden |= {golden_output(part.name, name): wanted[name] for name in part.signature.outputs}


def _add_windows(work: _Work, traced: Encoder, pixels: Tensor) -> None:
    """Trace the tower as it reads windows, where it does; `traced` is the encoder in the precision of the export."""
    exact, module = traceable_windows(work.encoder), traceable_windows(traced)
    if exact is None or module is None:
        return
    given = {"pixels": pixels, "windows": _some_windows(work.encoder, len(pixels))}
    free = {0: BATCH, 1: "count"}
    axes = {"pixels": {0: BATCH}, "windows": free, "regions": free}
    graph = trace(WINDOWS, module, given, module.outputs, axes)
    graph = quantised(graph) if work.settings.precision == "int8" else graph
    work.graphs.append(graph)
    (wanted,) = exact(*given.values())
    work.golden |= {golden_input(WINDOWS, name): value for name, value in given.items()}
    work.golden[golden_output(WINDOWS, "regions")] = wanted


def _some_windows(encoder: Encoder, count: int) -> Tensor:
    """The whole grid, a part, one cell, and an empty window, as pictures with fewer windows than others have it."""
    rows, columns = encoder.spec.grid or (1, 1)
    cells = [[0, 0, columns, rows], [0, rows // 2, columns, rows], [columns - 1, 0, columns, 1], [0, 0, 0, 0]]
    return torch.tensor(cells, dtype=torch.int32).repeat(count, 1, 1)


def _add_head(work: _Work, head: Head, images: ImageFeatures, texts: TextFeatures) -> dict[str, Any]:
    """Write a head's file and trace its graphs, which stay in float32; what the manifest states of it."""
    parts = head_parts(work.encoder.spec.name, head, images, texts)
    for part in parts:
        traced = trace(part.name, part.module, part.inputs, part.outputs, part.axes)
        with torch.no_grad():
            wanted = dict(zip(part.outputs, part.module(*part.inputs.values()), strict=True))
        work.graphs.append(traced)
        work.golden |= {golden_input(part.name, name): part.inputs[name] for name in traced.signature.inputs}
        work.golden |= {golden_output(part.name, name): wanted[name] for name in traced.signature.outputs}
    file = f"heads/{head.name}.safetensors"
    head.save(work.folder / file)
    return {"file": file, "graphs": [part.name for part in parts]}


def _golden_inputs(work: _Work) -> tuple[Tensor, Tokens]:
    """Pictures of several shapes as pixels, and captions, one of them too long; the pictures are kept too."""
    rng = np.random.default_rng(0)
    pixels = []
    for number, (height, width) in enumerate(((60, 90), (96, 96), (130, 40))):
        # Blurred noise: it has edges and colours, and little that two versions of a filter round apart.
        small = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
        picture = small.resize((width, height), Image.Resampling.BICUBIC)
        pixels.append(work.encoder.preprocess(picture))
        work.golden[f"picture.{number}"] = torch.from_numpy(np.array(picture))
        work.golden[f"pixels.{number}"] = pixels[-1]
    # Not `encoder.tokenize`: the embedded model would warn of words it does not know.
    return torch.stack(pixels), tokenizer_of(work.encoder)(_GOLDEN_TEXTS)


def _with_own_golden(work: _Work, manifest: Manifest) -> Manifest:
    """Golden outputs of the quantised towers beside their source's, from which they lie apart on purpose."""
    found = load_exported(work.folder, device="cpu", accept_loss=True, verified=False)
    for key in (name for name in (*TOWERS, WINDOWS) if name in found.graphs):
        graph = found.graphs[key]
        inputs = {name: work.golden[golden_input(key, name)] for name in graph.signature.inputs}
        for name, value in graph.run(inputs).items():
            place = golden_output(key, name)
            work.golden[golden_source(key, name)], work.golden[place] = work.golden[place], value
    write_golden(work.folder / GOLDEN_FILE, work.golden)
    manifest = replace(manifest, files=_files(work.folder))
    manifest.write(work.folder)
    return manifest


def _pixel_facts(encoder: ScenesEncoder | DualEncoder) -> dict[str, Any]:
    if isinstance(encoder, ScenesEncoder):
        return {"policy": encoder.spec.resize, "fill": 0, "mode": "model"}
    rules = encoder._pixels
    if rules.mode == "source":
        raise ValueError(
            f"{encoder.spec.name}: resize='source' runs the source library's own code, which no folder can hold; "
            "export with a named policy"
        )
    return {"policy": rules.policy, "fill": rules.fill, "mode": rules.mode}


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Facts of every file but the manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(folder).as_posix(): file_facts(path) for path in paths}


def _compared(work: _Work, found: ExportedEncoder) -> dict[str, float]:
    """The lowest cosine of every output to the source's, at batches that nothing was traced with.

    Raises ValueError, naming the output, where it is below what the precision promises.
    """
    least = found.manifest.least_cosine
    rng = np.random.default_rng(1)
    cosines: dict[str, float] = {}
    for batch in _BATCHES:
        pictures = [Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)) for _ in range(batch)]
        texts = [" ".join(_GOLDEN_TEXTS[0].split()[: 1 + row]) for row in range(batch)]
        for name, (a, b) in _both(work.encoder, found, pictures, texts).items():
            cosines[name] = min(cosines.get(name, 1.0), lowest_cosine(b, a))
            if work.settings.precision != "int8" and not cosines[name] >= least:
                raise ValueError(
                    f"{work.encoder.spec.name}: output {name!r} of the export must have a cosine of at least {least} "
                    f"to its source's, got {cosines[name]:.6f} at batch {batch}"
                )
    return cosines


def _both(
    source: Encoder, found: ExportedEncoder, pictures: Sequence[Image.Image], texts: Sequence[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Every output of the source and of the export, by name."""
    pixels = torch.stack([source.preprocess(picture) for picture in pictures])
    tokens = tokenizer_of(source)(texts)
    manifest = found.manifest
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    # The tap `hidden` is a part of the last layer. The global graphs have the same embedding as all outputs beside it.
    taps: list[str | None] = [tap for tap in manifest.spec.taps if tap != "hidden"]
    for tap in taps or [None]:
        a, b = (x.encode_pixels(pixels, tap=tap, layers=manifest.image_layers) for x in (source, found))
        pairs["image embedding beside layers"] = a.embedding, b.embedding
        if a.patches is not None and b.patches is not None:
            pairs[f"patches.{tap}"] = a.patches, b.patches
        pairs |= {f"image hidden.{layer}": (state, b.hidden[layer]) for layer, state in a.hidden.items()}
    pairs["image embedding"] = a.embedding, found.encode_pixels(pixels).embedding
    if WINDOWS in manifest.graphs:
        windows = _some_windows(source, len(pixels))[:, 1:]
        pairs["regions"] = source.encode_windows(pixels, windows), found.encode_windows(pixels, windows)
    vectors = "tokens" in manifest.graphs.get(TEXT_ALL, manifest.graphs[TEXT]).outputs
    c, d = (
        x.encode_tokens(tokens, token_vectors=vectors, layers=manifest.text_layers) for x in (source, found)
    )
    pairs["text embedding beside layers"] = c.embedding, d.embedding
    pairs["text embedding"] = c.embedding, found.encode_tokens(tokens).embedding
    if c.tokens is not None and d.tokens is not None:
        pairs["tokens"] = c.tokens, d.tokens
    return pairs | {f"text hidden.{layer}": (state, d.hidden[layer]) for layer, state in c.hidden.items()}
