"""RMS norms of a decoder, with a weight or with a weight plus one."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from engine.worker.models.shape import DecoderShape


def normed(x: torch.Tensor, weight: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """The RMS norm of x [..., size], times weight [size]. Centered weights are factors minus 1; they are used
    in fp32, because adding 1 in a narrower type would lose them."""
    if not shape.centered_norms:
        return rms_norm(x, weight.shape, weight, shape.norm_eps)
    return rms_norm(x.float(), weight.shape, 1.0 + weight.float(), shape.norm_eps).to(x.dtype)
