"""Queues of copies beside the queue of the steps, and events that order them. Knows no blocks and no slots.

The seam between the host tier and CUDA: what is behind it does nothing but pass the calls on.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A place in a queue: it is done when all that was queued there before it is."""

    def query(self) -> bool:
        """Whether it is done; does not wait."""

    def synchronize(self) -> None:
        """Wait until it is done; any thread may."""


class Stream(Protocol):
    """Work that a device does in the order in which it was queued. No call waits for the device."""

    def wait_event(self, event: Event) -> None:
        """What is queued from now on starts after this."""

    def record_event(self) -> Event:
        """After what is queued now."""


class CopyStream(Stream, Protocol):
    """A stream that copies."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Both contiguous, of one shape; neither may change before the copy is done."""


class CopyStreams(Protocol):
    """One queue each way, so that neither waits for the other, and memory that both are fast with."""

    loads: CopyStream
    """Host to device."""
    stores: CopyStream
    """Device to host."""

    @property
    def steps(self) -> Stream:
        """Where the caller's own work on the device is queued."""

    def pin(self, memory: torch.Tensor) -> bool:
        """Let copies go straight to and from this memory of the host; False if that cannot be had. Any thread
        may ask."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Before memory that was pinned is given back."""
