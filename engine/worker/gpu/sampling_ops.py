"""What sampling does over whole vocabularies: one Protocol; Triton on a GPU, plain torch anywhere.

A draw is Gumbel's: the best of the logits, each with noise of its own. The noise of a token is a function of
the row's key and the token alone, so that nothing of a row depends on the batch it is in.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.worker.gpu.ops import uses_triton
from engine.worker.gpu.torch_sampling import TorchSamplingOps


class SamplingOps(Protocol):
    """Nothing makes the host wait."""

    def draw(
        self, logits: torch.Tensor, temperature: torch.Tensor, floors: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row [num_rows] int64: one drawn by the softmax of logits / temperature among those
        not below the floor; the best, the first of equals, where the temperature is 0. And its score
        [num_rows] float32, which is not finite where there is nothing to choose: -inf where no token is
        possible, NaN or infinity where a logit is.

        logits [num_rows, vocab_size], temperature, floors [num_rows] float32, keys [num_rows, 2] int32
        """

    def floors(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> torch.Tensor:
        """The lowest of logits / temperature that the filters leave [num_rows] float32; its equals stay, too.

        logits [num_rows, vocab_size], top_k [num_rows] int32, the others [num_rows] float32. As in
        ``Sampler``: first min-p; of those the ``top_k`` best; of those the best until ``top_p`` is reached.
        """


def select_sampling_ops(device: torch.device) -> SamplingOps:
    """The fastest that runs on this device."""
    if not uses_triton(device):
        return TorchSamplingOps()
    from engine.worker.gpu.triton_sampling import TritonSamplingOps

    return TritonSamplingOps()
