"""Checks copies to host memory and back: the data survives even if its blocks were reallocated in between."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.closeness import share_of_bytes_that_differ
from benchmarks.gpu.measures.plans import GREEDY, no_tokens
from engine.core.outputs import BlockCopies, KVLoad, NewRequestData, SchedulerOutput
from engine.worker.kv_tiers.copy_streams import copy_streams_of
from engine.worker.kv_tiers.device_host_pool import DeviceHostPool

_PATIENCE_S = 20.0


def check(bench: Bench) -> None:
    with bench.case("host tier: copies and back"):
        _check_round_trip(bench)


def _check_round_trip(bench: Bench) -> None:
    """Stores blocks, reallocates and overwrites them at once; then loads them into other blocks."""
    count = bench.sizes.num_copied_blocks
    blocks = _blocks(bench)
    original = blocks[1 : count + 1].clone()
    pool = DeviceHostPool(blocks, count, copy_streams_of(bench.device.where))
    try:
        own = tuple(range(1, count + 1))
        slots = tuple(reversed(range(count)))
        _step(pool, replace(no_tokens(), kv_stores=BlockCopies(own, slots)))
        overwriting = replace(no_tokens(), scheduled_new_reqs=[_request(own)])
        pool.begin_step(overwriting)
        blocks[1 : count + 1].normal_()
        pool.end_step(overwriting)
        other = tuple(range(count + 1, 2 * count + 1))
        _step(pool, replace(no_tokens(), kv_loads=[KVLoad(7, "returned", BlockCopies(other, slots))]))
        _await_load(pool)
        wrong = share_of_bytes_that_differ(blocks[count + 1 :], original)
        bench.check(f"host tier: {count} blocks to the host and back, share of bytes that differ", wrong, 0.0)
    finally:
        pool.close()


def _blocks(bench: Bench) -> torch.Tensor:
    """Returns a noisy pool of the large model's blocks: the null block, those to store, those to load."""
    shape = bench.sizes.large
    size = (2, bench.sizes.block_size, shape.num_kv_heads, shape.head_dim)
    num_blocks = 2 * bench.sizes.num_copied_blocks + 1
    dtype = torch.float32 if bench.sizes.toy else torch.bfloat16
    return torch.randn(num_blocks, shape.num_layers, *size, device=bench.device.where, dtype=dtype)


def _request(block_ids: tuple[int, ...]) -> NewRequestData:
    return NewRequestData("other", [1], GREEDY, list(block_ids), 0)


def _step(pool: DeviceHostPool, plan: SchedulerOutput) -> None:
    pool.begin_step(plan)
    pool.end_step(plan)


def _await_load(pool: DeviceHostPool) -> None:
    """Waits like the engine: by steps without tokens."""
    ends_at_s = time.monotonic() + _PATIENCE_S
    while not pool.take_reports().finished_loads:
        if time.monotonic() > ends_at_s:
            raise TimeoutError("The load was not reported.")
        _step(pool, no_tokens())
        time.sleep(0.001)
