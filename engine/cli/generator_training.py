"""`peaksim train generator`: a small generator of scenes on frozen embeddings, and the judge of its pictures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.cli.options import Shared
from engine.cli.outputs import check_folder
from engine.cli.progress import steps
from engine.cli.tables import show_json, show_line
from engine.cli.training_data import check_batch, with_model
from engine.training.processes import processes
from engine.training.scene_generator import GENERATOR_TRAINING, JUDGE_TRAINING, SmallScenes


@dataclass(frozen=True, kw_only=True)
class TrainGenerator(Shared):
    """Train a small generator of scenes on the frozen embeddings of a model, and the judge of its pictures."""

    model: str = "scenes"
    """Name of the frozen model; `peaksim models` lists them."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes an accelerator where there is one."""
    output: Path = Path("runs/pictures")
    """Folder of both runs; a stopped one goes on where it was."""
    items: int = SmallScenes.items
    """Scenes that the generator learns from."""
    steps: int = GENERATOR_TRAINING.steps
    """Length of the generator's training."""
    judge_steps: int = JUDGE_TRAINING.steps
    """Length of the judge's training."""
    batch_size: int = GENERATOR_TRAINING.batch_size
    """Pictures of one step."""

    def run(self) -> int:
        """Train both and print where they are."""
        from engine.engine import load
        from engine.results.generator import train_generator

        if (count := processes().count) > 1:
            raise ValueError(f"train generator: must run in one process, got {count}; call it without a launcher")
        check_folder("--output", self.output)
        check_batch(self.batch_size, self.items)
        with steps("steps") as told:
            generator, judge = train_generator(
                load(self.model, device=self.device),
                self.output,
                scenes=SmallScenes(self.items),
                training=replace(GENERATOR_TRAINING, steps=self.steps, batch_size=self.batch_size),
                judging=replace(JUDGE_TRAINING, steps=self.judge_steps, batch_size=self.batch_size),
                told=told,
            )
        if self.json:
            show_json({"generator": str(generator), "judge": str(judge)})
        else:
            use = with_model(self.model, f"--generator {generator} --judge {judge}")
            show_line(f"trained; use them as {use}")
        return 0
