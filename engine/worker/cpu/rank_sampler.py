"""Sampling with tensor parallelism: only the first rank has the logits of all tokens."""

from __future__ import annotations

import torch

from engine.worker.attention.backend import IntArray
from engine.worker.cpu.sampling_kernel import token_picker
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.sampler import Sampler, SamplerOutput, TokenBitmask, TokenPicker, TorchPicker
from engine.worker.sampling_batch import SamplingBatch


class RankSampler(Sampler):
    """The first rank samples and broadcasts the tokens to the others."""

    def __init__(self, seed: int, picker: TokenPicker, group: TensorParallelGroup) -> None:
        super().__init__(seed, picker)
        self._group = group

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        history: IntArray,
        forbidden: TokenBitmask | None = None,
    ) -> SamplerOutput:
        """Like ``Sampler.sample``. On ranks other than the first, logits are [num_samples, 0], and no
        log-probabilities are returned."""
        if self._group.rank:
            token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            return SamplerOutput(self._group.broadcast(token_ids).cpu().numpy(), {})
        output = super().sample(logits, batch, history, forbidden)
        self._group.broadcast(torch.from_numpy(output.token_ids).to(logits.device))
        return output


def select_sampler(
    seed: int, group: TensorParallelGroup, device: torch.device, *, may_compile: bool
) -> Sampler:
    """The sampler of a rank. Compiled code draws on a CPU, if ``may_compile``, and where tokens are drawn."""
    draws = group.stage.is_last and not group.rank
    picker = token_picker() if may_compile and draws and device.type == "cpu" else TorchPicker()
    return Sampler(seed, picker) if group.size == 1 else RankSampler(seed, picker, group)
