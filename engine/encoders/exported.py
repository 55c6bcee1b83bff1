"""Encoders that `peaksim export` wrote: ONNX graphs run by ONNX Runtime, everything else read from their folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.choices import CropMode, Fill
from engine.encoders.base import Encoder, Tokens
from engine.encoders.export_manifest import GOLDEN_FILE, Manifest, read_manifest
from engine.encoders.exported_text import read_exported_tokenizer
from engine.encoders.golden import GoldenRow, compare, read_golden, refuse_far
from engine.encoders.onnx_graph import Graph
from engine.encoders.onnx_providers import PROVIDERS, check_provider, onnx_runtime, open_session
from engine.encoders.pixels import PixelRules
from engine.encoders.placement import place
from engine.encoders.region_inputs import RegionInputs
from engine.encoders.tensorrt_engines import tensorrt_options
from engine.features import ImageFeatures, TextFeatures

IMAGE, IMAGE_ALL, TEXT, TEXT_ALL = "image_global", "image_all", "text_global", "text_all"
WINDOWS = "image_windows"
TOWERS = (IMAGE, IMAGE_ALL, TEXT, TEXT_ALL)
_PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16}


class Placement(NamedTuple):
    """Where features lie, and what runs the graphs."""

    device: torch.device
    provider: str


class ExportedEncoder(Encoder):
    """An exported encoder; made by `load_exported`. Its features are those of the encoder that was exported.

    Attributes:
        folder: where it lies.
        manifest: what the folder states.
        provider: what runs its graphs.
        graphs: all of them by name, those of heads too.
    """

    def __init__(self, name: str, folder: Path, manifest: Manifest, placement: Placement) -> None:
        self.folder, self.manifest = folder, manifest
        self.device, self.provider = placement
        self.spec = replace(manifest.spec, name=name)
        self._tokenizer = read_exported_tokenizer(name, folder, manifest.text)
        facts = manifest.pixels
        self._pixels = PixelRules(
            size=self.spec.image_size, mean=self.spec.mean, std=self.spec.std, policy=facts["policy"],
            interpolation=self.spec.interpolation, source=_no_source, fill=int(facts["fill"]), mode=facts["mode"],
        )  # fmt: skip
        self._stamps = {file: _stamp(folder / file) for file in manifest.files}
        self.graphs = {key: self._graph(key) for key in manifest.graphs}

    def check_unchanged(self) -> None:
        """See that the files are those that were loaded: some are read only when a scorer first asks.

        Raises ValueError naming one that was changed or is gone.
        """
        for file, stamp in self._stamps.items():
            if _stamp(self.folder / file) != stamp:
                raise ValueError(
                    f"{self.spec.name}: {self.folder / file} must stay as it was when the model was loaded, got one "
                    "that was changed, moved or removed since; load the folder again"
                )

    def verify(self, *, runs: int = 1) -> list[GoldenRow]:
        """Run every graph on its golden inputs, here and now; the rows of all outputs.

        Raises ValueError for pictures that become other pixels here, for numbers that are not finite and for an output
        whose cosine to the stored one is too low, by name.
        """
        golden = read_golden(self.spec.name, self.folder / GOLDEN_FILE)
        self._verify_pixels(golden)
        rows: list[GoldenRow] = []
        for key, graph in self.graphs.items():
            there = {name: value.to(self.device) for name, value in golden.items() if name.startswith(f"{key}/")}
            rows += compare(key, graph, there, self.provider, runs=runs)
            if key in (IMAGE_ALL, TEXT_ALL, WINDOWS):
                # It holds the weights of the global graph a second time: whoever needs it opens it.
                graph.close()
        refuse_far(self.spec.name, rows, self.manifest.least_cosine)
        return rows

    def preprocess(self, image: Image.Image) -> Tensor:
        return self._pixels(image)

    def encode_pixels(self, pixels: Tensor, *, tap: str | None = None, layers: Sequence[int] = ()) -> ImageFeatures:
        self._check_tap(tap)
        self._check_held("image", layers, self.spec.image_layers, self.manifest.image_layers)
        hidden_tap = tap == "hidden"
        wanted = {layer: f"hidden.{layer}" for layer in layers}
        last = f"hidden.{self.spec.image_layers}"
        read = ["embedding", *wanted.values()]
        if tap is not None:
            read.append(last if hidden_tap else f"patches.{tap}")
        found = self.graphs[IMAGE if len(read) == 1 else IMAGE_ALL].run({"pixels": pixels.to(self.device)}, read)
        patches = None
        if tap is not None:
            patches = found[last][:, self.manifest.prefix :] if hidden_tap else found[f"patches.{tap}"]
        return ImageFeatures(
            embedding=found["embedding"],
            patches=patches,
            grid=self.spec.grid if tap is not None else None,
            aligned=tap is not None and self.spec.taps[tap],
            tap=tap or "",
            hidden={layer: found[name] for layer, name in wanted.items()},
            fingerprint=self.spec.fingerprint,
        )

    def encode_windows(self, pixels: Tensor, windows: Tensor) -> Tensor:
        if WINDOWS not in self.graphs:
            raise ValueError(
                f"{self.spec.name}: mode='windows' (crops='windows') needs a graph that was not exported: either the "
                "image tower has neither class token nor attention-pooling head, or the folder is of an earlier "
                "version; score with crops='native' or 'rescaled'"
            )
        given = {"pixels": pixels.to(self.device), "windows": windows.to(self.device)}
        return self.graphs[WINDOWS].run(given)["regions"]

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        return self._tokenizer(texts)

    def encode_tokens(self, tokens: Tokens, *, token_vectors: bool = False, layers: Sequence[int] = ()) -> TextFeatures:
        self._check_held("text", layers, self.spec.text_layers, self.manifest.text_layers)
        read = ["embedding", *(f"hidden.{layer}" for layer in layers)]
        if token_vectors:
            self._check_tokens()
            read.append("tokens")
        inputs = {"ids": tokens.ids.to(self.device), "end": tokens.end.to(self.device)}
        found = self.graphs[TEXT if len(read) == 1 else TEXT_ALL].run(inputs, read)
        return TextFeatures(
            embedding=found["embedding"],
            tokens=found.get("tokens"),
            token_mask=tokens.word_mask.to(self.device),
            attention_mask=tokens.attention_mask.to(self.device),
            end=inputs["end"],
            hidden={layer: found[f"hidden.{layer}"] for layer in layers},
            truncated=tokens.truncated.to(self.device),
            token_texts=tokens.token_texts,
            texts=tokens.texts,
            fingerprint=self.spec.fingerprint,
        )

    def _encode_regions(
        self, images: Sequence[Image.Image], boxes: Sequence[np.ndarray], mode: CropMode, fill: Fill, batch_size: int
    ) -> Tensor:
        if self.manifest.regions != "crop_batch":
            return super()._encode_regions(images, boxes, mode, fill, batch_size)
        inputs = RegionInputs.of(images, boxes, mode=mode, fill=fill)
        done = [self.encode_pixels(x.to(self.device)).embedding for x in inputs.batches(self.spec, batch_size)]
        return torch.cat(done)[torch.tensor(inputs.rows, device=self.device)]

    def _graph(self, key: str) -> Graph:
        # Beyond the largest batch that its engine was built for TensorRT would build another one.
        max_batch = self.manifest.max_batch if self.provider == "tensorrt" and key in TOWERS else 0
        return Graph(self.spec.name, self.manifest.graphs[key], partial(self._open, key), max_batch=max_batch)

    def _open(self, key: str) -> Any:
        self.check_unchanged()
        number, options, provider = self.device.index or 0, None, self.provider
        path = self.folder / self.manifest.graphs[key].file
        if provider == "tensorrt" and key in TOWERS:
            options = tensorrt_options(self.spec.name, self.folder, self.manifest, key, device=number)
        elif provider == "tensorrt":
            # Heads are small, and free in more than the batch: an engine for each shape would be built.
            provider = "cuda"
        half = self.manifest.precision == "fp16"
        return open_session(self.spec.name, path, provider, device=number, options=options, half=half)

    def _check_held(self, tower: str, layers: Sequence[int], count: int, held: Sequence[int]) -> None:
        self._check_layers(tower, layers, count)
        for layer in layers:
            if layer not in held:
                known = ", ".join(map(str, held)) or "none"
                raise ValueError(
                    f"{self.spec.name}: {tower} layer {layer} was not exported (held: {known}); export "
                    f"{self.manifest.source!r} again with --{tower}-layers"
                )

    def _check_tokens(self) -> None:
        if TEXT_ALL not in self.graphs or "tokens" not in self.graphs[TEXT_ALL].signature.outputs:
            raise ValueError(
                f"{self.spec.name}: token vectors were wanted, but this text tower can only be read at its end"
            )

    def _verify_pixels(self, golden: Mapping[str, Tensor]) -> None:
        """Golden pictures must become the pixels that they became where the model was exported."""
        shown = [name for name in golden if name.startswith("picture.")]
        for name in sorted(shown):
            picture = Image.fromarray(golden[name].numpy())
            found, wanted = self.preprocess(picture), golden[name.replace("picture.", "pixels.")]
            # One level of 255: versions of Pillow round differently.
            allowed = 1.01 / (255 * min(self.spec.std))
            apart = float((found - wanted).abs().max()) if found.shape == wanted.shape else float("inf")
            if not apart <= allowed:
                raise ValueError(
                    f"{self.spec.name}: golden picture {name} must become the pixels it became where the model was "
                    f"exported, within {allowed:.4f}, got {apart:.4f}: this installation resizes otherwise"
                )


def load_exported(
    folder: Path,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    provider: str | None = None,
    precision: str | None = None,
    accept_loss: bool = False,
    verified: bool = True,
) -> ExportedEncoder:
    """An exported model, its files, tokenizer, pixels and golden vectors checked on the provider it will run on.

    The network is never touched.

    Args:
        folder: which `peaksim export` wrote.
        device: where features lie; `"auto"` takes CUDA where torch and ONNX Runtime both have it.
        dtype: `"auto"`, or that of the export.
        provider: `"cpu"`, `"cuda"` or `"tensorrt"`; None takes that of the device.
        precision: what the export must be; an int8 one that costs accuracy is loaded only if `"int8"` is named.
        accept_loss: load such a one without that.
        verified: see that golden vectors come out; otherwise the caller does (`ExportedEncoder.verify`).

    Raises:
        FileNotFoundError: naming a file that is missing.
        ImportError: ONNX Runtime or its provider is missing; it says how to get it.
        ValueError: a file that was changed, another precision, an output that lies too far from the golden one, and
            TensorRT without engines for this device.
    """
    name = str(folder)
    manifest = read_manifest(name, folder)
    _check_precision(name, manifest, dtype, precision)
    if precision is None and not accept_loss:
        _refuse_loss(name, manifest)
    placement = _placed(name, device, provider)
    if placement.provider != "cpu" and manifest.precision == "int8":
        raise ValueError(f"{name}: int8 is for CPUs, got provider {placement.provider!r}; export fp16 for GPUs")
    # Graphs are opened when they are first wanted, from whatever working directory.
    encoder = ExportedEncoder(name, folder.absolute(), manifest, placement)
    if verified:
        encoder.verify()
    return encoder


def _placed(name: str, device: torch.device | str, provider: str | None) -> Placement:
    if provider is not None:
        check_provider(name, provider)
    if device == "auto" and (
        provider == "cpu" or PROVIDERS["cuda"] not in onnx_runtime(name).get_available_providers()
    ):
        device = "cpu"
    chosen = place(device, "float32")[0]
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: an exported model runs on 'cpu' or 'cuda', got device {str(device)!r}")
    wanted = provider or chosen.type
    check_provider(name, wanted)
    if wanted == "cpu" and chosen.type == "cuda":
        raise ValueError(f"{name}: provider 'cpu' leaves features on the CPU, got device {str(device)!r}")
    return Placement(chosen, wanted)


def _check_precision(
    name: str, manifest: Manifest, dtype: torch.dtype | str, precision: str | None
) -> None:
    held = manifest.precision
    named = str(dtype).removeprefix("torch.")
    if named not in ("auto", str(_PRECISIONS.get(held, "int8")).removeprefix("torch.")):
        raise ValueError(f"{name}: the model was exported in {held}, got dtype={named!r}; leave it at 'auto'")
    if precision not in (None, held):
        raise ValueError(f"{name}: precision {precision!r} was wanted, the model was exported in {held}")


def _refuse_loss(name: str, manifest: Manifest) -> None:
    cost = manifest.cost
    if manifest.precision == "int8" and cost is None:
        raise ValueError(
            f"{name}: what int8 costs here was not measured (`peaksim export --precision int8` does); say "
            f"'{name}?precision=int8' to take it all the same"
        )
    if cost is not None and not cost["within_interval"]:
        raise ValueError(
            f"{name}: int8 costs group score on the controlled benchmark beyond its confidence interval "
            f"({json.dumps(cost['worst'])}); say '{name}?precision=int8' to take it all the same"
        )


def _stamp(path: Path) -> tuple[int, int] | None:
    """Size and time of the last change of a file, None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _no_source(image: Image.Image) -> Tensor:
    raise AssertionError("an export resizes by a named policy")
