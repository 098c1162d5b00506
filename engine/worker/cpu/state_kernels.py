"""Calls the compiled kernels for layers with states with raw addresses. Knows nothing of layers.

They compute the functions of ``torch_states``, against which they are tested.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad

from engine.worker.cpu.kernels.library import load_state_library, typed
from engine.worker.states.operations import ChannelScan, Convolution, DeltaRule, Scan
from engine.worker.states.state_batch import StateBatch

_ADDRESS = ctypes.c_void_p
_NUMBER = ctypes.c_int64
_PADDED_TO = 16
"""A multiple of the lanes of all processors."""


def _fields(pointers: str, numbers: str) -> tuple[tuple[str, Any], ...]:
    return (
        *((name, _ADDRESS) for name in pointers.split()),
        *((name, _NUMBER) for name in numbers.split()),
    )


class _Batch(ctypes.Structure):
    """``states.h``"""

    _fields_ = (("num_seqs", _NUMBER), *_fields("query_lens sources targets", ""))


class _CausalConv(ctypes.Structure):
    """``causal_conv.h``"""

    _fields_ = _fields(
        "x weight bias pool output",
        "stride slot_stride num_channels width is_bf16 pool_is_bf16 has_silu",
    )


class _DeltaRule(ctypes.Structure):
    """``delta_rule.h``"""

    _fields_ = _fields(
        "q k v g beta pool output",
        "q_stride k_stride v_stride slot_stride num_k_heads num_v_heads k_size v_size is_bf16 by_channel",
    )


class _SelectiveScan(ctypes.Structure):
    """``selective_scan.h``"""

    _fields_ = _fields(
        "x b c dt a d dt_bias pool output",
        "x_stride b_stride c_stride slot_stride num_heads head_size num_groups state_size is_bf16",
    )


class _ChannelScan(ctypes.Structure):
    """``channel_scan.h``"""

    _fields_ = _fields("x dt b c a dt_bias pool output", "slot_stride num_channels state_size padded_size")


class StateKernels:
    """The compiled kernels as ``StateOps``: inputs are bf16 or fp32, sums and recurrent states fp32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def calling(function: Any, arguments: type[ctypes.Structure]) -> Any:
            return typed(function, ctypes.POINTER(arguments), ctypes.POINTER(_Batch), _NUMBER)

        self._causal_conv = calling(library.continuum_causal_conv, _CausalConv)
        self._delta_rule = calling(library.continuum_gated_delta_rule, _DeltaRule)
        self._scan = calling(library.continuum_selective_scan, _SelectiveScan)
        self._channel_scan = calling(library.continuum_channel_scan, _ChannelScan)

    def causal_conv(self, conv: Convolution, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """See ``StateOps``."""
        num_channels, width = conv.weight.shape
        x, stride = _rows(conv.x)
        weight = _as(conv.weight, x.dtype)
        bias = None if conv.bias is None else _as(conv.bias, x.dtype)
        output = x.new_empty(len(x), num_channels)
        arguments = _CausalConv(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            _pool_address(pool, (num_channels, width - 1)),
            output.data_ptr(),
            stride,
            pool.stride(0),
            num_channels,
            width,
            _is_bf16(x),
            _is_bf16(pool),
            conv.has_silu,
        )
        self._causal_conv(arguments, _addresses(batch), torch.get_num_threads())
        return output

    def gated_delta_rule(self, rule: DeltaRule, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """See ``StateOps``."""
        q, q_stride = _rows(rule.q)
        k, k_stride = _rows(rule.k)
        v, v_stride = _rows(rule.v)
        num_tokens, num_k_heads, k_size = k.shape
        num_v_heads, v_size = v.shape[1:]
        g = _as(rule.g, torch.float32)
        beta = _as(rule.beta, torch.float32)
        assert q.dtype == k.dtype == v.dtype
        assert pool.dtype == torch.float32
        output = v.new_empty(num_tokens, num_v_heads, v_size)
        arguments = _DeltaRule(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            g.data_ptr(),
            beta.data_ptr(),
            _pool_address(pool, (num_v_heads, k_size, v_size)),
            output.data_ptr(),
            q_stride,
            k_stride,
            v_stride,
            pool.stride(0),
            num_k_heads,
            num_v_heads,
            k_size,
            v_size,
            _is_bf16(v),
            g.dim() > 2,
        )
        self._delta_rule(arguments, _addresses(batch), torch.get_num_threads())
        return output

    def selective_scan(self, scan: Scan, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """See ``StateOps``."""
        x, x_stride = _rows(scan.x)
        b, b_stride = _rows(scan.b)
        c, c_stride = _rows(scan.c)
        num_tokens, num_heads, head_size = x.shape
        num_groups, state_size = b.shape[1:]
        dt, a, d, dt_bias = (_as(each, torch.float32) for each in (scan.dt, scan.a, scan.d, scan.dt_bias))
        assert x.dtype == b.dtype == c.dtype
        assert pool.dtype == torch.float32
        output = x.new_empty(num_tokens, num_heads, head_size)
        arguments = _SelectiveScan(
            x.data_ptr(),
            b.data_ptr(),
            c.data_ptr(),
            dt.data_ptr(),
            a.data_ptr(),
            d.data_ptr(),
            dt_bias.data_ptr(),
            _pool_address(pool, (num_heads, head_size, state_size)),
            output.data_ptr(),
            x_stride,
            b_stride,
            c_stride,
            pool.stride(0),
            num_heads,
            head_size,
            num_groups,
            state_size,
            _is_bf16(x),
        )
        self._scan(arguments, _addresses(batch), torch.get_num_threads())
        return output

    def channel_scan(self, scan: ChannelScan, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """See ``StateOps``."""
        num_channels, state_size = scan.a.shape
        behind = -state_size % _PADDED_TO
        x, dt, dt_bias = (_as(each, torch.float32) for each in (scan.x, scan.dt, scan.dt_bias))
        b, c, a = (_as(pad(each.float(), (0, behind)), torch.float32) for each in (scan.b, scan.c, scan.a))
        assert pool.dtype == torch.float32
        output = x.new_empty(x.shape)
        arguments = _ChannelScan(
            x.data_ptr(),
            dt.data_ptr(),
            b.data_ptr(),
            c.data_ptr(),
            a.data_ptr(),
            dt_bias.data_ptr(),
            _pool_address(pool, (num_channels, state_size)),
            output.data_ptr(),
            pool.stride(0),
            num_channels,
            state_size,
            state_size + behind,
        )
        self._channel_scan(arguments, _addresses(batch), torch.get_num_threads())
        return output


@cache
def state_kernels() -> StateKernels:
    """The kernels for this machine. Raises KernelUnavailable."""
    return StateKernels(load_state_library())


def _addresses(batch: StateBatch) -> _Batch:
    """The addresses of a batch; valid as long as it is referenced."""
    columns = (batch.query_lens, batch.sources, batch.targets)
    return _Batch(len(batch.query_lens), *(column.ctypes.data for column in columns))


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns x [tokens, ...] with each token's numbers contiguous, and its stride from token to token."""
    x = x if x[0].is_contiguous() else x.contiguous()
    return x, x.stride(0)


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).contiguous()


def _is_bf16(x: torch.Tensor) -> bool:
    assert x.dtype in (torch.bfloat16, torch.float32)
    return x.dtype == torch.bfloat16


def _pool_address(pool: torch.Tensor, shape: tuple[int, ...]) -> int:
    """The address of a pool [slots, *shape]."""
    assert pool.shape[1:] == shape
    assert pool[0].is_contiguous()
    return pool.data_ptr()
