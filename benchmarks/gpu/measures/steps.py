"""Section ``steps``: times decode and prefill of the large model, and steps with drafts of the small one,
through the executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from benchmarks.gpu import goals
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.models import engine_options
from benchmarks.gpu.measures.plans import Decoding, Planner, ending
from engine.core.outputs import SchedulerOutput
from engine.executor import Executor, PendingOutput
from engine.frontend.llm import engine_config
from engine.worker.executor import UniProcExecutor

_NUM_DRAFTS = 4
"""Drafts of each sequence in a step that verifies them."""


def run(bench: Bench) -> None:
    _time_large(bench)
    bench.device.give_back()
    _time_drafts(bench)


def _time_large(bench: Bench) -> None:
    sizes = bench.sizes
    shape = bench.sizes.large
    options = engine_options(
        bench,
        shape,
        max_model_len=max(sum(sizes.turn), sizes.prefill) + sizes.block_size,
        max_num_seqs=max(sizes.decode_batches),
        max_num_batched_tokens=sizes.prefill,
        enable_prefix_caching=False,
    )
    executor = UniProcExecutor(engine_config(**options))
    planner = Planner(executor.info.num_gpu_blocks, sizes.block_size, shape.vocab_size)
    try:
        _fill_pool(bench, executor, planner)
        for batch in sizes.decode_batches:
            with bench.case(f"decode, B={batch}"):
                _time_decode(bench, executor, planner, batch)
        new, cached = sizes.turn
        for name, lengths, goal in (
            (f"{shape.name} prefill of {sizes.prefill:,}", (sizes.prefill, 0), goals.PREFILL_8K),
            (f"{shape.name} {new:,} new on {cached:,} cached", sizes.turn, goals.PREFILL_2K_ON_32K),
        ):
            with bench.case(name):
                _time_prefill(bench, executor, planner, lengths, name, goal)
    finally:
        executor.shutdown()


def _time_drafts(bench: Bench) -> None:
    """Times the small model at the smaller batches: under load there are no drafts."""
    sizes = bench.sizes
    shape = bench.sizes.small
    batches = sizes.decode_batches[:2]
    options = engine_options(
        bench,
        shape,
        max_model_len=sizes.decode_context + sizes.prefill,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(sizes.prefill, max(batches) * (1 + _NUM_DRAFTS)),
        enable_prefix_caching=False,
        speculative_config={"num_speculative_tokens": _NUM_DRAFTS},
    )
    with bench.case("steps with drafts"):
        executor = UniProcExecutor(engine_config(**options))
        planner = Planner(executor.info.num_gpu_blocks, sizes.block_size, shape.vocab_size)
        try:
            _fill_pool(bench, executor, planner)
            for batch in batches:
                _time_verification(bench, executor, planner, batch)
        finally:
            executor.shutdown()


def _run_plans(executor: Executor, plans: Iterable[SchedulerOutput]) -> None:
    """Runs plans like the engine: as many in flight as the executor takes."""
    in_flight: deque[PendingOutput] = deque()
    for plan in plans:
        in_flight.append(executor.submit(plan))
        if len(in_flight) == executor.max_concurrent_batches:
            in_flight.popleft().result()
    for pending in in_flight:
        pending.result()


def _fill_pool(bench: Bench, executor: Executor, planner: Planner) -> None:
    """Fills the blocks that will be read with the KV of prompts: zeros are attended faster."""
    sizes = bench.sizes
    num_tokens = min(
        max(sizes.decode_context * max(sizes.decode_batches), sum(sizes.turn)), planner.longest(num_seqs=1)
    )
    planner.rewind()
    for _ in range(num_tokens // sizes.prefill):
        begun = planner.begin([(sizes.prefill, 0)])
        _run_plans(executor, [begun, ending(begun.num_scheduled_tokens)])


def _time_decode(bench: Bench, executor: Executor, planner: Planner, batch: int) -> None:
    """Measures seconds per step while contexts grow through the nominal one."""
    sizes = bench.sizes
    shape = bench.sizes.large
    num_steps = sizes.num_warm_up_steps + (sizes.num_repeats + 1) * sizes.steps_per_repeat
    planner.rewind()
    context = min(sizes.decode_context, planner.longest(batch) - num_steps)
    begun = planner.begin([(1, context - num_steps // 2)] * batch, room=num_steps)
    decoding = Decoding.of(begun)
    _run_plans(executor, [begun, *_steps(decoding, sizes.num_warm_up_steps)])
    seconds = bench.repeats(lambda: _run_plans(executor, _steps(decoding, sizes.steps_per_repeat)))
    _run_plans(executor, [decoding.end()])
    bench.figure(
        f"{shape.name} decode, B={batch} at {context:,}",
        "ms",
        [1e3 * each / sizes.steps_per_repeat for each in seconds],
        floor=1e3 * bench.floors(shape).decode_s([context] * batch),
        goal=goals.DECODE.get(batch),
        note="" if context == sizes.decode_context else f"the pool holds no {sizes.decode_context:,}",
    )


def _time_verification(bench: Bench, executor: Executor, planner: Planner, batch: int) -> None:
    """Measures seconds per step with equally many drafts per sequence; waits for each step."""
    sizes = bench.sizes
    shape = bench.sizes.small
    num_steps = sizes.num_warm_up_steps + (sizes.num_repeats + 1) * sizes.steps_per_repeat
    room = num_steps * (1 + _NUM_DRAFTS)
    planner.rewind()
    context = min(sizes.decode_context, planner.longest(batch) - room)
    begun = planner.begin([(1, context - num_steps // 2)] * batch, room=room)
    decoding = Decoding.of(begun)
    _run_plans(executor, [begun])
    _verify(executor, decoding, sizes.num_warm_up_steps)
    seconds = bench.repeats(lambda: _verify(executor, decoding, sizes.steps_per_repeat))
    _run_plans(executor, [decoding.end()])
    bench.figure(
        f"{shape.name} with {_NUM_DRAFTS} drafts each, B={batch} at {context:,}",
        "ms",
        [1e3 * each / sizes.steps_per_repeat for each in seconds],
        floor=1e3 * bench.floors(shape).decode_s([context] * batch, 1 + _NUM_DRAFTS),
    )


def _verify(executor: Executor, decoding: Decoding, count: int) -> None:
    drafts = {req_id: [0] * _NUM_DRAFTS for req_id in decoding.num_computed}
    for _ in range(count):
        decoding.verified(executor.submit(decoding.verification(drafts)).result())


def _steps(decoding: Decoding, count: int) -> Iterator[SchedulerOutput]:
    """Yields plans; each is made while the step before runs."""
    return (decoding.step() for _ in range(count))


def _time_prefill(
    bench: Bench, executor: Executor, planner: Planner, lengths: tuple[int, int], name: str, goal: Goal
) -> None:
    """Measures from the plan to the first token."""
    plans = []
    for _ in range(bench.sizes.num_repeats + 1):
        planner.rewind()
        plans.append(planner.begin([lengths]))
    left = iter(plans)
    seconds = bench.repeats(lambda: _run_plans(executor, [next(left)]))
    _run_plans(executor, [ending(req_id for plan in plans for req_id in plan.num_scheduled_tokens)])
    floor = bench.floors(bench.sizes.large).prefill_s(*lengths)
    bench.figure(name, "ms", [1e3 * each for each in seconds], floor=1e3 * floor, goal=goal)
