"""The disk of a simulated replica: reads queue, and so do writes, each at the drive's speed."""

from __future__ import annotations

from collections import deque

from engine.core.offload.disk_tier import MAX_DISK_WRITES, DiskLevel
from engine.core.outputs import DiskWrites
from eval.sim.cost_model import StepCost
from eval.sim.hardware import NVME
from eval.sim.kv_sizes import KvSizes

PROMPT_TOKENS = 2048
"""Tokens of the prompt whose computation is compared with reading."""


class DiskDrive:
    """One replica's drive. Reads and writes do not slow each other down."""

    def __init__(self, cost: StepCost, sizes: KvSizes) -> None:
        block_bytes = cost.kv_bytes_per_token * sizes.tokens_per_block
        self._read_s = block_bytes / NVME.read_bandwidth
        self._write_s = block_bytes / NVME.write_bandwidth
        self._reads_free_s = self._writes_free_s = 0.0
        self._writing: deque[tuple[float, int]] = deque()
        """Completion time and slot of each write, in that order."""

    def read(self, num_blocks: int, now: float) -> float:
        """Queues a read after those under way; returns when its last block arrives."""
        self._reads_free_s = max(now, self._reads_free_s) + NVME.latency_s + num_blocks * self._read_s
        return self._reads_free_s

    def write(self, writes: DiskWrites, now: float) -> None:
        for slot in writes.disk_slots:
            self._writes_free_s = max(now, self._writes_free_s) + self._write_s
            self._writing.append((self._writes_free_s, slot))

    def take_written(self, now: float) -> list[int]:
        """Returns slots whose writes are done by now, each once."""
        done: list[int] = []
        while self._writing and self._writing[0][0] <= now:
            done.append(self._writing.popleft()[1])
        return done


def disk_level(cost: StepCost, sizes: KvSizes, num_blocks: int) -> DiskLevel | None:
    """The least prefix worth reading, as an engine measures it at its start; None without a disk tier."""
    if not num_blocks:
        return None
    token_s = cost.prefill_s(PROMPT_TOKENS) / PROMPT_TOKENS
    return DiskLevel(
        num_blocks=num_blocks,
        max_writes=MAX_DISK_WRITES,
        fixed_tokens=NVME.latency_s / token_s,
        read_share=cost.kv_bytes_per_token
        * (sizes.tokens_per_block / sizes.block_size)
        / NVME.read_bandwidth
        / token_s,
    )
