"""Gathers the bytes of KV blocks from the device, and scatters them to it, on other threads than steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_transfer.wire import blocks_per_chunk


class BlockRows:
    """The device's blocks as rows of bytes, and one thread's buffer for a chunk of them."""

    def __init__(self, device_pool: torch.Tensor) -> None:
        """``device_pool``: [num_blocks, ...], block-major."""
        self._rows = device_pool.view(len(device_pool), -1).view(torch.uint8)
        self.block_bytes = self._rows.shape[1]
        self._on_cuda = device_pool.device.type == "cuda"
        num_rows = blocks_per_chunk(self.block_bytes)
        self._staging = torch.empty((num_rows, self.block_bytes), dtype=torch.uint8, pin_memory=self._on_cuda)
        self._buffer: npt.NDArray[np.uint8] = self._staging.numpy()
        self._stream = torch.cuda.Stream(device_pool.device) if self._on_cuda else None  # type: ignore[no-untyped-call]

    def buffer_of(self, num_blocks: int) -> memoryview:
        """The bytes of the buffer's first ``num_blocks`` blocks."""
        return self._buffer[:num_blocks].reshape(-1).data

    def gather(self, block_ids: Sequence[int]) -> memoryview:
        """Copy blocks of the device to the buffer; returns their bytes when the copy is complete."""
        count = len(block_ids)
        if self._stream is None:
            # Not by torch, as the model uses its threads.
            np.take(self._rows.numpy(), block_ids, axis=0, out=self._buffer[:count])
            return self.buffer_of(count)
        with torch.cuda.stream(self._stream):
            picked = self._rows[torch.tensor(block_ids, device=self._rows.device)]
            self._staging[:count].copy_(picked, non_blocking=True)
        self._stream.synchronize()
        return self.buffer_of(count)

    def scatter(self, block_ids: Sequence[int]) -> None:
        """Copy the buffer's first blocks to these blocks of the device; returns when the copy is complete."""
        count = len(block_ids)
        if self._stream is None:
            self._rows.numpy()[np.asarray(block_ids)] = self._buffer[:count]
            return
        with torch.cuda.stream(self._stream):
            content = self._staging[:count].to(self._rows.device, non_blocking=True)
            self._rows[torch.tensor(block_ids, device=self._rows.device)] = content
        self._stream.synchronize()
