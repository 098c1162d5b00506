"""RMS norms of a decoder, by a weight or by one more than a weight."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from engine.worker.models.shape import DecoderShape


def normed(x: torch.Tensor, weight: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """The RMS norm of x [..., size], times weight [size]. Centered weights are factors less 1: they are used
    in fp32, as a sum with 1 would round them away."""
    if not shape.centered_norms:
        return rms_norm(x, weight.shape, weight, shape.norm_eps)
    return rms_norm(x.float(), weight.shape, 1.0 + weight.float(), shape.norm_eps).to(x.dtype)
