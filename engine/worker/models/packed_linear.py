"""Matrix products whose weight is laid out for oneDNN once, so that a small batch reads it at memory speed.

A plain product lays its weight out anew at every call. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from typing import Any

import torch
from torch import nn

from engine.worker.models.linears import Table

logger = logging.getLogger(__name__)

ROWS_HINT = 32
"""Rows of a usual input: for one row alone a layout may be chosen that is slow for more."""
_BLOCK_ROWS = 64
_TRIAL_SIZE = 64


class PackedLinear(nn.Module):
    """Stands in for an ``nn.Linear``; its weight is opaque to all but oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._weight = _pack(weight)
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        product: torch.Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return product


class PackedTable(nn.Module):
    """Stands in for a ``Table``: held once, as a packed weight, in which vectors are still found by number.

    oneDNN interleaves 64 rows of a weight: the first four bytes of each, then the next four, and so on.
    Raises RuntimeError where its layout is another.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._dtype, self._width = weight.dtype, weight.shape[1]
        self._weight = _pack(weight)
        self._words = _words_of(self._weight).view(-(-weight.shape[0] // _BLOCK_ROWS), -1, _BLOCK_ROWS)
        some = torch.linspace(0, weight.shape[0] - 1, 2 * _BLOCK_ROWS).long()
        if not torch.equal(self(some), weight[some]):
            raise RuntimeError("oneDNN's layout is not the expected one")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As Table's."""
        words = self._words[ids // _BLOCK_ROWS, :, ids % _BLOCK_ROWS].contiguous()
        return words.view(self._dtype)[:, : self._width]

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """As Table's."""
        products: torch.Tensor = self._multiply(x, self._weight, None, "none", [], "")
        return products


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights of this type are of use here, which a small product shows; on x86-64 only.

    Not float32: oneDNN compiles a product for each number of rows and keeps a thousand of them, hundreds of
    megabytes, where plain float32 products keep nothing; bfloat16 ones do the same, packed or not.
    """
    if device.type != "cpu" or dtype == torch.float32 or platform.machine() not in ("x86_64", "AMD64"):
        return False
    onednn: Any = torch.backends.mkldnn
    if not (onednn.is_available() and onednn.enabled):
        return False
    weight = torch.linspace(-1, 1, _TRIAL_SIZE**2).view(_TRIAL_SIZE, -1).to(dtype)
    x = torch.eye(_TRIAL_SIZE, dtype=dtype)
    try:
        return torch.equal(PackedLinear(weight, None)(x), weight.T)
    except (AttributeError, RuntimeError) as error:
        logger.info("The weights are not packed: %s.", str(error).splitlines()[0])
        return False


def packed_linear(plain: nn.Linear) -> PackedLinear:
    return PackedLinear(plain.weight, plain.bias)


def packed_table(table: Table) -> Table | PackedTable:
    """What stands in for ``table``; itself where oneDNN's layout has no place for each vector."""
    try:
        return PackedTable(table.weight)
    except (AttributeError, RuntimeError) as error:
        logger.info("The embedding is not packed: %s.", str(error).splitlines()[0])
        return table


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def _words_of(packed: torch.Tensor) -> torch.Tensor:
    """The bytes of a packed weight by fours, in the order in which they lie; valid as long as it is held."""
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    address = torch.ops.mkldnn.data_ptr(packed)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.int32)
