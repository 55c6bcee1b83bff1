"""`peaksim diagnose generator`: what embeddings of captions look like as pictures."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cli.options import OptionalFile, PlacedModel
from engine.cli.outputs import check_file
from engine.cli.progress import steps
from engine.cli.tables import show_json, show_markdown


@dataclass(frozen=True, kw_only=True)
class DiagnoseGenerator(PlacedModel):
    """Draw captions that deny, from embeddings as they are and corrected, and say what the pictures show."""

    generator: OptionalFile = None
    """A generator of this model; by default the one shipped for scenes."""
    judge: OptionalFile = None
    """A judge of its pictures; by default the shipped one."""
    head: OptionalFile = None
    """A peakpatch head of this model; by default the one shipped for scenes."""
    prompts: int = 100
    """Captions of each kind."""
    noises: int = 2
    """Pictures of each caption."""
    sheet: OptionalFile = None
    """Draw the first prompts' pictures here (.png)."""

    def run(self) -> int:
        """Print the table."""
        from engine.results.generator import Files, draw, prompts, sheet, table

        check_file("--sheet", self.sheet, suffixes=(".png",))
        engine = self.engine()
        files = Files.of(self.generator, self.judge, self.head)
        parts = files.load(engine.spec.fingerprint, engine.encoder.device)
        asked = prompts(self.prompts)
        with steps("captions") as told:
            values = draw(engine, parts, asked, noises=self.noises, told=told)
        if self.sheet is not None:
            sheet(engine, parts, asked[:8], self.sheet)
        if self.json:
            show_json(values)
        else:
            show_markdown(table(values, self.prompts, self.noises))
        return 0
