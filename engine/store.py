"""Frozen features on disk: written shard by shard, resumable, read by memory mapping in any order.

On disk a store is a folder::

    manifest.json             what the store holds: kind, rows, rows a shard, dtype, fingerprint, source
    shard-00000/              rows 0 .. shard_rows - 1
        facts.json            what is no tensor: captions, ids, the patch grid, …
        embedding.npy         one file for each part of the features, (rows, ...)
        hidden.6.npy
    shard-00001/ …
    filling.lock              held by the process that fills the store

A shard is written aside, flushed to the disk and renamed, so one that is there is whole, however the writer ended.
bfloat16 is kept as int16 of the same bits, since numpy files do not know it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from engine.atomic_files import flush_folder, write_text
from engine.features import Features, ImageFeatures, TextFeatures
from engine.file_lock import locked

# Since 2 a store of pictures that may be unreadable always says which are (`engine.training.encoded_pictures`).
FORMAT_VERSION = 2
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
KINDS: dict[str, type[ImageFeatures] | type[TextFeatures]] = {"images": ImageFeatures, "texts": TextFeatures}
# Shards held open at once: each of their files costs a descriptor.
OPEN_SHARDS = 64
LOCK = "filling.lock"
# What damaged files make of reading them.
_DAMAGE = (AttributeError, EOFError, FileNotFoundError, KeyError, TypeError, ValueError)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Manifest:
    """What a store holds.

    Attributes:
        kind: `"images"` or `"texts"`.
        rows: rows N of the whole store, whether written or not.
        fingerprint: of the encoder that makes them.
        source: what the rows are of, such as the data set with its settings; equal only for the same rows in order.
        dtype: floating-point parts but the embedding are kept in, `"float16"`, `"bfloat16"` or `"float32"`.
        shard_rows: rows of one shard; the last may have fewer.
    """

    kind: str
    rows: int
    fingerprint: str
    source: str = ""
    dtype: str = "float16"
    shard_rows: int = 2048

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, KINDS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise ValueError(f"FeatureStore: {name} must be one of {', '.join(known)}, got {value!r}")
        if self.rows < 1 or self.shard_rows < 1:
            raise ValueError(
                f"FeatureStore: rows and shard_rows must be at least 1, got {self.rows} and {self.shard_rows}"
            )


class FeatureStore(Generic[Features]):
    """Features of N rows on disk, for several threads and processes: all may read, one fills, others wait.

    Example:
        >>> import tempfile
        >>> from torch.nn.functional import normalize
        >>> store = FeatureStore.create(tempfile.mkdtemp(), Manifest("texts", rows=5, fingerprint="f", shard_rows=2))
        >>> store.fill(lambda start, stop: TextFeatures(normalize(torch.ones(stop - start, 4)), fingerprint="f"))
        >>> store[[4, 0]].embedding
        tensor([[0.5000, 0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000, 0.5000]])
    """

    def __init__(self, folder: Path, manifest: Manifest, format_version: int = FORMAT_VERSION) -> None:
        self.folder = folder
        self.manifest = manifest
        self.format_version = format_version
        self._open: OrderedDict[int, Features] = OrderedDict()
        self._layers: frozenset[int] | None = None

    @classmethod
    def create(cls, folder: str | PathLike[str], manifest: Manifest) -> FeatureStore[Any]:
        """A new store in `folder`, or the one that is there with what was written of it.

        Raises ValueError, naming what differs, when the folder holds another store.
        """
        path = Path(folder)
        if (path / "manifest.json").is_file():
            store = cls.open(path)
            held, wanted = asdict(store.manifest), asdict(manifest)
            different = [f"{key} {held[key]!r} in place of {wanted[key]!r}" for key in held if held[key] != wanted[key]]
            if different:
                raise ValueError(
                    f"FeatureStore: {path} holds other features ({', '.join(different)}); choose another folder or "
                    "remove it"
                )
            return store
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}, indent=1)
        write_text(path / "manifest.json", text)
        return cls(path, manifest)

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> FeatureStore[Any]:
        """The store in `folder`. Raises FileNotFoundError, or ValueError for a manifest that cannot be read."""
        path = Path(folder) / "manifest.json"
        if not path.is_file():
            raise FileNotFoundError(f"FeatureStore: {path} is missing; the folder holds no store")
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            version = int(held.pop("format_version"))
            manifest = Manifest(**held) if version <= FORMAT_VERSION else None
        except _DAMAGE as error:
            raise damaged(Path(folder), f"manifest.json: {error}") from error
        if manifest is None:
            raise ValueError(f"FeatureStore: {path} has format {version}, this version reads up to {FORMAT_VERSION}")
        return cls(Path(folder), manifest, version)

    def with_layers(self, layers: Sequence[int]) -> FeatureStore[Features]:
        """The same store, of whose hidden states those of these layers alone are read; the others cost nothing."""
        store: FeatureStore[Features] = FeatureStore(self.folder, self.manifest, self.format_version)
        store._layers = frozenset(layers)
        return store

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def kind(self) -> type[Features]:
        """`ImageFeatures` or `TextFeatures`."""
        return KINDS[self.manifest.kind]  # type: ignore[return-value]

    @property
    def shards(self) -> int:
        """Number of shards of the whole store."""
        return -(-self.manifest.rows // self.manifest.shard_rows)

    def missing(self) -> list[int]:
        """Numbers of the shards that are not written yet."""
        return [shard for shard in range(self.shards) if not self._place(shard).is_dir()]

    def fill(self, encode: Callable[[int, int], Features], *, progress: Progress | None = None) -> None:
        """Write every shard that is missing; `encode(start, stop)` gives the features of those rows.

        `progress` is called with (rows written, rows in all). What was written stays when this is interrupted, and
        the next call goes on there. While another process fills the store this waits, and then does what is left.
        Raises ValueError for features of another encoder, kind or number of rows, and for numbers that the dtype of
        the store cannot hold; OSError when the disk is full.
        """
        # What is whole may lie where nobody may write.
        if self.missing():
            with locked(self.folder / LOCK):
                self._fill(encode, progress)

    def _fill(self, encode: Callable[[int, int], Features], progress: Progress | None) -> None:
        for leftover in self.folder.glob("shard-*.part"):
            shutil.rmtree(leftover)
        size, rows = self.manifest.shard_rows, self.manifest.rows
        for shard in self.missing():
            start, stop = shard * size, min((shard + 1) * size, rows)
            features = encode(start, stop)
            self._check(features, stop - start)
            self._write(shard, features)
            if progress is not None:
                progress(min(rows, (self.shards - len(self.missing())) * size), rows)

    def __getitem__(self, rows: slice | Sequence[int] | Tensor) -> Features:
        """The chosen rows in their order, floating-point parts as float32.

        Raises IndexError for a row that the store does not have, ValueError for one that is not written yet or whose
        files are damaged.
        """
        if isinstance(rows, slice):
            index = torch.arange(len(self))[rows]
        else:
            index = torch.as_tensor(rows, dtype=torch.int64).cpu()
        if index.ndim != 1 or len(index) == 0:
            raise IndexError(f"FeatureStore: rows must be a list of at least one row, got shape {tuple(index.shape)}")
        outside = index[(index < -len(self)) | (index >= len(self))]
        if len(outside):
            raise IndexError(f"FeatureStore: row {int(outside[0])} is out of range for {len(self)} rows")
        index = torch.where(index < 0, index + len(self), index)
        of_shard = index // self.manifest.shard_rows
        parts, order = [], []
        for shard in of_shard.unique().tolist():
            places = (of_shard == shard).nonzero().flatten()
            parts.append(self._read(shard)[index[places] - shard * self.manifest.shard_rows])
            order.append(places)
        if len(parts) == 1:
            return _wide(parts[0])
        return _wide(self.kind.cat(parts)[torch.cat(order).argsort()])

    def _place(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}"

    def _check(self, features: Features, rows: int) -> None:
        wanted = (self.kind.__name__, rows, self.manifest.fingerprint)
        found = (type(features).__name__, len(features), features.fingerprint)
        if found != wanted:
            raise ValueError(
                f"FeatureStore: encode must give {wanted[0]} of {wanted[1]} rows by {wanted[2]!r}, got {found[0]} of "
                f"{found[1]} rows by {found[2]!r}"
            )

    def _write(self, shard: int, features: Features) -> None:
        tensors, facts = _taken_apart(features)
        aside = self.folder / f"shard-{shard:05d}.part"
        aside.mkdir()
        for name, tensor in tensors.items():
            with (aside / f"{name}.npy").open("wb") as file:
                np.save(file, self._narrow(name, tensor))
                file.flush()
                os.fsync(file.fileno())
        _write_text(aside / "facts.json", json.dumps(facts))
        flush_folder(aside)
        aside.rename(self._place(shard))
        flush_folder(self.folder)

    def _narrow(self, name: str, tensor: Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu().contiguous()
        # Embeddings are small, and features want theirs in float32.
        if tensor.is_floating_point() and name != "embedding":
            narrow = tensor.to(DTYPES[self.manifest.dtype])
            if not bool(narrow.isfinite().all()):
                raise ValueError(
                    f"FeatureStore: {name} must hold finite numbers within {self.manifest.dtype}, got up to "
                    f"{float(tensor.abs().max()):g}; use dtype='bfloat16' or 'float32'"
                )
            tensor = narrow.view(torch.int16) if narrow.dtype == torch.bfloat16 else narrow
        return tensor.numpy()

    def _read(self, shard: int) -> Features:
        """The shard, its tensors mapped and not read."""
        held = self._open.get(shard)
        if held is not None:
            return held
        place = self._place(shard)
        if not place.is_dir():
            raise ValueError(
                f"FeatureStore: rows {shard * self.manifest.shard_rows} and on are not written yet; fill the store"
            )
        try:
            features = self._loaded(place)
            rows = min(self.manifest.shard_rows, len(self) - shard * self.manifest.shard_rows)
            if len(features) != rows:
                raise ValueError(f"{len(features)} rows in place of {rows}")
        except _DAMAGE as error:
            raise damaged(place, error) from error
        self._open[shard] = features
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return features

    def _loaded(self, place: Path) -> Features:
        values: dict[str, Any] = json.loads((place / "facts.json").read_text(encoding="utf-8"))
        values = {name: _tuples(value) for name, value in values.items()}
        values["hidden"] = {}
        for path in sorted(place.glob("*.npy")):
            name, _, layer = path.stem.partition(".")
            if layer and self._layers is not None and int(layer) not in self._layers:
                continue
            tensor = self._mapped(path)
            if layer:
                values["hidden"][int(layer)] = tensor
            else:
                values[name] = tensor
        values["hidden"] = dict(sorted(values["hidden"].items()))
        return self.kind(**values)

    def _mapped(self, path: Path) -> Tensor:
        # Copy on write: torch takes no read-only memory without a warning, and what is mapped is never written.
        try:
            tensor = torch.from_numpy(np.load(path, mmap_mode="c"))
        except ValueError:
            # Nothing can be mapped of an array without entries, such as the segments of captions without any.
            tensor = torch.from_numpy(np.load(path))
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def damaged(folder: Path, why: object) -> ValueError:
    """The error of a store, or of a shard of one, whose files cannot be read."""
    return ValueError(f"FeatureStore: {folder} is damaged ({why}); remove this folder, it is made again")


def _taken_apart(features: ImageFeatures | TextFeatures) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by file name, and what is no tensor."""
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for item in fields(features):
        value = getattr(features, item.name)
        if isinstance(value, Tensor):
            tensors[item.name] = value
        elif item.name == "hidden":
            tensors |= {f"hidden.{layer}": state for layer, state in value.items()}
        elif value is not None:
            facts[item.name] = value
    return tensors, facts


def _wide(features: Features) -> Features:
    """The same with floating-point parts as float32."""
    changes: dict[str, Any] = {"hidden": {layer: state.float() for layer, state in features.hidden.items()}}
    for item in fields(features):
        value = getattr(features, item.name)
        if isinstance(value, Tensor) and value.is_floating_point():
            changes[item.name] = value.float()
    return replace(features, **changes)


def _tuples(value: Any) -> Any:
    """JSON lists back to the tuples they were."""
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
