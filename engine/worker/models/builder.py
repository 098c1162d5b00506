"""Makes the parameters and linears of a decoder's parts, on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.parallel.linears import RowParallelLinear


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds one rank's part. Sizes are those of the part."""

    dtype: torch.dtype
    group: TensorParallelGroup

    def parameter(self, *size: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        return nn.Parameter(torch.empty(size, device="meta", dtype=dtype or self.dtype))

    def linear(self, inputs: int, outputs: int, bias: bool) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias, device="meta", dtype=self.dtype)

    def row_parallel(self, inputs: int, outputs: int, bias: bool) -> nn.Linear | RowParallelLinear:
        """A linear from this rank's inputs to all outputs."""
        if self.group.size == 1:
            return self.linear(inputs, outputs, bias)
        partial = self.linear(inputs, outputs, bias=False)
        return RowParallelLinear(partial, self.parameter(outputs) if bias else None, self.group)
