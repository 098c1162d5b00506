"""Packs adapters for the compiled step, and passes it the addresses of a step's adapters (``low_rank.h``)."""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad

from engine.worker.cpu.kernels.weights import INTERLEAVED
from engine.worker.lora.low_rank import LoadedAdapter, Piece, StepAdapters
from engine.worker.lora.places import NUM_JOINED

_RANK_UNIT = 8


class _LowRankPiece(ctypes.Structure):
    """A Piece."""

    _fields_ = (
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("first_output", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


class _LowRank(ctypes.Structure):
    """The pieces of one linear."""

    _fields_ = (("pieces", ctypes.POINTER(_LowRankPiece)), ("num_pieces", ctypes.c_int64))


class AdaptersAddress(ctypes.Structure):
    """The adapters of a step."""

    _fields_ = (
        ("each", ctypes.POINTER(ctypes.POINTER(_LowRank))),
        ("of_row", ctypes.c_void_p),
        ("max_rank", ctypes.c_int64),
    )


NO_ADAPTERS = AdaptersAddress()


class _PackedAdapter:
    """An adapter in the layout of the kernels."""

    def __init__(self, adapter: LoadedAdapter, num_layers: int) -> None:
        self._kept: list[object] = []
        """Objects that own the memory at the addresses."""
        self.max_rank = 0
        """The largest sum of the ranks of one linear's pieces."""
        self.linears = (_LowRank * (num_layers * NUM_JOINED))()
        for number, pieces in adapter.pieces.items():
            packed = (_LowRankPiece * len(pieces))(*(self._piece(piece) for piece in pieces))
            self._kept.append(packed)
            self.linears[number] = _LowRank(packed, len(pieces))
            self.max_rank = max(self.max_rank, sum(piece.rank for piece in packed))

    def _piece(self, piece: Piece) -> _LowRankPiece:
        missing = -len(piece.down) % _RANK_UNIT
        down = pad(piece.down, (0, 0, 0, missing))
        up = pad(piece.up, (0, missing))
        rank = len(down)
        packed_down = down.view(rank // _RANK_UNIT, _RANK_UNIT, -1, INTERLEAVED).transpose(1, 2).contiguous()
        packed_up = up.view(-1, INTERLEAVED, rank // 2, 2).transpose(1, 2).contiguous()
        self._kept += [packed_down, packed_up]
        return _LowRankPiece(
            packed_down.data_ptr(), packed_up.data_ptr(), piece.first, len(up), rank, piece.scale
        )


class CompiledAdapters:
    """The adapters of the step that runs, for the kernels."""

    def __init__(self, step: StepAdapters, num_layers: int) -> None:
        self._step = step
        self._num_layers = num_layers
        self._packed: WeakKeyDictionary[LoadedAdapter, _PackedAdapter] = WeakKeyDictionary()

    def address(self) -> AdaptersAddress:
        """The addresses, valid until the next step begins."""
        if self._step.of_row is None:
            return NO_ADAPTERS
        packed = [self._pack(group.adapter) for group in self._step.groups]
        each = (ctypes.POINTER(_LowRank) * len(packed))(
            *(ctypes.cast(one.linears, ctypes.POINTER(_LowRank)) for one in packed)
        )
        self._each = each
        return AdaptersAddress(each, self._step.of_row.ctypes.data, max(one.max_rank for one in packed))

    def _pack(self, adapter: LoadedAdapter) -> _PackedAdapter:
        packed = self._packed.get(adapter)
        if packed is None:
            with torch.inference_mode():
                packed = self._packed[adapter] = _PackedAdapter(adapter, self._num_layers)
        return packed
