"""``make bench-step``: measures the cost of the scheduler alone, in microseconds, without model or process.

One thread, the garbage collector on, as in the engine core. The cases are those that V1's scheduler is
measured by, then a crowd: a step with thousands of waiting jobs and pins against the same step with ten. With
--vllm each case runs on vLLM's V1 scheduler right before, and ours / theirs is printed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from benchmarks.scheduler.vllm_scheduler import VllmScheduler
from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicyFactory
from engine.config.engine_config import SchedulerConfig
from engine.core.kv_cache.block_hash import BlockHash, BlockHasher
from engine.core.kv_cache.block_pool import BlockPool
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.policy import PolicyContext, PolicyFactory, fcfs
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.records.messages import JobRef, ToolCall, ToolGapStarted
from engine.records.sampling_params import SamplingParams
from eval.errors import ServerError

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
NUM_BLOCKS = 40_000
WARM_UP_STEPS = 20
STEP_S = 0.02
"""Assumed duration of a step of the model."""
POLICIES: dict[str, PolicyFactory] = {"fcfs": fcfs, "continuum": ContinuumPolicyFactory(ContinuumConfig())}


@dataclass(frozen=True, slots=True)
class Timing:
    """One case: seconds of each repetition."""

    case: str
    policy: str
    samples_s: list[float]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_s) * 1e6

    @property
    def mean_us(self) -> float:
        return statistics.fmean(self.samples_s) * 1e6

    def line(self) -> str:
        high = max(self.samples_s) * 1e6
        return (
            f"{self.case:<52} {self.policy:<10} {self.median_us:>10.1f} {self.mean_us:>10.1f} {high:>10.1f}"
        )


class Bench:
    """A scheduler under a policy, with synthetic requests and tokens."""

    def __init__(self, policy: PolicyFactory, *, max_num_seqs: int, num_blocks: int = NUM_BLOCKS) -> None:
        self._random = random.Random(7)
        self._ids = itertools.count()
        self._hasher = BlockHasher(BLOCK_SIZE)
        self.now = 0.0
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            policy=policy(PolicyContext(BLOCK_SIZE, num_blocks - 1)),
        )

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(300, 4000) for _ in range(count)]

    def request(self, tokens: list[int], max_tokens: int, job_id: str | None = None) -> Request:
        return Request(
            f"r{next(self._ids)}",
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
            self.now,
            job=None if job_id is None else JobRef(job_id),
            block_hasher=self._hasher,
        )

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request, self.now)

    def step(self, step_s: float = STEP_S) -> float:
        """Runs one step, a token for each request that is due one; returns its seconds without the model."""
        began = perf_counter()
        plan = self.scheduler.schedule(self.now)
        planned = perf_counter()
        result = self._answer(plan)
        self.now += step_s
        answered = perf_counter()
        self.scheduler.update_from_output(plan, result, self.now)
        return perf_counter() - answered + planned - began

    def _answer(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        requests = self.scheduler.requests
        ids = list(plan.num_scheduled_tokens)
        done = [requests[i].num_computed_tokens >= requests[i].num_tokens for i in ids]
        return ModelRunnerOutput(req_ids=ids, sampled_token_ids=[[11] if d else [] for d in done])

    def run_until_idle(self, step_s: float = STEP_S) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step(step_s)

    def run_until_decoding(self) -> None:
        """Steps until all running requests have finished their prefill."""
        self.step()
        while any(r.num_computed_tokens < r.num_tokens - 1 for r in self.scheduler.running):
            self.step()


# ---- V1's cases ----


def decode(policy: str, factory: PolicyFactory, num_requests: int, num_steps: int) -> Timing:
    """Times steps with ``num_requests`` running requests, each getting one token."""
    bench = decoding(factory, num_requests)
    samples = [bench.step() for _ in range(num_steps)]
    return Timing(f"schedule + update, {num_requests} decoding", policy, samples)


def decoding(factory: PolicyFactory, num_requests: int) -> Bench:
    """Starts running requests, all past their prompts; some steps are done already."""
    bench = Bench(factory, max_num_seqs=max(num_requests, 16))
    for number in range(num_requests):
        bench.add(bench.request(bench.tokens(128), 4000, f"job-{number}"))
    while bench.scheduler.waiting.peek() is not None:
        bench.step()
    bench.run_until_decoding()
    for _ in range(WARM_UP_STEPS):
        bench.step()
    return bench


def admit_hit(policy: str, factory: PolicyFactory, num_repeats: int) -> Timing:
    """Times a prompt of 4160 tokens, 4096 of them cached: made, added, scheduled, updated."""
    bench = Bench(factory, max_num_seqs=16)
    samples = []
    for _ in range(num_repeats):
        base = bench.tokens(4096)
        bench.add(bench.request(list(base), 1))
        bench.run_until_idle()
        tokens = base + bench.tokens(64)
        began = perf_counter()
        bench.add(bench.request(tokens, 1))
        made = perf_counter() - began
        samples.append(made + bench.step())
        bench.run_until_idle()
        assert bench.scheduler.reset_prefix_cache(bench.now)
    return Timing("admit a prompt with a hit of 4096 tokens", policy, samples)


def hashing(num_repeats: int) -> Timing:
    """Times the hashing of 4096 tokens."""
    hasher = BlockHasher(BLOCK_SIZE)
    tokens = Bench(fcfs, max_num_seqs=1).tokens(4096)

    def once() -> None:
        hashes: list[BlockHash] = []
        hasher.extend(hashes, tokens)

    return Timing("hash 4096 tokens", "", _timed(once, num_repeats))


def pool(num_repeats: int) -> list[Timing]:
    """Times 256 empty blocks allocated and freed; and 256 free cached ones hit, and freed."""
    blocks = BlockPool(NUM_BLOCKS)
    hashes = [number.to_bytes(32) for number in range(256)]
    got = []
    freed = []
    touched = []
    freed_cached = []
    for _ in range(num_repeats):
        began = perf_counter()
        taken = blocks.get_new_blocks(256)
        got.append(perf_counter() - began)
        began = perf_counter()
        blocks.free_blocks(reversed(taken))
        freed.append(perf_counter() - began)
        taken = blocks.get_new_blocks(256)
        blocks.cache_full_blocks(taken, hashes, 0, 256)
        began = perf_counter()
        blocks.free_blocks(reversed(taken))
        freed_cached.append(perf_counter() - began)
        began = perf_counter()
        blocks.touch(taken)
        touched.append(perf_counter() - began)
        blocks.free_blocks(reversed(taken))
        blocks.evict_all()
    return [
        Timing("get 256 blocks", "", got),
        Timing("free 256 blocks", "", freed),
        Timing("free 256 cached blocks", "", freed_cached),
        Timing("touch 256 blocks", "", touched),
    ]


def _timed(action: Callable[[], None], num_repeats: int) -> list[float]:
    samples = []
    for _ in range(num_repeats):
        began = perf_counter()
        action()
        samples.append(perf_counter() - began)
    return samples


# ---- a crowd ----

RUNNING = 32
PIN_TOKENS = 128
RETURNING_TOKENS = 8000
ROOM_BLOCKS = 480
"""Free blocks: running requests grow into them, and the returning turn needs more."""
SLOW_STEP_S = 40.0
HOLD_S = 1e6
_HOLDING = ContinuumConfig(ttl_rule="fixed", fixed_ttl_s=HOLD_S, max_ttl_s=HOLD_S, pin_budget=1.0)


def crowded(num_waiting: int, num_pins: int, num_steps: int) -> Timing:
    """Times steps in a crowd."""
    bench = crowd(num_waiting, num_pins)
    samples = [bench.step() for _ in range(num_steps)]
    assert len(bench.scheduler.running) == RUNNING
    assert len(bench.scheduler.waiting) == num_waiting
    assert bench.scheduler.kv.num_pins == num_pins
    return Timing(
        f"{RUNNING} decoding beside {num_waiting:,} waiting, {num_pins:,} pins", "continuum", samples
    )


def crowd(num_waiting: int, num_pins: int) -> Bench:
    """32 requests decode while the oldest job's next turn waits: its allocation fails, and it may revoke any
    of the pins if that costs less than it has waited; new jobs wait after it. Some steps are done already.

    The pins' prefills are said to have taken so long that the decision stays no, however often it is made.
    """
    bench = Bench(
        ContinuumPolicyFactory(_HOLDING),
        max_num_seqs=RUNNING + 2,
        num_blocks=num_pins * (PIN_TOKENS // BLOCK_SIZE + 1) + RUNNING * MAX_MODEL_LEN // BLOCK_SIZE,
    )
    first_prompt = bench.tokens(PIN_TOKENS)
    # Its tool call is not reported, so its return teaches nothing about the others.
    bench.add(bench.request(first_prompt, 1, "oldest"))
    bench.run_until_idle(SLOW_STEP_S)
    for number in range(num_pins - 1):
        _run_turn(bench, bench.tokens(PIN_TOKENS), f"held-{number}")
    for number in range(RUNNING):
        bench.add(bench.request(bench.tokens(64), MAX_MODEL_LEN - 64, f"running-{number}"))
    bench.run_until_decoding()
    pool = bench.scheduler.kv.pool
    pool.get_new_blocks(pool.num_free_blocks - ROOM_BLOCKS)
    rest = bench.tokens(RETURNING_TOKENS - PIN_TOKENS)
    bench.add(bench.request(first_prompt + rest, 4, "oldest"))
    for number in range(num_waiting - 1):
        bench.add(bench.request(bench.tokens(64), 4, f"waiting-{number}"))
    for _ in range(WARM_UP_STEPS):
        bench.step()
    return bench


def _run_turn(bench: Bench, prompt: list[int], job_id: str) -> None:
    """Runs a turn that ends with a tool call and is pinned."""
    request = bench.request(prompt, 1, job_id)
    bench.add(request)
    bench.run_until_idle(SLOW_STEP_S)
    call = ToolCall("bash", '{"command": "make test"}')
    bench.scheduler.signal(ToolGapStarted(request.request_id, [call]), bench.now)


# ---- comparison with vLLM ----

VLLM = "vLLM"
GOALS = {
    "schedule + update": 1 / 3,
    "admit a prompt": 1 / 3,
    "hash 4096 tokens": 1 / 3,
    "get 256": 0.5,
    "touch 256": 0.5,
    "free 256": 0.5,
}
"""Largest allowed ratio to vLLM's time, by the first words of a case."""


def ratio_line(ours: Timing, theirs: Timing) -> str:
    """Returns the ratio of the medians and its goal."""
    ratio = ours.median_us / theirs.median_us
    goal = next(bound for words, bound in GOALS.items() if ours.case.startswith(words))
    verdict = "met" if ratio <= goal else "NOT MET"
    return f"{ours.case:<52} {ours.policy:<10} {ratio:>9.2f}x   goal <= {goal:.2f}x   {verdict}"


def _ratios(timings: Sequence[Timing]) -> Iterator[str]:
    """Yields ours / theirs, a line for each case that both have."""
    theirs = {timing.case: timing for timing in timings if timing.policy == VLLM}
    for timing in timings:
        if timing.policy != VLLM and timing.case in theirs:
            yield ratio_line(timing, theirs[timing.case])


# ---- the command ----

CASES: Mapping[str, Callable[[int], list[Timing]]] = {
    "decode-1": lambda steps: _each_policy(lambda name, policy: decode(name, policy, 1, steps)),
    "decode-32": lambda steps: _each_policy(lambda name, policy: decode(name, policy, 32, steps)),
    "decode-256": lambda steps: _each_policy(lambda name, policy: decode(name, policy, 256, steps)),
    "admit": lambda steps: _each_policy(lambda name, policy: admit_hit(name, policy, steps // 4)),
    "hash": lambda steps: [hashing(steps // 4)],
    "pool": lambda steps: pool(steps // 4),
}
"""Cases by name; vLLM's side uses the same names."""


def _each_policy(case: Callable[[str, PolicyFactory], Timing]) -> list[Timing]:
    return [case(policy, factory) for policy, factory in POLICIES.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-step", description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=200, metavar="STEPS", help="timed steps of each case (200)"
    )
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="an interpreter that has vLLM 0.32: its scheduler beside ours"
    )
    args = parser.parse_args(argv)
    if not 10 <= args.steps <= 200:
        parser.error("--steps must be in [10, 200]")
    try:
        with ExitStack() as stack:
            vllm = stack.enter_context(VllmScheduler(args.vllm)) if args.vllm is not None else None
            _run(args.steps, vllm)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(num_steps: int, vllm: VllmScheduler | None) -> None:
    print(f"{'case':<52} {'policy':<10} {'median us':>10} {'mean':>10} {'max':>10}")
    timings: list[Timing] = []
    for name, measure in CASES.items():
        theirs = vllm.measure(name, num_steps) if vllm is not None else []
        found = [*[Timing(each.case, VLLM, each.samples_s) for each in theirs], *measure(num_steps)]
        for timing in found:
            print(timing.line(), flush=True)
        timings += found
    _run_crowd(num_steps)
    if vllm is not None:
        print(f"\nours / vLLM {vllm.version}, medians")
        print("\n".join(_ratios(timings)))


def _run_crowd(num_steps: int) -> None:
    few, many = (crowded(waiting, pins, num_steps) for waiting, pins in ((10, 10), (10_000, 2_000)))
    for timing in (few, many):
        print(timing.line())
    print(
        f"In the crowd a step takes {many.median_us / few.median_us:.2f}x the step beside ten at the median, "
        f"{many.mean_us / few.mean_us:.2f}x on the mean."
    )


if __name__ == "__main__":
    sys.exit(main())
