"""Streams of copies that run concurrently with the steps, and events that order them. Knows no blocks and no
slots.

The interface between the host tier and CUDA: the implementations only pass the calls on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination and source: both contiguous, of the same shape and dtype. Neither may change before the copy is
complete."""


class Event(Protocol):
    """A point in a stream, complete when all work queued there before it is complete."""

    def query(self) -> bool:
        """Whether it is complete. Does not wait."""

    def synchronize(self) -> None:
        """Wait until it is complete. Thread-safe."""


class Stream(Protocol):
    """Work that a device runs in the order in which it was queued. Queuing does not wait for the device."""

    def wait_event(self, event: Event) -> None:
        """Make all work that is queued from now on wait for ``event``."""

    def record_event(self) -> Event:
        """Return an event after all work that is queued by now."""

    def synchronize(self) -> None:
        """Wait until all queued work is complete."""


class CopyStream(Stream, Protocol):
    """A stream that copies."""

    def copy(self, copies: Iterable[Copy]) -> None: ...


class CopyStreams(Protocol):
    """One stream per direction, so that neither waits for the other, and pinning of host memory."""

    @property
    def loads(self) -> CopyStream:
        """Host to device."""

    @property
    def stores(self) -> CopyStream:
        """Device to host."""

    @property
    def steps(self) -> Stream:
        """The stream of the steps: the calling thread's current one."""

    def pin(self, memory: torch.Tensor) -> bool:
        """Pin host memory, so that copies to and from it are asynchronous; False if that is impossible.
        Thread-safe."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Unpin memory. Call it before pinned memory is freed."""


def copy_streams_of(device: torch.device) -> CopyStreams:
    return CudaCopyStreams(device) if device.type == "cuda" else HostCopyStreams()


class HostCopyStreams:
    """CopyStreams of a CPU: all work is complete when the call returns."""

    def __init__(self) -> None:
        self.loads = self.stores = self.steps = _HostStream()

    def pin(self, memory: torch.Tensor) -> bool:
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        return


class _HostStream:
    """A CopyStream whose queue is always empty; it is also each of its events."""

    def wait_event(self, event: Event) -> None:
        return

    def record_event(self) -> Event:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def copy(self, copies: Iterable[Copy]) -> None:
        for to, source in copies:
            to.copy_(source)


class CudaCopyStreams:
    """CopyStreams of a GPU. Its copy engines move pinned memory, so steps lose only bandwidth."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.loads = _CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self.stores = _CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    @property
    def steps(self) -> Stream:
        return _CudaStream(torch.cuda.current_stream(self._device))

    def pin(self, memory: torch.Tensor) -> bool:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            return int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0

    def unpin(self, memory: torch.Tensor) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            cudart.cudaHostUnregister(memory.data_ptr())


class _CudaStream:
    """A CopyStream that is a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self.wait_event: Callable[[Any], None] = stream.wait_event
        self.synchronize: Callable[[], None] = stream.synchronize

    def record_event(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting thread may sleep
        event.record(self._stream)
        return event

    def copy(self, copies: Iterable[Copy]) -> None:
        with torch.cuda.stream(self._stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
