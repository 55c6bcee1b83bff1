"""``peaksim export``: a model as a folder of graphs, checked by itself; and such a folder checked again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from engine.choices import Precision, Provider
from engine.cli.options import Shared
from engine.cli.tables import report, show_json, show_line, show_table

if TYPE_CHECKING:
    from engine.encoders.export_manifest import Manifest
    from engine.encoders.golden import GoldenRow

Optional = "(optional)"


@dataclass(frozen=True, kw_only=True)
class Export(Shared):
    """Write a model as ONNX graphs, which `--model OUT` runs through ONNX Runtime, or check such a folder.

    `peaksim export MODEL OUT`, `peaksim export --check OUT`, `peaksim export --warm tensorrt OUT`.
    """

    model: Annotated[Positional[str], arg(metavar="MODEL", help="Name of the model, or the folder to check or warm.")]
    out: Annotated[
        Positional[Path | None],
        arg(metavar="[OUT]", help="Folder to write, new or empty.", help_behavior_hint=Optional),
    ] = None
    precision: Precision = "fp32"
    """fp32; fp16, for GPUs; int8, for CPUs."""
    heads: Annotated[tuple[str, ...], arg(metavar="HEAD [HEAD ...]", help_behavior_hint=Optional)] = ()
    """Trained heads to export too: files that `peaksim train` wrote, or names of those shipped for `scenes`."""
    taps: Annotated[tuple[str, ...], arg(metavar="TAP [TAP ...]", help_behavior_hint=Optional)] = ()
    """Patch taps to export, by default the first in the text's space; `peaksim models NAME` lists them."""
    image_layers: Annotated[tuple[int, ...], arg(help_behavior_hint=Optional)] = ()
    """Image blocks whose states are wanted beside those that heads read by default."""
    text_layers: Annotated[tuple[int, ...], arg(help_behavior_hint=Optional)] = ()
    """Text blocks, likewise."""
    max_batch: int = 64
    """Largest batch that TensorRT builds engines for."""
    cost_items: int = 100
    """Items of each category of the controlled benchmark on which the cost of int8 is measured."""
    check: bool = False
    """Run every graph of the folder on its golden inputs and print how far it lies from what was stored."""
    warm: Annotated[Literal["tensorrt"] | None, arg(help_behavior_hint=Optional)] = None
    """Build the engines of TensorRT for this GPU into the folder."""
    provider: Annotated[Provider | None, arg(help_behavior_hint=Optional)] = None
    """What --check runs the graphs on; otherwise that of the device."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; of --check and --warm."""

    def run(self) -> int:
        """Do it and print the table of all outputs."""
        from engine.encoders.export_manifest import read_manifest
        from engine.export.checking import check_export

        folder = self._folder()
        provider = self.provider
        if self.warm is not None:
            from engine.export.warming import warm_tensorrt

            warm_tensorrt(folder, device=self.device, told=report)
            provider = "tensorrt"
        rows = check_export(folder, device=self.device, provider=provider)
        self._show(folder, rows, read_manifest(str(folder), folder))
        return 0

    def _folder(self) -> Path:
        """The folder to look at, written first where a model was named."""
        if self.out is None:
            if not (self.check or self.warm):
                raise ValueError("export: name the model and the folder to write: peaksim export MODEL OUT")
            self._refuse_unused()
            return Path(self.model)
        from engine.export.folder import ExportSettings, export_model

        settings = ExportSettings(
            precision=self.precision,
            heads=self.heads,
            taps=self.taps,
            image_layers=self.image_layers,
            text_layers=self.text_layers,
            max_batch=self.max_batch,
        )
        cost = None
        if self.precision == "int8":
            from engine.results.export_cost import group_score_cost

            cost = group_score_cost(self.cost_items, report)
        return export_model(self.model, self.out, settings, cost=cost)

    def _refuse_unused(self) -> None:
        """Raises ValueError for options of a new folder where there is one already."""
        for name in ("precision", "heads", "taps", "image_layers", "text_layers", "max_batch", "cost_items"):
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"export: --{name.replace('_', '-')} is for a folder to be written (peaksim export MODEL OUT), got "
                    f"it for {self.model}, which is only checked"
                )

    def _show(self, folder: Path, rows: list[GoldenRow], manifest: Manifest) -> None:
        cost, least = manifest.cost, manifest.least_cosine
        if self.json:
            outputs = [asdict(row) for row in rows]
            show_json({"folder": str(folder), "outputs": outputs, "least_cosine": least, "cost": cost})
            return
        # Of int8 alone: beside a cosine to the source, one to what the export gave when it was written.
        own = any(row.own_cosine is not None for row in rows)
        header = ("output", "max abs difference", "cosine", *(("own cosine",) if own else ()), "provider", "latency")
        show_table(header, [_cells(row, own=own) for row in rows], title=str(folder))
        show_line(_bound(manifest, own=own))
        if cost is not None:
            _show_cost(cost)
        accepted = cost is None or cost["within_interval"]
        # Absolute: a folder beside us may be called as a model is.
        show_line(f"use it as --model {folder.absolute()}{'' if accepted else '?precision=int8'}")


def _cells(row: GoldenRow, *, own: bool) -> tuple[str, ...]:
    """A row of the table; `own`: with the column of int8."""
    beside = ("" if row.own_cosine is None else f"{row.own_cosine:.6f}",) if own else ()
    return (
        f"{row.graph} {row.output}", f"{row.max_abs:.1e}", f"{row.cosine:.6f}", *beside, row.provider,
        f"{row.latency_ms:.2f} ms",
    )  # fmt: skip


def _bound(manifest: Manifest, *, own: bool) -> str:
    """What the rows were held against."""
    precision, least = manifest.precision, manifest.least_cosine
    if own:
        return (
            f"{precision}: every own cosine, to what the export gave when it was written, is at least {least}; the "
            "difference and the other cosine are to the source in fp32, from which it lies apart on purpose: its cost "
            "is in group score"
        )
    if precision == "int8":
        return f"{precision}: every cosine, to what the export gave when it was written, is at least {least}"
    return f"{precision}: every cosine, to the source in fp32, is at least {least}"


def _show_cost(cost: Mapping[str, Any]) -> None:
    """Group scores of source and export in per cent, and what each takes for a batch."""
    rows = []
    for row in cost["rows"]:
        interval = f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"
        inside = "yes" if row["export"] >= row["low"] else "no"
        scores = (f"{100 * row['source']:.1f}", interval, f"{100 * row['export']:.1f}")
        rows.append((f"{row['scorer']} {row['category']}", *scores, inside))
    header = ("group score", "source", "95 % interval", "export", "within")
    show_table(header, rows, title=f"cost on {cost['benchmark']}")
    taken = cost["milliseconds"]
    ratio = f"{taken['source'] / taken['export']:.2f} times as fast"
    show_line(f"a batch of 8: source {taken['source']:.1f} ms, export {taken['export']:.1f} ms ({ratio})")
