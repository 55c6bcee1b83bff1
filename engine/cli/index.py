"""The commands that keep an index: create, delete, stats, verify, compact."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from engine.cli.options import OptionalFile, Placed, Shared, check_text, scorer_named
from engine.cli.progress import counting
from engine.cli.tables import report, show_json, show_line, show_text_table

if TYPE_CHECKING:
    from engine.retrieval.index import Index
    from engine.scorers.base import Scorer

Folder = Annotated[Positional[Path], arg(metavar="INDEX", help="Folder of the index.")]
Where = Annotated[str | None, arg(metavar="CONDITION", help_behavior_hint="(optional)")]
# What `--vectors none` asks for: global embeddings alone.
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Create(Placed):
    """Make an empty index."""

    index: Folder
    model: str = "scenes"
    """Name of the model; `peaksim models` lists them."""
    vectors: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KIND")] = ()
    """What is kept beside the global embedding, repeatable: windows (the default; for sgi), patches (max_sim), head
    (max_sim_head), a scorer with its options such as "sgi?crops=native", or none."""
    store: Literal["int8", "bf16"] = "int8"
    """How vectors are kept."""
    ann: str = "auto"
    """How candidates are found in a large index: auto or a FAISS factory string."""

    def run(self) -> int:
        """Make the folder."""
        from engine.retrieval.index import Index

        made = Index.create(
            self.index, model=self.load(self.model), vectors=kinds(self.vectors), store=self.store, ann=self.ann
        )
        show_stats(made, as_json=self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class Delete(Shared):
    """Delete pictures from an index."""

    index: Folder
    ids: Annotated[Positional[tuple[str, ...]], arg(metavar="[ID...]", help="What to delete.")] = ()
    ids_file: OptionalFile = None
    """File of ids, one a line."""
    where: Where = None
    """Also delete what fulfils this condition, e.g. "year < 2000"."""

    def run(self) -> int:
        """Delete and say how many went."""
        from engine.retrieval.filters import rows_where

        opened = open_index(self.index)
        ids = list(dict.fromkeys([*self.ids, *_lines(self.ids_file)]))
        if self.where is not None:
            check_text("--where", [self.where])
            snapshot = opened.snapshot
            rows = (rows_where(snapshot, self.where) & snapshot.alive).nonzero()[0]
            ids = list(dict.fromkeys([*ids, *snapshot.ids(rows)]))
        elif not ids:
            raise ValueError("give at least one id, --ids-file FILE or --where CONDITION")
        try:
            gone = opened.delete(ids) if ids else 0
        except KeyError as error:
            raise ValueError(error.args[0]) from error
        if self.json:
            show_json({"index": str(self.index), "deleted": gone, "images": len(opened)})
        else:
            show_line(f"deleted {gone}, {len(opened)} left; `peaksim index compact` frees their space")
        return 0


@dataclass(frozen=True, kw_only=True)
class Stats(Shared):
    """Say what an index holds."""

    index: Folder

    def run(self) -> int:
        """Print the facts."""
        show_stats(open_index(self.index), as_json=self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify(Shared):
    """Look at every byte of an index."""

    index: Folder

    def run(self) -> int:
        """Print what is wrong; 1 when something is."""
        from engine.retrieval.errors import IndexDamaged

        try:
            opened = open_index(self.index)
            with counting("MiB") as advance:
                found = opened.verify(progress=advance)
        except IndexDamaged as error:
            found = [str(error)]
        if self.json:
            show_json({"index": str(self.index), "faults": found})
        else:
            for fault in found:
                show_line(fault)
            show_line(f"{len(found)} faults" if found else "all as it was written")
        return 1 if found else 0


@dataclass(frozen=True, kw_only=True)
class Compact(Shared):
    """Free what deleted pictures take, and join small segments."""

    index: Folder

    def run(self) -> int:
        """Compact and say what it freed."""
        opened = open_index(self.index)
        report(f"compacting {len(opened)} images")
        with counting("images") as advance:
            freed = opened.compact(progress=advance)
        if self.json:
            show_json({"index": str(self.index), "freed_bytes": freed, "images": len(opened)})
        else:
            show_line(f"freed {in_bytes(freed)}; {len(opened)} images in {opened.stats().segments} segments")
        return 0


def kinds(names: tuple[str, ...]) -> tuple[str | Scorer, ...]:
    """Kinds of vectors as `Index.create` takes them. Raises ValueError for ``none`` beside others."""
    if NONE in names:
        if len(names) > 1:
            raise ValueError(f"--vectors: none must stand alone, got {' and '.join(names)}")
        return ()
    return tuple(scorer_named(name) if "?" in name else name for name in names) or ("windows",)


def open_index(folder: Path) -> Index:
    """The index in a folder; its model is loaded when it is needed."""
    from engine.retrieval.index import Index

    return Index.open(folder)


def show_stats(opened: Index, *, as_json: bool) -> None:
    """Print what an index holds."""
    facts = asdict(opened.stats())
    if as_json:
        show_json({"index": str(opened.path), **facts})
        return
    rows = [(name.replace("_", " "), _in_words(name, value)) for name, value in facts.items()]
    show_text_table(("fact", str(opened.path)), rows)


def in_bytes(size: int) -> str:
    """A number of bytes for people.

    >>> in_bytes(5_000_000)
    '4.8 MiB'
    """
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _in_words(name: str, value: object) -> str:
    if name == "size_bytes":
        assert isinstance(value, int)
        return in_bytes(value)
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_in_words('', held)}" for key, held in value.items()) or "none"
    return str(value)


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    return [line for line in file.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines() if line]
