"""Replays recorded scheduling decisions through our scheduler: python -m tests.conformance.golden FILE...

Prints ``N of M steps agree`` and the first difference of each case that has one; exit code 1 if any step
differs. A step after the first difference of its case counts as differing too: its state is no longer the
recorded one.

One decision of V1 is not ours: if a request preempts itself, V1 ends the step, even if requests after it
would fit. To compare all other decisions, ``V1Scheduler`` adopts it.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from engine.config.engine_config import SchedulerConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.policy import FcfsPolicy, PriorityPolicy
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.step import Step
from engine.records.sampling_params import SamplingParams

POLICIES = {"fcfs": FcfsPolicy, "priority": PriorityPolicy}


class GoldenConfig(msgspec.Struct, forbid_unknown_fields=True):
    policy: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool
    scheduler_reserve_full_isl: bool


class GoldenRequest(msgspec.Struct):
    id: str
    step: int
    prompt: list[int]
    parent: str | None
    max_tokens: int
    priority: int


class GoldenStep(msgspec.Struct):
    """Everything recorded about one ``schedule()`` and the update after it."""

    step: int
    new: list[str]
    resumed: list[str]
    running: list[str]
    preempted: list[str]
    tokens: dict[str, int]
    computed: dict[str, int]
    free_blocks: int
    finished: list[str]


class GoldenCase(msgspec.Struct):
    config: GoldenConfig
    requests: list[GoldenRequest]
    steps: list[GoldenStep]


def sample(request_id: str, position: int) -> int:
    """The recording's model: a function of the request and the number of its tokens."""
    return (1000003 * crc32(request_id.encode()) + 7919 * position) % 30000 + 100


class V1Scheduler(Scheduler):
    """Our scheduler, except that no request after one that preempts itself runs in that step."""

    def _preempt(self, victim: Request, step: Step, index: int) -> int:
        preempts_itself = self.running[index] is victim
        num_moved = super()._preempt(victim, step, index)
        if preempts_itself:
            step.budget = 0
        return num_moved


class Replay:
    """One case: adds requests when they become ready and steps the real scheduler."""

    def __init__(self, case: GoldenCase) -> None:
        config = case.config
        self._max_model_len = config.max_model_len
        self._pending = list(case.requests)
        self._tokens_of: dict[str, list[int]] = {}
        self.scheduler = V1Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
            ),
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            policy=POLICIES[config.policy](),
            enable_prefix_caching=config.enable_prefix_caching,
        )

    def step(self, number: int) -> GoldenStep:
        self._add_ready(number)
        plan = self.scheduler.schedule(float(number))
        free_blocks = self.scheduler.kv.num_free_blocks
        cached = plan.scheduled_cached_reqs
        resumed = [i for i in cached.req_ids if i in cached.resumed_req_ids]
        computed = {r.req_id: r.num_computed_tokens for r in plan.scheduled_new_reqs}
        computed.update(
            (i, n)
            for i, n in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if i in cached.resumed_req_ids
        )
        finished = self._run(plan, float(number))
        return GoldenStep(
            step=number,
            new=[r.req_id for r in plan.scheduled_new_reqs],
            resumed=resumed,
            running=[i for i in cached.req_ids if i not in cached.resumed_req_ids],
            preempted=sorted(plan.preempted_req_ids),
            tokens=plan.num_scheduled_tokens,
            computed=computed,
            free_blocks=free_blocks,
            finished=finished,
        )

    def _add_ready(self, number: int) -> None:
        ready = [
            r for r in self._pending if r.step <= number and (r.parent is None or r.parent in self._tokens_of)
        ]
        for index, recorded in enumerate(ready):
            self._pending.remove(recorded)
            prompt = (
                self._tokens_of[recorded.parent] + recorded.prompt if recorded.parent else recorded.prompt
            )
            request = Request(
                recorded.id,
                prompt[: self._max_model_len - recorded.max_tokens - 2] if recorded.parent else prompt,
                SamplingParams(max_tokens=recorded.max_tokens, ignore_eos=True),
                arrival_time=number + index * 1e-4,
                priority=recorded.priority,
                block_hasher=self.scheduler.request_block_hasher,
            )
            self.scheduler.add_request(request, float(number))

    def _run(self, plan: SchedulerOutput, now: float) -> list[str]:
        """Samples for every request whose tokens are all computed; returns those that finished."""
        requests = [self.scheduler.requests[i] for i in plan.num_scheduled_tokens]
        done = [r for r in requests if r.num_computed_tokens == r.num_tokens]
        result = ModelRunnerOutput(
            [r.request_id for r in done], [[sample(r.request_id, r.num_tokens)] for r in done]
        )
        outputs = self.scheduler.update_from_output(plan, result, now)
        finished = sorted(o.request_id for o in outputs if o.finished)
        for request in done:
            if request.request_id in finished:
                self._tokens_of[request.request_id] = request.all_token_ids
        return finished


def read_cases(path: Path) -> Iterator[GoldenCase]:
    decoder = msgspec.json.Decoder(GoldenCase)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise SystemExit(f"{path}, line {number}: {error}") from error


def first_difference(case: GoldenCase) -> tuple[int, str] | None:
    """Index and description of the first step that differs, or None."""
    replay = Replay(case)
    for index, expected in enumerate(case.steps):
        actual = replay.step(expected.step)
        if actual != expected:
            fields: list[Any] = [
                f"{name}: recorded {getattr(expected, name)}, ours {getattr(actual, name)}"
                for name in GoldenStep.__struct_fields__
                if getattr(actual, name) != getattr(expected, name)
            ]
            return index, "; ".join(fields)
        replay.scheduler.check_invariants()
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.golden", description=__doc__)
    parser.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="JSON lines, gzip if it ends in .gz"
    )
    arguments = parser.parse_args(argv)
    num_agreeing = num_steps = 0
    for path in arguments.files:
        for number, case in enumerate(read_cases(path), start=1):
            num_steps += len(case.steps)
            difference = first_difference(case)
            if difference is None:
                num_agreeing += len(case.steps)
            else:
                num_agreeing += difference[0]
                print(f"{path.name}, case {number}, step {difference[0]}: {difference[1]}")
    print(f"{num_agreeing} of {num_steps} steps agree")
    return 0 if num_agreeing == num_steps else 1


if __name__ == "__main__":
    sys.exit(main())
