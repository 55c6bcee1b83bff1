"""`peaksim train generator` and `peaksim diagnose generator`: what embeddings of captions look like as pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.cli.options import OptionalFile, Shared, WithModel
from engine.cli.outputs import check_folder
from engine.cli.progress import steps
from engine.cli.tables import report, show_json, show_line, show_markdown


@dataclass(frozen=True, kw_only=True)
class TrainGenerator(Shared):
    """Train a small generator of scenes on the frozen embeddings of a model, and the judge of its pictures."""

    model: str = "scenes"
    """Name of the frozen model; `peaksim models` lists them."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes an accelerator where there is one."""
    output: Path = Path("runs/pictures")
    """Folder of both runs; a stopped one goes on where it was."""
    items: int = 20_000
    """Scenes that the generator learns from."""
    steps: int = 1500
    """Length of the generator's training."""
    judge_steps: int = 500
    """Length of the judge's training."""
    batch_size: int = 128
    """Pictures of one step."""

    def run(self) -> int:
        """Train both and print where they are."""
        from dataclasses import replace

        from engine.engine import load
        from engine.results.generator import train_generator
        from engine.training.scene_generator import GENERATOR_TRAINING, JUDGE_TRAINING, SmallScenes

        check_folder("--output", self.output)
        generator, judge = train_generator(
            load(self.model, device=self.device),
            self.output,
            scenes=SmallScenes(self.items),
            training=replace(GENERATOR_TRAINING, steps=self.steps, batch_size=self.batch_size),
            judging=replace(JUDGE_TRAINING, steps=self.judge_steps, batch_size=self.batch_size),
            told=lambda what, done, total: report(what),
        )
        if self.json:
            show_json({"generator": str(generator), "judge": str(judge)})
        else:
            show_line(f"trained; use them as --generator {generator} --judge {judge}")
        return 0


@dataclass(frozen=True, kw_only=True)
class DiagnoseGenerator(WithModel):
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
