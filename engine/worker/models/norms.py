"""Norms of a decoder: RMS norms with a weight or with a weight plus one, or layer norms."""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm, rms_norm

from engine.worker.models.shape import DecoderShape


def normed(x: torch.Tensor, weight: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """The norm of x [..., size], times weight [size]. Centered weights are factors minus 1; they are used in
    fp32, because adding 1 in a narrower type would lose them."""
    if shape.mean_norms:
        return layer_norm(x.float(), weight.shape, weight.float(), eps=shape.norm_eps).to(x.dtype)
    if not shape.centered_norms:
        return rms_norm(x, weight.shape, weight, shape.norm_eps)
    return rms_norm(x.float(), weight.shape, 1.0 + weight.float(), shape.norm_eps).to(x.dtype)
