"""The manifest of an exported model: what its folder holds, and the checks that it is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.atomic_files import write_text
from engine.choices import Precision
from engine.encoders.base import EncoderSpec
from engine.encoders.onnx_graph import Port, Signature
from engine.encoders.settings import read_object

MANIFEST_FILE = "manifest.json"
GOLDEN_FILE = "golden.safetensors"
KIND = "peaksim export"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What an exported folder states about itself.

    Attributes:
        source: name of the model that was exported.
        made_by: version of peaksim.
        precision: `"fp32"`, `"fp16"` or `"int8"`.
        spec: facts of the encoder, its fingerprint among them.
        pixels: fields of `PixelRules` that can be stored.
        regions: `"crop_batch"` or `"pictures"`: how regions of a picture become inputs.
        text: kind of the tokenizer and its rules, see `engine.encoders.exported_text`.
        prefix: positions before the first patch in hidden states of images.
        image_layers, text_layers: 1-indexed layers whose states the graphs give.
        graphs: by name.
        heads: trained heads by the name of their kind; each states its file and its graphs.
        max_batch: largest batch that engines of TensorRT are built for.
        least_cosine: of golden outputs; below it the folder is refused.
        cosines: lowest cosine of each output to the source model, as the exporter measured it.
        cost: of int8: group scores of the source and of the export; None for the others.
        files: size and SHA-256 of every other file, by its path within the folder.
    """

    source: str
    made_by: str
    precision: Precision
    spec: EncoderSpec
    pixels: Mapping[str, Any]
    regions: str
    text: Mapping[str, Any]
    prefix: int
    image_layers: tuple[int, ...]
    text_layers: tuple[int, ...]
    graphs: Mapping[str, Signature]
    heads: Mapping[str, Mapping[str, Any]]
    max_batch: int
    least_cosine: float
    cosines: Mapping[str, float] = field(default_factory=dict)
    cost: Mapping[str, Any] | None = None
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """Short digest of everything the manifest states."""
        return _digest(_plain(self))

    def write(self, folder: Path) -> None:
        """Write `manifest.json`, with its own digest in it."""
        plain = _plain(self)
        head = {"kind": KIND, "format_version": FORMAT_VERSION, "digest": _digest(plain)}
        write_text(folder / MANIFEST_FILE, json.dumps({**head, **plain}, indent=1))


def is_export(folder: Path) -> bool:
    """Whether a folder states that it is an exported model.

    >>> is_export(Path("/"))
    False
    """
    path = folder / MANIFEST_FILE
    try:
        return path.is_file() and KIND in path.read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        return False


def read_manifest(who: str, folder: Path) -> Manifest:
    """The manifest of a folder, whose files must be those it states.

    Raises:
        FileNotFoundError: naming a file that is missing.
        ValueError: naming a file that was changed, or a manifest of another format or that was changed.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{who}: {path} is missing; `peaksim export` writes it")
    plain = read_object(who, path)
    kind, version, digest = (plain.pop(name, None) for name in ("kind", "format_version", "digest"))
    if kind != KIND or version != FORMAT_VERSION:
        raise ValueError(
            f"{who}: {path} must be of kind {KIND!r} and format {FORMAT_VERSION}, got {kind!r} of format {version}; "
            "export the model again"
        )
    if digest != _digest(plain):
        raise ValueError(f"{who}: {path} was changed since it was written: it states digest {digest}")
    try:
        manifest = _read(plain)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{who}: {path} is damaged ({error!r})") from error
    for name, facts in manifest.files.items():
        _check_file(who, folder / name, facts)
    return manifest


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as a manifest states them."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"size_bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _check_file(who: str, path: Path, facts: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{who}: {path} is missing; the folder is one unit, copy all of it")
    if path.stat().st_size != facts["size_bytes"]:
        raise ValueError(
            f"{who}: {path} must be of {facts['size_bytes']} bytes, got {path.stat().st_size}: it is not the file that "
            "was exported"
        )
    found = file_facts(path)["sha256"]
    if found != facts["sha256"]:
        raise ValueError(
            f"{who}: {path} was changed since it was exported: SHA-256 {found[:16]}…, wanted {facts['sha256'][:16]}…"
        )


def _plain(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON reads it back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(manifest)))
    return plain


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def _read(plain: dict[str, Any]) -> Manifest:
    facts: dict[str, Any] = dict(plain["spec"])
    facts |= {name: tuple(value) for name, value in facts.items() if isinstance(value, list)}
    graphs = {
        name: Signature(graph["file"], _ports(graph["inputs"]), _ports(graph["outputs"]))
        for name, graph in plain["graphs"].items()
    }
    layers = {name: tuple(plain[name]) for name in ("image_layers", "text_layers")}
    unknown = set(plain) - {item.name for item in fields(Manifest)}
    if unknown:
        raise ValueError(f"it states what is not known: {', '.join(sorted(unknown))}")
    return Manifest(**{**plain, **layers, "spec": EncoderSpec(**facts), "graphs": graphs})


def _ports(plain: Mapping[str, Any]) -> dict[str, Port]:
    return {name: Port(port["dtype"], tuple(port["shape"])) for name, port in plain.items()}
