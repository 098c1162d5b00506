"""The sampling ops over whole vocabularies: one Protocol; Triton on a GPU, plain torch anywhere.

They draw tokens by the Gumbel-max trick: the argmax of the logits plus noise. The noise of a token depends
only on the row's key and the token, so a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.worker.gpu.ops import uses_triton
from engine.worker.gpu.torch_sampling import TorchSamplingOps


class SamplingOps(Protocol):
    """Draws tokens and finds the thresholds of filters. No call makes the host wait."""

    def draw(
        self, logits: torch.Tensor, temperature: torch.Tensor, floors: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token for each row [num_rows] int64 from the softmax of logits / temperature among those not
        below the floor; where the temperature is 0, take the argmax, the first one of ties. Also returns its
        score [num_rows] float32, which is not finite where no token could be drawn: -inf if all are masked,
        NaN or infinity if a logit is.

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
        """The lowest of logits / temperature that the filters keep [num_rows] float32; ties are kept, too.

        logits [num_rows, vocab_size], top_k [num_rows] int32, the others [num_rows] float32. The order is
        that of ``Sampler``: first min-p; then the ``top_k`` best; of those, the best that reach ``top_p``.
        """


def select_sampling_ops(device: torch.device) -> SamplingOps:
    """The fastest implementation that runs on this device."""
    if not uses_triton(device):
        return TorchSamplingOps()
    from engine.worker.gpu.triton_sampling import TritonSamplingOps

    return TritonSamplingOps()
