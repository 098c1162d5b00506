"""GEMMs with weights packed for oneDNN once, so that a small batch reads them at memory speed.

A plain torch GEMM packs its weight again in every call. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from typing import Any

import torch
from torch import nn

from engine.worker.models.linears import Embedding

logger = logging.getLogger(__name__)

ROWS_HINT = 32
"""The number of rows for which oneDNN optimizes the layout: for 1 it may choose one that is slow for more."""
_BLOCKS = (64, 32, 16)
_TRIAL_ROWS = 128
_TRIAL_SIZE = 64


class OneDNNWeight:
    """A weight [num_rows, width] in oneDNN's blocked layout, with look-up of its rows.

    oneDNN interleaves a block of rows: the first four bytes of each, then the next four, and so on.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._dtype = weight.dtype
        self.num_rows, self.width = weight.shape
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._words = self._in_order()
        self.block = self._find_block(weight)
        """Number of rows that are interleaved; None if the layout is a different one."""

    def _first_byte(self) -> int:
        address: int = torch.ops.mkldnn.data_ptr(self.packed)
        return address

    def gemm(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, width] -> [n, num_rows]"""
        output: torch.Tensor = self._multiply(x, self.packed, bias, "none", [], "")
        return output

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> [n, width]; only if ``block`` is not None"""
        assert self.block is not None
        return self._rows(ids, self.block)

    def _rows(self, ids: torch.Tensor, block: int) -> torch.Tensor:
        words = self._words.view(-(-self.num_rows // block), -1, block)
        found = words[ids // block, :, ids % block].contiguous()
        return found.view(self._dtype)[:, : self.width]

    def _in_order(self) -> torch.Tensor:
        """The packed memory as 32-bit integers, in storage order."""
        num_bytes = torch.ops.mkldnn._nbytes(self.packed)
        return torch.frombuffer(
            (ctypes.c_char * num_bytes).from_address(self._first_byte()), dtype=torch.int32
        )

    def _find_block(self, weight: torch.Tensor) -> int | None:
        some = torch.linspace(0, self.num_rows - 1, _TRIAL_ROWS).long()
        for block in _BLOCKS:
            if len(self._words) % (-(-self.num_rows // block) * block) == 0 and torch.equal(
                self._rows(some, block), weight[some]
            ):
                return block
        return None


class OneDNNLinear(nn.Module):
    """Replaces an ``nn.Linear``; only oneDNN can read its weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = OneDNNWeight(weight)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        return self.weight.gemm(x, self.bias)


class OneDNNEmbedding(nn.Module):
    """Replaces an ``Embedding`` by a packed weight that still supports look-up of vectors.

    Raises RuntimeError if oneDNN's layout does not allow the look-up.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = OneDNNWeight(weight)
        if self.weight.block is None:
            raise RuntimeError("oneDNN's layout is not the expected one")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``AnyEmbedding``."""
        return self.weight.rows(ids)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``AnyEmbedding``."""
        return self.weight.gemm(x, None)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype here, tested with a small GEMM; on x86-64 only.

    Not float32: oneDNN compiles a GEMM for each number of rows and caches a thousand of them, hundreds of
    megabytes, whereas plain float32 GEMMs cache nothing. bfloat16 GEMMs are cached either way.
    """
    if device.type != "cpu" or dtype == torch.float32 or platform.machine() not in ("x86_64", "AMD64"):
        return False
    onednn: Any = torch.backends.mkldnn
    if not (onednn.is_available() and onednn.enabled):
        return False
    weight = torch.linspace(-1, 1, _TRIAL_SIZE**2).view(_TRIAL_SIZE, -1).to(dtype)
    x = torch.eye(_TRIAL_SIZE, dtype=dtype)
    try:
        return torch.equal(OneDNNLinear(weight, None)(x), weight.T)
    except (AttributeError, RuntimeError) as error:
        logger.info("oneDNN packing unavailable (%s): using plain weights.", str(error).splitlines()[0])
        return False


def packed_linear(plain: nn.Linear) -> OneDNNLinear:
    return OneDNNLinear(plain.weight, plain.bias)


def packed_embedding(table: Embedding) -> Embedding | OneDNNEmbedding:
    """Return a packed replacement for ``table``, or ``table`` itself if oneDNN's layout does not allow the
    look-up."""
    try:
        return OneDNNEmbedding(table.weight)
    except (AttributeError, RuntimeError) as error:
        logger.info(
            "Embedding not packed by oneDNN: %s.",
            str(error).splitlines()[0],
        )
        return table
