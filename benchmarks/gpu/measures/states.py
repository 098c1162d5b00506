"""Checks layers with states against their definitions in torch and fp32 on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.closeness import LIMITS, row_error
from engine.worker.states import torch_states
from engine.worker.states.operations import Convolution, DeltaRule, Scan
from engine.worker.states.selection import StateOps
from engine.worker.states.state_batch import StateBatch

_NUM_SLOTS = 8
_CONV_WIDTH = 4
_TIMED_CALLS = 10
_Inputs = tuple[Any, torch.Tensor]
"""An operation and the pool of states."""


def check(bench: Bench) -> None:
    """Checks the sizes of Qwen3-Next and Granite 4: a decode, prompts, and two that share a source state."""
    from engine.worker.gpu.triton_states import TritonStates

    ops = TritonStates()
    size = 16 if bench.sizes.toy else 128
    length = 9 if bench.sizes.toy else 300
    batch = StateBatch(np.array([1, 2, length, length]), np.array([1, 0, 5, 5]), np.array([1, 2, 3, 4]))
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        layers = {
            f"gated delta rule, {kind}": ("gated_delta_rule", _delta_rule(batch, dtype, size)),
            f"selective scan, {kind}": ("selective_scan", _scan(batch, dtype, size)),
            f"causal convolution, {kind}": ("causal_conv", _conv(batch, dtype, 64 * size)),
        }
        for name, (function, inputs) in layers.items():
            with bench.case(name):
                _check(bench, name, ops, function, inputs, batch)
    _time(bench, ops, size)


def _check(
    bench: Bench,
    name: str,
    ops: StateOps,
    function: str,
    inputs: _Inputs,
    batch: StateBatch,
) -> None:
    operation, pool = inputs
    there = pool.to(bench.device.where, copy=True)
    found = getattr(ops, function)(_moved(operation, bench.device.where), there, batch)
    expected = getattr(torch_states, function)(operation, pool, batch)
    limit = bench.sizes.slack * LIMITS[found.dtype]
    bench.check(name, row_error(found.cpu(), expected), limit)
    bench.check(f"{name}: states", row_error(there.cpu().flatten(1), pool.flatten(1)), limit)


def _moved(operation: Any, to: torch.device) -> Any:
    """The same operation with its inputs on a device."""
    return type(operation)(*(x.to(to) if isinstance(x, torch.Tensor) else x for x in operation))


def _time(bench: Bench, ops: StateOps, size: int) -> None:
    """Times a decode against reading and writing each state once; and a prompt, token after token."""
    decodes = bench.sizes.decode_batches[1]
    tokens = bench.sizes.fused_tokens
    slots = np.arange(1, decodes + 1)
    batches = {
        f"{decodes} decodes": StateBatch(np.ones_like(slots), slots, slots),
        f"a prompt of {tokens:,}": StateBatch(np.array([tokens]), np.array([0]), np.array([1])),
    }
    for name, batch in batches.items():
        for function, make in (("gated_delta_rule", _delta_rule), ("selective_scan", _scan)):
            with bench.case(f"{function}: {name}"):
                inputs = make(batch, torch.bfloat16, size, decodes + 1)
                _time_calls(
                    bench, f"{function.replace('_', ' ')}, a layer, {name}", ops, function, inputs, batch
                )


def _time_calls(
    bench: Bench,
    name: str,
    ops: StateOps,
    function: str,
    inputs: _Inputs,
    batch: StateBatch,
) -> None:
    operation = _moved(inputs[0], bench.device.where)
    pool = inputs[1].to(bench.device.where)
    call = getattr(ops, function)
    seconds = bench.repeats_of_kernels(lambda: call(operation, pool, batch), _TIMED_CALLS)
    moved = 2 * len(batch.query_lens) * pool[0].nbytes
    bench.figure(
        name,
        "us",
        [1e6 * each for each in seconds],
        floor=1e6 * moved / bench.rates.copy_bytes_s if int(max(batch.query_lens)) == 1 else None,
    )


def _noise(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _delta_rule(batch: StateBatch, dtype: torch.dtype, size: int, num_slots: int = _NUM_SLOTS) -> _Inputs:
    tokens = int(batch.query_lens.sum())
    k_heads = size // 8
    v_heads = size // 4
    q, k = (_noise(dtype, tokens, k_heads, size, seed=seed) for seed in (1, 2))
    v = _noise(dtype, tokens, v_heads, size, seed=3)
    g = -_noise(torch.float32, tokens, v_heads).abs()
    pool = _noise(torch.float32, num_slots, v_heads, size, size)
    return DeltaRule(q, k, v, g, _noise(dtype, tokens, v_heads).sigmoid()), pool


def _scan(batch: StateBatch, dtype: torch.dtype, size: int, num_slots: int = _NUM_SLOTS) -> _Inputs:
    tokens = int(batch.query_lens.sum())
    heads = size // 2
    x = _noise(dtype, tokens, heads, size // 2)
    dt = _noise(dtype, tokens, heads, seed=1)
    b, c = (_noise(dtype, tokens, 1, size, seed=seed) for seed in (2, 3))
    a, d, dt_bias = (_noise(torch.float32, heads, seed=seed) for seed in (4, 5, 6))
    pool = _noise(torch.float32, num_slots, heads, size // 2, size)
    return Scan(x, dt, b, c, -a.exp(), d, dt_bias), pool


def _conv(batch: StateBatch, dtype: torch.dtype, channels: int) -> _Inputs:
    x = _noise(dtype, int(batch.query_lens.sum()), channels)
    weight = _noise(dtype, channels, _CONV_WIDTH)
    bias = _noise(dtype, channels)
    return Convolution(x, weight, bias), _noise(dtype, _NUM_SLOTS, channels, _CONV_WIDTH - 1)
