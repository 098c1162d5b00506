"""Section ``rates``: measures what the device itself can do in this run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.floors import Rates
from benchmarks.gpu.measures.bench import Bench

_CALLS = 8
"""Calls of a copy or a GEMM in one repeat, which make launch and synchronization negligible."""


def run(bench: Bench) -> None:
    """Measures copy and matmul rates; floors use the best of each."""
    copy = _copy_rates(bench)
    matmul = _matmul_rates(bench)
    to_device, to_host = _host_rates(bench)
    bench.record.rates = Rates(
        copy_bytes_s=max(copy),
        matmul_flop_s=max(matmul),
        host_to_device_bytes_s=max(to_device),
        device_to_host_bytes_s=max(to_host),
    )
    bench.figure("copy inside the device, read + written", "TB/s", [rate / 1e12 for rate in copy])
    bench.figure("bf16 matmul, random numbers", "TFLOP/s", [rate / 1e12 for rate in matmul])
    bench.figure("pinned host memory to device", "GB/s", [rate / 1e9 for rate in to_device])
    bench.figure("device to pinned host memory", "GB/s", [rate / 1e9 for rate in to_host])


def _rates(bench: Bench, amount: float, action: Callable[[], object]) -> list[float]:
    def several() -> None:
        for _ in range(_CALLS):
            action()

    return [_CALLS * amount / seconds for seconds in bench.repeats(several)]


def _copy_rates(bench: Bench) -> list[float]:
    size = bench.sizes.copy_bytes
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=bench.device.where)
    target = torch.empty_like(source)
    return _rates(bench, 2 * size, lambda: target.copy_(source))


def _matmul_rates(bench: Bench) -> list[float]:
    """Multiplies random numbers: zeros are multiplied faster."""
    size = bench.sizes.matmul_size
    a, b = (torch.randn(size, size, device=bench.device.where, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return _rates(bench, 2 * size**3, lambda: torch.mm(a, b, out=out))


def _host_rates(bench: Bench) -> tuple[list[float], list[float]]:
    size = bench.sizes.host_copy_bytes
    on_host = bench.device.pinned(size).fill_(1)
    on_device = torch.ones(size, dtype=torch.uint8, device=bench.device.where)
    to_device = _rates(bench, size, lambda: on_device.copy_(on_host, non_blocking=True))
    to_host = _rates(bench, size, lambda: on_host.copy_(on_device, non_blocking=True))
    return to_device, to_host
