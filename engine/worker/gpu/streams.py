"""CUDA streams, events and graphs, and their stand-in on a CPU.

All work is queued and executed in order; the host waits only at marks (events).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt
import torch

HOST = torch.device("cpu")


class Mark(Protocol):
    """A point in the queue of work; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Wait until all work queued before it is done."""


class StepGraph(Protocol):
    """Work that is captured once and then replayed with one call, on the same memory."""

    def capture(self, run: Callable[[], None]) -> None:
        """Capture ``run``, which must write its result to memory that is already allocated."""

    def replay(self) -> None: ...


class DeviceStreams(Protocol):
    """The queue of one device."""

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """[num_words] int32 in memory that the device can read (pinned)."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a part of a host buffer to the device; do not change it before a later mark is reached."""

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Return a copy on the device; the array may change right after the call."""

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory, valid once a later mark is reached."""

    def mark(self) -> Mark: ...

    def new_graph(self) -> StepGraph:
        """A graph that shares memory with the others of this object: use the result of one before replaying
        another."""


def streams_of(device: torch.device) -> DeviceStreams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


class HostStreams:
    """DeviceStreams of a CPU: all work is done when a call returns."""

    def host_buffer(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values.copy())

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def mark(self) -> Mark:
        return _Passed()

    def new_graph(self) -> StepGraph:
        return RecordedStep()


class _Passed:
    """A Mark that is already reached."""

    def synchronize(self) -> None:
        return


class RecordedStep:
    """A StepGraph that runs the same function again."""

    def __init__(self) -> None:
        self._run: Callable[[], None] | None = None

    def capture(self, run: Callable[[], None]) -> None:
        run()
        self._run = run

    def replay(self) -> None:
        assert self._run is not None, "capture() comes first"
        self._run()


class CudaStreams:
    """DeviceStreams of a GPU: its current stream, which all work of a step goes through."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph_memory: Any = None

    def host_buffer(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        # Pinned memory from torch's allocator, which does not reuse it before the copy is done.
        return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.empty(source.shape, dtype=source.dtype, device=HOST, pin_memory=True)
        return target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def new_graph(self) -> StepGraph:
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        return _CudaGraph(self._graph_memory)


class _CudaGraph:
    """A CUDA graph."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], None]) -> None:
        run()  # compilation and set-up of the first call cannot be captured
        with torch.cuda.graph(self._graph, pool=self._memory):
            run()

    def replay(self) -> None:
        self._graph.replay()
