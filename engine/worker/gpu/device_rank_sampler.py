"""Sampling on the device by one of several ranks, as only the first has the logits of all tokens."""

from __future__ import annotations

import torch

from engine.worker.gpu.device_sampler import DeviceSampler, DeviceSampling, Sampled
from engine.worker.gpu.sampling_ops import SamplingOps
from engine.worker.gpu.streams import DeviceStreams
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.sampler import TokenBitmask


class DeviceRankSampler(DeviceSampler):
    """The first rank chooses, and tells the others; no host waits for it."""

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
        """As DeviceSampler's; where this is not the first rank, logits [num_samples, 0], and nobody is told
        log-probabilities."""
        if self._group.rank:
            told = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            return Sampled(self._group.broadcast(told), None)
        sampled = super().sample(logits, sampling, token_ids, forbidden)
        self._group.broadcast(sampled.token_ids)
        return sampled


def select_device_sampler(
    seed: int, vocab_size: int, ops: SamplingOps, streams: DeviceStreams, group: TensorParallelGroup
) -> DeviceSampler:
    if group.size == 1:
        return DeviceSampler(seed, vocab_size, ops, streams)
    return DeviceRankSampler(seed, vocab_size, ops, streams, group)
