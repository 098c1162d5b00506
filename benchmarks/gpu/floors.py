"""The least time of a piece of work on a device of known rates. Arithmetic only.

A step reads each weight once and each token's KV once, and does two operations per weight and token; reading
KV does not overlap with GEMMs, which run one after another in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from eval.sim.models import ModelShape

_BYTES = 2
"""Bytes of a weight and of a KV element: both are bf16."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that the device reached in this run."""

    copy_bytes_s: float
    """W: rate of a copy inside the device, bytes read plus bytes written."""
    matmul_flop_s: float
    """R: rate of a GEMM of large matrices of the weights' type."""
    host_to_device_bytes_s: float
    """Bytes per second from pinned memory."""
    device_to_host_bytes_s: float


@dataclass(frozen=True, slots=True)
class Floors:
    """Least times of one model's work, in seconds."""

    shape: ModelShape
    rates: Rates

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(_BYTES)

    def decode_s(self, contexts: Sequence[int], tokens_each: int = 1) -> float:
        """Returns the floor of a step with ``tokens_each`` tokens per sequence (more than 1 where it verifies
        drafts); ``contexts``: each sequence's tokens of KV."""
        weights = self.shape.shared_params + self.shape.head_params
        read_s = weights * _BYTES / self.rates.copy_bytes_s
        computed_s = 2 * weights * len(contexts) * tokens_each / self.rates.matmul_flop_s
        return max(read_s, computed_s) + sum(contexts) * self.kv_bytes_per_token / self.rates.copy_bytes_s

    def prefill_flop(self, num_new: int, num_cached: int = 0) -> float:
        """Returns the operations for ``num_new`` tokens after ``num_cached``, without the head, whose GEMM
        only one token needs."""
        seen = num_new * num_cached + num_new**2 / 2
        return 2 * self.shape.shared_params * num_new + self.shape.attention_flop_per_pair * seen

    def prefill_s(self, num_new: int, num_cached: int = 0) -> float:
        return self.prefill_flop(num_new, num_cached) / self.rates.matmul_flop_s

    def reload_s(self, num_tokens: int) -> float:
        """Returns the floor of loading a history's KV from the host."""
        return num_tokens * self.kv_bytes_per_token / self.rates.host_to_device_bytes_s

    def generation_s(self, lengths: Sequence[tuple[int, int]]) -> float:
        """Returns the floor of requests that start together: all prompts, then one token per step for each.

        ``lengths``: tokens in and out of each. The first token out comes from the prompt.
        """
        total_s = sum(self.prefill_s(num_in) for num_in, _ in lengths)
        for step in range(1, max(num_out for _, num_out in lengths)):
            contexts = [num_in + step for num_in, num_out in lengths if num_out > step]
            total_s += self.decode_s(contexts)
        return total_s
