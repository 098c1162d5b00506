"""Cost of a scheduler step in interpreter instructions: the same on every machine and under any load, so that
a clear regression fails here and noise does not."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks.scheduler.step_bench import POLICIES, Bench, crowd, decoding

NUM_STEPS = 9
MAX_OF_LEAST_WORK = 13.0
"""Cap on a step's instructions per decoding request, as a multiple of the least work; 10.2 was measured."""


def instructions(action: Callable[[], object]) -> int:
    """Counts the instructions that the interpreter runs for an action, in all Python functions it calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def per_step(bench: Bench) -> float:
    return statistics.median(instructions(bench.step) for _ in range(NUM_STEPS))


class Counted:
    """A request that consists only of its tokens."""

    def __init__(self, number: int) -> None:
        self.request_id = f"r{number}"
        self.tokens = [0] * 128
        self.num_computed_tokens = 127


def least_work(requests: list[Counted]) -> dict[str, int]:
    """Does what no scheduler can avoid: plan each request's due tokens, count them, append its token."""
    plan: dict[str, int] = {}
    for request in requests:
        num_new = len(request.tokens) - request.num_computed_tokens
        if num_new > 0:
            plan[request.request_id] = num_new
            request.num_computed_tokens += num_new
    for request in requests:
        if plan.get(request.request_id):
            request.tokens.append(11)
    return plan


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decoding_request_costs_little_in_a_step(policy: str) -> None:
    """schedule() and update_from_output() of 256 decoding requests stay within a multiple of the least work,
    and the cost per request does not grow with the number of requests."""
    few, many = (per_step(decoding(POLICIES[policy], count)) / count for count in (32, 256))
    requests = [Counted(number) for number in range(256)]
    least = instructions(lambda: least_work(requests)) / len(requests)
    assert many / least < MAX_OF_LEAST_WORK
    assert many / few < 1.1


@pytest.mark.slow
def test_a_crowd_costs_a_step_nothing() -> None:
    """A step with thousands of waiting jobs and pins runs as many instructions as one with ten, except for
    the few steps that scan all pins."""
    quiet, crowded = per_step(crowd(10, 10)), per_step(crowd(2_000, 1_000))
    assert crowded / quiet < 1.1
