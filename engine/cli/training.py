"""``peaksim train``: the embedded model from scratch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from engine.cli.options import Shared
from engine.cli.outputs import check_folder
from engine.cli.tables import report, show_json, show_line
from engine.training.scenes import ScenesTrainConfig, train


@dataclass(frozen=True, kw_only=True)
class Train(Shared):
    """Train the embedded model from scratch; a stopped run goes on where it was."""

    what: Annotated[Positional[Literal["scenes"]], arg(help="The model.")]
    config: ScenesTrainConfig = field(default_factory=ScenesTrainConfig)
    skip_figures: bool = False
    """Do not evaluate on the controlled benchmark along the way."""

    def run(self) -> int:
        """Train to the end; progress goes to standard error, the folder of the weights to standard output."""
        from engine.benchmarks.scenes import quick_figures

        check_folder("--output", self.config.output)
        folder: Path = train(self.config, evaluate=None if self.skip_figures else quick_figures, report=report)
        if self.json:
            show_json({"model": f"scenes:{folder}"})
        else:
            show_line(f"trained; use it as --model scenes:{folder}")
        return 0
