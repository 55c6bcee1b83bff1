"""The files of a training that outlive a crash: its JSON-lines log, and checkpoints that may be damaged."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from engine.atomic_files import written_whole

# What reading a cut or foreign file raises, by the place where it stops.
DAMAGE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError)


# Told (what a step gave, which step it is, of how many).
Report = Callable[[str, int, int], None]


class Log:
    """The log of a run in `<folder>/log.jsonl` and, on request, the same numbers as TensorBoard's curves.

    Args:
        who: the name of what is trained, for messages.
        folder: of the run.
        step: the last step that counts; what was logged of later ones is dropped.
        settings: the first line of a new log.
        tensorboard: whether to write curves.

    Raises ValueError for a damaged log, ModuleNotFoundError when curves are wanted and TensorBoard is missing.
    """

    def __init__(self, who: str, folder: Path, step: int, settings: str, *, tensorboard: bool) -> None:
        path = folder / "log.jsonl"
        self._curves = _curves(folder, step) if tensorboard else None
        cut_log(who, path, step)
        self._lines = path.open("a", encoding="utf-8")
        if self._lines.tell() == 0:
            self._lines.write(json.dumps({"step": 0, "settings": settings}) + "\n")

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        if self._curves is not None:
            self._curves.close()

    def write(self, entry: Mapping[str, float]) -> None:
        """One line, with its `step`."""
        self._lines.write(json.dumps(entry) + "\n")
        self._lines.flush()
        if self._curves is not None:
            for name, value in entry.items():
                if name not in ("step", "items"):
                    self._curves.add_scalar(name, value, int(entry["step"]))
            self._curves.flush()


def _curves(folder: Path, step: int) -> Any:
    """TensorBoard's writer. Raises ModuleNotFoundError saying what to install."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "train: curves need tensorboard, which is not installed; get it by `pip install 'peaksim[train]'`"
        ) from error
    return SummaryWriter(str(folder), purge_step=step + 1)


def cut_log(who: str, path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint, and a line torn by a crash: those steps will be run again.

    At step 0 that is all of it, since the settings in its first line are those of another run.

    Raises:
        ValueError: a whole line of the log that cannot be read.
    """
    if not path.exists():
        return
    try:
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step and step > 0]
    except DAMAGE as error:
        raise damaged(who, path, error) from error
    with written_whole(path) as unfinished:
        unfinished.write_text("".join(kept))


def read_checkpoint(who: str, path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What `torch.save` wrote there, every byte of it looked at. Raises ValueError for a file that is damaged."""
    try:
        with zipfile.ZipFile(path) as parts:
            broken = parts.testzip()
        if broken is not None:
            raise ValueError(f"{broken} is not what was written")
        state = torch.load(path, weights_only=True, map_location=device)
        return dict(state)
    except (*DAMAGE, zipfile.BadZipFile) as error:
        raise damaged(who, path, error) from error


def check_new(who: str, folder: Path, *names: str) -> None:
    """Raise ValueError for a folder with weights, or these files, and no checkpoint: a run would write over them."""
    ends = (".safetensors", ".bin", ".pt")
    held = sorted(file.name for file in folder.iterdir() if file.suffix in ends or file.name in names)
    if held and not (folder / "checkpoint.pt").exists():
        raise ValueError(
            f"train {who}: {folder} holds {', '.join(held)} and no checkpoint.pt to go on from; choose another "
            "output folder, or empty it"
        )


def damaged(who: str, path: Path, error: Exception) -> ValueError:
    """The error to raise for a file of a training that cannot be read."""
    # The first sentence: libraries add advice that is not meant for this file.
    reason = (str(error).splitlines() or [""])[0].partition(". ")[0][:200] or type(error).__name__
    return ValueError(f"train {who}: {path} is damaged ({reason}); remove it, or choose another output folder")
