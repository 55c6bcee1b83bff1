"""One graph of an exported model: what goes in, what comes out, and running it on tensors where they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TYPES: dict[str, tuple[torch.dtype, type[np.generic]]] = {
    "float32": (torch.float32, np.float32),
    "int32": (torch.int32, np.int32),
    "int64": (torch.int64, np.int64),
    "bool": (torch.bool, np.bool_),
}
BATCH = "batch"


@dataclass(frozen=True)
class Port:
    """One input or output: `dtype` by name, `shape` of sizes and of names of sizes that are free."""

    dtype: str
    shape: tuple[int | str, ...]

    def sizes(self, named: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with every name replaced."""
        return tuple(named[size] if isinstance(size, str) else size for size in self.shape)


@dataclass(frozen=True)
class Signature:
    """File, inputs and outputs of a graph, as the manifest states them."""

    file: str
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]


@dataclass
class Graph:
    """A graph and its session, which is opened when it is first run. May be run from several threads.

    Attributes:
        who: the model, for errors.
        signature: see `Signature`.
        opener: makes the session.
        max_batch: rows in one run; more are run in parts. 0 for any number.
    """

    who: str
    signature: Signature
    opener: Callable[[], Any]
    max_batch: int = 0
    _session: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> Any:
        """The session."""
        with self._lock:
            if self._session is None:
                self._session = self.opener()
            return self._session

    def close(self) -> None:
        """Give the session's memory back; the next run opens it again."""
        with self._lock:
            self._session = None

    def run(self, inputs: Mapping[str, Tensor], outputs: Collection[str] | None = None) -> dict[str, Tensor]:
        """Outputs by name, on the device of the first input.

        Args:
            inputs: a tensor for each input of the graph; what the graph has no input for is left out.
            outputs: names of those that are wanted, None for all.

        Raises:
            ValueError: an input of another shape than the graph was made for.
        """
        names = list(self.signature.outputs if outputs is None else dict.fromkeys(outputs))
        given = {name: self._fitting(name, inputs[name]) for name in self.signature.inputs}
        rows = next(iter(given.values())).shape[0]
        step = self.max_batch or max(rows, 1)
        parts = [
            self._run({name: value[start : start + step] for name, value in given.items()}, names)
            for start in range(0, max(rows, 1), step)
        ]
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in names}

    def _fitting(self, name: str, value: Tensor) -> Tensor:
        """The input in the graph's dtype, one block of memory."""
        port = self.signature.inputs[name]
        fits = value.ndim == len(port.shape) and all(
            isinstance(wanted, str) or wanted == size for wanted, size in zip(port.shape, value.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join(map(str, port.shape))
            raise ValueError(
                f"{self.who}: {name} must be of shape ({wanted}) for {self.signature.file}, got {tuple(value.shape)}"
            )
        return value.detach().to(_TYPES[port.dtype][0]).contiguous()

    def _run(self, given: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
        sizes: dict[str, int] = {}
        for name, value in given.items():
            free = zip(self.signature.inputs[name].shape, value.shape, strict=True)
            sizes.update({wanted: size for wanted, size in free if isinstance(wanted, str)})
        device = next(iter(given.values())).device
        made = {
            name: torch.empty(
                self.signature.outputs[name].sizes(sizes),
                dtype=_TYPES[self.signature.outputs[name].dtype][0],
                device=device,
            )
            for name in names
        }
        if 0 in sizes.values():
            return made
        session = self.open()
        binding = session.io_binding()
        for name, value in given.items():
            binding.bind_input(name, *_place(self.signature.inputs[name].dtype, value))
        for name, value in made.items():
            binding.bind_output(name, *_place(self.signature.outputs[name].dtype, value))
        if device.type == "cuda":
            # The session has a stream of its own, which does not wait for torch's.
            torch.cuda.current_stream(device).synchronize()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return made


def _place(dtype: str, value: Tensor) -> tuple[str, int, type[np.generic], list[int], int]:
    """Where a tensor lies, as `IOBinding` wants it: kind and number of the device, dtype, shape, address."""
    return value.device.type, value.device.index or 0, _TYPES[dtype][1], list(value.shape), value.data_ptr()
