"""Sampling with tensor parallelism, where only rank 0 has the logits of the whole vocabulary."""

from __future__ import annotations

import torch

from engine.worker.gpu.device_sampler import DeviceSampler, DeviceSampling, Sampled
from engine.worker.gpu.sampling_ops import SamplingOps
from engine.worker.gpu.streams import DeviceStreams
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.sampler import TokenBitmask


class DeviceRankSampler(DeviceSampler):
    """Rank 0 samples and broadcasts the tokens to the other ranks; no host waits for the result."""

    def __init__(
        self, seed: int, vocab_size: int, ops: SamplingOps, streams: DeviceStreams, group: TensorParallelGroup
    ) -> None:
        super().__init__(seed, vocab_size, ops, streams)
        self._group = group

    def sample(
        self,
        logits: torch.Tensor,
        sampling: DeviceSampling,
        token_ids: torch.Tensor,
        forbidden: TokenBitmask | None = None,
    ) -> Sampled:
        """See DeviceSampler.sample. On ranks other than 0, logits are [num_samples, 0] and the result has no
        log-probabilities."""
        if self._group.rank:
            received = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            return Sampled(self._group.broadcast(received), None)
        sampled = super().sample(logits, sampling, token_ids, forbidden)
        self._group.broadcast(sampled.token_ids)
        return sampled


def select_device_sampler(
    seed: int, vocab_size: int, ops: SamplingOps, streams: DeviceStreams, group: TensorParallelGroup
) -> DeviceSampler:
    if group.size == 1:
        return DeviceSampler(seed, vocab_size, ops, streams)
    return DeviceRankSampler(seed, vocab_size, ops, streams, group)
