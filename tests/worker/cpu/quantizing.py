"""Weights quantized to 8 and 4 bits, by the description of the formats."""

from __future__ import annotations

import torch
from torch import nn

from engine.worker.cpu.quantization import GROUP_SIZE


def rounded(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """The values of ``weight`` after quantization."""
    groups = weight.float().view(len(weight), -1, group_size)
    if bits == 8:
        scales = (groups.abs().amax(-1, keepdim=True) / 127).to(weight.dtype).float()
        return (scales.double() * (groups / scales).round().clamp(-127, 127)).flatten(1)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (high - low) / 15
    zeros = (low + 8 * scales).to(weight.dtype).float()
    scales = scales.to(weight.dtype).float()
    return (zeros.double() + scales.double() * ((groups - zeros) / scales).round().clamp(-8, 7)).flatten(1)


def round_weights(model: nn.Module, quantization: str, dtype: torch.dtype) -> None:
    """Rounds weights in place like ``--quantization`` for this dtype: the head to 8 bits, others as named."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            weight = module.weight
            fits = not (weight.shape[1] % GROUP_SIZE or weight.shape[0] % 16)
            if quantization == "int4" and name != "lm_head":
                assert fits, "this model is not one of 4 bits"
                weight.copy_(rounded(weight.to(dtype), 4, GROUP_SIZE))
            else:
                weight.copy_(rounded(weight.to(dtype), 8, weight.shape[1]))
        for parameter in model.parameters():
            if parameter.dim() == 3:  # the experts of a layer
                rows = parameter.flatten(0, 1).to(dtype)
                bits, group_size = (4, GROUP_SIZE) if quantization == "int4" else (8, rows.shape[1])
                parameter.copy_(rounded(rows, bits, group_size).view_as(parameter))
