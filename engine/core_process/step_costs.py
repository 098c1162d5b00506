"""Measures the seconds of a decode step by its rows, at start-up, with steps of no real request.

The plans come from a separate scheduler over the same executor, so that whatever runs steps is measured:
compiled steps, CUDA graphs, several ranks. Contexts are short: with long ones a step costs more without
drafts, and a draft hardly more, so the measurement never favors drafts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.config.engine_config import EngineConfig
from engine.core.drafts.lengths import StepCosts
from engine.core.policy import FcfsPolicy
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.executor import Executor, ModelInfo
from engine.records.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_SECONDS = 4.0
"""Time after which larger sizes are not measured: they lie on the line through the last two."""
NUM_STEPS = 3
"""Steps of each size that are timed, after one that is not; the shortest counts."""
PROMPT_TOKENS = 4
POOL_SHARE = 2
"""Share of the KV pool, as a divisor, into which all requests of a step must fit."""


def measure_step_costs(executor: Executor, config: EngineConfig, max_drafts: int) -> StepCosts | None:
    """Measure steps without drafts by their requests, and steps with drafts by their rows.

    Called before the engine's first request; nothing is left in the executor. None if the KV pool or the
    context is too small for steps of two sizes.
    """
    plain = list[tuple[int, float]]()
    drafted = list[tuple[int, float]]()
    ends_s = time.perf_counter() + MAX_SECONDS
    for num_seqs, num_drafts in _shapes(config, max_drafts):
        is_late = time.perf_counter() > ends_s and min(len(plain), len(drafted)) > 1
        if is_late or not _has_room(executor.info, config, num_seqs, num_drafts):
            break
        seconds = _seconds_of_step(executor, _make_scheduler(executor.info, config), num_seqs, num_drafts)
        (drafted if num_drafts else plain).append((num_seqs * (1 + num_drafts), seconds))
    if min(len(plain), len(drafted)) < 2:
        return None
    logger.info("Steps take %s; with drafts %s.", _told(plain, "requests"), _told(drafted, "rows"))
    return StepCosts(drafted, plain)


def _shapes(config: EngineConfig, max_drafts: int) -> Iterator[tuple[int, int]]:
    """Numbers of requests, and of drafts of each, by rising rows both without and with drafts.

    First one request with more and more drafts, then more and more requests, half of whose rows are drafts.
    """
    yield 1, 0
    num_rows = 2
    while num_rows <= 1 + max_drafts:
        yield 1, num_rows - 1
        num_rows *= 2
    num_seqs = 2
    while num_seqs <= config.scheduler.max_num_seqs:
        yield num_seqs, 0
        if 2 * num_seqs >= num_rows:
            yield num_seqs, 1
        num_seqs *= 2


def _has_room(info: ModelInfo, config: EngineConfig, num_seqs: int, num_drafts: int) -> bool:
    """Whether no request of such steps ends, waits or is preempted."""
    num_tokens = PROMPT_TOKENS + (NUM_STEPS + 2) * (1 + num_drafts)
    num_blocks = num_seqs * len(info.kv_cache_groups) * (1 + num_tokens // config.cache.block_size)
    return (
        num_tokens < info.max_model_len
        and POOL_SHARE * num_blocks < info.num_gpu_blocks
        and num_seqs * max(PROMPT_TOKENS, 1 + num_drafts) <= config.scheduler.max_num_batched_tokens
        and (not info.num_states or POOL_SHARE * num_seqs < info.num_states)
    )


def _make_scheduler(info: ModelInfo, config: EngineConfig) -> Scheduler:
    """A scheduler over the executor's pool, without prefix cache, second tier or steps that overlap."""
    return Scheduler(
        replace(config.scheduler, async_scheduling=False),
        block_size=config.cache.block_size,
        num_blocks=info.num_gpu_blocks,
        max_model_len=info.max_model_len,
        policy=FcfsPolicy(),
        enable_prefix_caching=False,
        kv_cache_groups=info.kv_cache_groups,
        num_states=info.num_states,
    )


def _seconds_of_step(executor: Executor, scheduler: Scheduler, num_seqs: int, num_drafts: int) -> float:
    """Seconds of the shortest of some equal steps."""
    ids = [f"step-costs-{index}" for index in range(num_seqs)]
    params = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
    for request_id in ids:
        scheduler.add_request(Request(request_id, [0] * PROMPT_TOKENS, params, 0.0), 0.0)
    _run(executor, scheduler)
    seconds = []
    for _ in range(1 + NUM_STEPS):
        if num_drafts:
            scheduler.update_draft_token_ids(dict.fromkeys(ids, [0] * num_drafts), 0.0)
        started_s = time.perf_counter()
        _run(executor, scheduler)
        seconds.append(time.perf_counter() - started_s)
    scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED, 0.0)
    _run(executor, scheduler)
    return min(seconds[1:])


def _run(executor: Executor, scheduler: Scheduler) -> None:
    plan = scheduler.schedule(0.0)
    scheduler.update_from_output(plan, executor.submit(plan).result(), 0.0)


def _told(points: Sequence[tuple[int, float]], unit: str) -> str:
    """``1: 20.1 ms, 8: 21.7 ms (requests)``"""
    return ", ".join(f"{number}: {1e3 * seconds:.3g} ms" for number, seconds in points) + f" ({unit})"
