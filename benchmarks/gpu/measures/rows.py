"""Checks linears of one row against fp32; times them against torch's and against reading the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.closeness import LIMITS, row_error

_READ_BYTES = 2**30
"""Bytes of weights of one shape: more than a cache holds."""


def check(bench: Bench) -> None:
    """Checks the linears of the large model's layers, one after the other as in a decode of one sequence."""
    shape = bench.sizes.large
    heads = shape.num_heads * shape.head_dim
    kv_heads = shape.num_kv_heads * shape.head_dim
    for name, outputs, inputs in (
        ("qkv", heads + 2 * kv_heads, shape.hidden_size),
        ("output", shape.hidden_size, heads),
        ("gate and up", 2 * shape.intermediate_size, shape.hidden_size),
        ("down", shape.hidden_size, shape.intermediate_size),
    ):
        with bench.case(f"a row's linear: {name}"):
            _check_linear(bench, f"{shape.name}, a row's linear, {name}", outputs, inputs)


def _check_linear(bench: Bench, name: str, outputs: int, inputs: int) -> None:
    from engine.worker.gpu.triton_ops import TritonOps

    dtype = torch.float16 if bench.sizes.toy else torch.bfloat16
    where = bench.device.where
    count = 2 if bench.sizes.toy else -(-_READ_BYTES // (outputs * inputs * dtype.itemsize))
    generator = torch.Generator(where).manual_seed(0)
    weights = torch.randn(count, outputs, inputs, generator=generator, device=where, dtype=dtype)
    weights *= inputs**-0.5
    x = torch.randn(1, inputs, generator=generator, device=where, dtype=dtype)
    ours = TritonOps().linear_of_row
    error = row_error(ours(x, weights[-1], None), linear(x.float(), weights[-1].float()))
    bench.check(name, error, bench.sizes.slack * LIMITS[dtype])
    floor = 1e6 * weights[0].nbytes / bench.rates.copy_bytes_s
    _time(bench, name, weights, lambda weight: ours(x, weight, None), floor)
    _time(bench, f"{name} by torch", weights, lambda weight: linear(x, weight), floor)


def _time(
    bench: Bench, name: str, weights: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor], floor: float
) -> None:
    """Times a call with each weight in turn."""
    seconds = bench.repeats_of_kernels(lambda: [call(weight) for weight in weights], 1)
    bench.figure(name, "us", [1e6 * each / len(weights) for each in seconds], floor=floor)
