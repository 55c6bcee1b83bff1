"""The processes of one training: one, or as many as `accelerate launch` began, which share each batch.

Gradients are averaged, one process writes, and weights stay equal everywhere. Losses over head scores are those of the
whole batch: each process scores its part of the pictures against all texts, and all get all scores, so that in-batch
negatives are as many as with one process. So are those of an objective that says so (`BatchLoss.whole_batch`);
any other objective of one's own sees the items of its process alone.
"""

from __future__ import annotations

import atexit
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.features import ImageFeatures, TextFeatures

T = TypeVar("T")
# Others wait for the one that computes features.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is. Of several, every method must be called by all."""

    rank: int = 0
    count: int = 1
    device: torch.device | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def share(self, rows: int) -> range:
        """This process's part of so many rows. Raises ValueError when they cannot be shared out evenly."""
        if rows % self.count:
            raise ValueError(f"train: a batch must be a multiple of the {self.count} processes, got {rows} rows")
        each = rows // self.count
        return range(self.rank * each, (self.rank + 1) * each)

    def average_gradients(self, module: nn.Module) -> None:
        """Set each gradient to its mean over the processes."""
        if self.count == 1:
            return
        held = [weight for weight in module.parameters() if weight.requires_grad]
        # A weight that a loss leaves out has no gradient, and may have one in another process.
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in held]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        for weight, mean in zip(held, flat.div(self.count).split([weight.numel() for weight in held]), strict=True):
            weight.grad = mean.view_as(weight)

    def joined(self, own: Tensor) -> Tensor:
        """The rows of all processes in order; gradients reach this process's own ones, times the number of processes.

        So the mean over processes is the gradient of a loss of all rows, which every process computes.
        """
        if self.count == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.count)]
        torch.distributed.all_gather(parts, own.detach().contiguous())
        parts[self.rank] = own.detach() + (own - own.detach()) * self.count
        return torch.cat(parts)

    def place(self, device: str) -> str:
        """Where models go: `device`, or for "auto" with several processes this one's own."""
        return str(self.device) if device == "auto" and self.device is not None else device

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process does what is inside, then the others do it, and find it done."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()

    def from_main(self, value: T | None) -> T:
        """The main process's value, which is not None, once it is there."""
        held = [value]
        if self.count > 1:
            torch.distributed.broadcast_object_list(held)
        assert held[0] is not None
        return held[0]

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            torch.distributed.barrier()


ALONE = Processes()


class SharedHead:
    """A head, or an encoder, as a loss sees it whose pictures are shared out: all scores, computed in parts."""

    def __init__(self, head: Any, processes: Processes) -> None:
        self.head = head
        self.processes = processes

    def __call__(self, pixels: Tensor, captions: Any) -> Tensor:
        """The matrix of a whole encoder: own pictures against all captions, and the rows of the others."""
        part = self.processes.share(len(pixels))
        return self.processes.joined(self.head(pixels[part.start : part.stop], captions))

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """As `Head.matrix`."""
        own = torch.tensor(self.processes.share(len(images)))
        return self.processes.joined(self.head.matrix(images[own], texts))

    def chosen(self, images: ImageFeatures, texts: TextFeatures, image_rows: Tensor, text_rows: Tensor) -> Tensor:
        """As `Head.chosen`."""
        part = self.processes.share(len(image_rows))
        own = slice(part.start, part.stop)
        return self.processes.joined(self.head.chosen(images, texts, image_rows[own], text_rows[own]))

    def scale(self) -> Tensor | float:
        """As `Head.scale`."""
        scale: Tensor | float = self.head.scale()
        return scale


def processes() -> Processes:
    """This process among those that `accelerate launch` (or torchrun) began.

    Raises ModuleNotFoundError, saying what to install, when there are several and `accelerate` is missing.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "train: several processes need accelerate, which is not installed; get it by `pip install 'peaksim[train]'`"
        ) from error
    if not torch.distributed.is_initialized():
        # Before the interpreter goes: threads of the group that outlive it may end the process by an abort. Some
        # functions of this module take the group that there is on import as a default, and would hold it for ever.
        importlib.import_module("torch.distributed.nn.functional")
        atexit.register(_leave)
    state = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
    return Processes(state.process_index, state.num_processes, state.device)


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
