"""Looking up the job of a prompt: exact, and as fast for many remembered turns as for few."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from continuum.jobs.continuation import prompt_tail
from continuum.jobs.job import BranchTip, Job
from continuum.jobs.tip_index import MAX_WITH_SAME_PROMPT, TipIndex
from engine.core.kv_cache.block_hash import BlockHasher
from engine.core.request import Request
from engine.records.block_chain import BlockChain
from engine.records.messages import JobRef
from engine.records.sampling_params import SamplingParams

BLOCK = 16
SYSTEM = list(range(5000, 5096))


def request(prompt: Sequence[int], num_replies: int | None = None) -> Request:
    job = JobRef(num_replies=num_replies)
    params = SamplingParams(max_tokens=1)
    return Request("r", list(prompt), params, 0.0, job=job, block_hasher=BlockHasher(BLOCK))


def tip(turn: Request, reply: Sequence[int] = (), tenant: str | None = None) -> BranchTip:
    """The tip of a turn whose reply was ``reply``."""
    for token in reply:
        turn.append_output_token(token)
    job = Job("job", tenant, 0.0, 0.0, 0.0, is_inferred=True)
    chain, replies = BlockChain(turn.block_hashes), turn.job.num_replies if turn.job is not None else None
    tail = prompt_tail(turn, BLOCK)
    return BranchTip(
        job, "r", 1, chain, turn.num_prompt_tokens, 0.0, (0, 0.0), prompt_tail=tail, num_replies=replies
    )


def remember(index: TipIndex, turn: Request, reply: Sequence[int] = ()) -> BranchTip:
    left = tip(turn, reply)
    left.beginning = index.beginning_of(left, turn.block_hashes)
    index.add(left)
    return left


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=60), min_size=1, max_size=6),
    more=st.lists(st.integers(0, 1), min_size=1, max_size=40),
    cut=st.integers(0, 60),
)
def test_what_is_found_is_a_turn_that_the_prompt_contains(
    prompts: list[list[int]], more: list[int], cut: int
) -> None:
    """Among very similar prompts, a found turn's prompt is contained in the new one, except for last tokens
    that a chat template may render differently; and a contained turn is found."""
    index = TipIndex(BLOCK)
    turns = [remember(index, request(prompt, 0), [9] * 20) for prompt in prompts]
    asked = [*prompts[0], *([9] * 20)[:cut], *more]
    found = index.find(request(asked, 1), None)
    if cut >= 20:
        assert found is not None
    if found is not None:
        prompt = prompts[turns.index(found)]
        num_sure = max(0, len(prompt) - 8)
        assert asked[:num_sure] == prompt[:num_sure]
        assert len(asked) > len(prompt)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80))
def test_nothing_is_left_of_what_was_removed(steps: list[tuple[int, bool]]) -> None:
    """Nothing remains of removed turns, for any order and for more turns of one prompt than are
    distinguished."""
    index = TipIndex(BLOCK)
    turns = [request([*SYSTEM, number, *range(30)], 0) for number in range(4)]
    held: list[BranchTip] = []
    for number, goes in steps:
        if goes and held:
            index.remove(held.pop(number % len(held)))
        else:
            held.append(remember(index, turns[number]))
        assert len(index) <= len(held)
    for each in held:
        index.remove(each)
    assert len(index) == 0
    assert index.find(request([*SYSTEM, 0, *range(40)], 1), None) is None


def test_of_many_turns_with_one_prompt_the_latest_are_told_apart() -> None:
    """The number of turns that a look-up compares is bounded."""
    index = TipIndex(BLOCK)
    numbers = range(100, 100 + MAX_WITH_SAME_PROMPT + 5)
    turns = [remember(index, request(SYSTEM, 0), [number] * 40) for number in numbers]
    assert len(index) == MAX_WITH_SAME_PROMPT
    for number in (100 + MAX_WITH_SAME_PROMPT + 4, 105):
        found = index.find(request([*SYSTEM, *[number] * 40, 1], 1), None)
        assert found is turns[number - 100]


def test_looking_a_prompt_up_costs_the_same_however_much_is_remembered() -> None:
    """A look-up of 20,000 tokens costs the same among ten or ten thousand turns with one system prompt."""
    took_s = []
    asked = request([*SYSTEM, *range(20_000)], 1)
    for num_remembered in (10, 10_000):
        index = TipIndex(BLOCK)
        for number in range(num_remembered):
            remember(index, request([*SYSTEM, number % 100, number // 100, *range(30)], 0))
        assert len(index) == num_remembered
        started = time.perf_counter()
        for _ in range(20):
            assert index.find(asked, None) is None
        took_s.append(time.perf_counter() - started)
    assert took_s[1] < 5 * took_s[0] + 0.02
