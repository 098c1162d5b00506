"""Sends the inputs of a step to the device in one copy, double-buffered: the host writes the next step while
the device reads the copy of this one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.gpu.streams import DeviceStreams, Mark

_ALIGNED_WORDS = 4
"""16 bytes: kernels read aligned addresses faster, and are compiled for one alignment only."""
_WORD_BYTES = 4


class Staging:
    """Two alternating buffers on the host, and one on the device, which the device reads in order.

    Steps that begin with arrays of the same lengths get the same addresses for them, as CUDA graphs need.
    """

    def __init__(self, num_words: int, device: torch.device, streams: DeviceStreams) -> None:
        self._streams = streams
        self._num_words = num_words
        self._on_host = [streams.host_buffer(num_words) for _ in range(2)]
        self._arrays: list[npt.NDArray[Any]] = [buffer.numpy() for buffer in self._on_host]
        """The host buffers as numpy arrays."""
        self._sent: list[Mark | None] = [None, None]
        self._on_device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """Start a step. Waits for the copy of the step before the last, which is usually done."""
        self._turn = 1 - self._turn
        self._used = 0
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()

    def put(self, values: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
        """Add ``values`` [n] to the step; returns the tensor that holds them on the device after ``send``."""
        array = np.asarray(values, dtype)
        num_words = array.nbytes // _WORD_BYTES
        part = slice(self._used, self._used + num_words)
        assert part.stop <= self._num_words, "the step is larger than the buffer"
        self._used = part.stop + -part.stop % _ALIGNED_WORDS
        self._arrays[self._turn][part].view(array.dtype)[:] = array
        return self._on_device[part].view(_TORCH_TYPES[array.dtype])

    def send(self) -> None:
        """Copy all arrays of the step to the device."""
        used = slice(0, min(self._used, self._num_words))
        self._streams.send(self._on_host[self._turn][used], self._on_device[used])
        self._sent[self._turn] = self._streams.mark()


_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def words_of(*num_values_and_bytes: tuple[int, int]) -> int:
    """The 32-bit words that arrays take together, given the number of values and bytes per value of each."""
    return sum(
        -(-num_values * num_bytes // _WORD_BYTES) + _ALIGNED_WORDS
        for num_values, num_bytes in num_values_and_bytes
    )
