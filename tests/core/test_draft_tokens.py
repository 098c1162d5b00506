"""Drafts in a scheduler: they use leftover resources, right ones are kept, and nothing else changes."""

from __future__ import annotations

import pytest

from engine.core.outputs import SchedulerOutput
from engine.core.request import RequestStatus
from engine.core.scheduler_report import PauseState
from engine.records.messages import FinishReason, JobRef
from tests.core.engine_room import EngineRoom, token_at
from tests.core.test_scheduler_machine import ChaosPolicy


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def propose(room: EngineRoom, **drafts: tuple[int, int]) -> None:
    """Proposes for each request a number of right drafts, followed by a number of wrong ones."""
    found = {i: room.drafts_of(room.scheduler.requests[i], *counts) for i, counts in drafts.items()}
    room.scheduler.update_draft_token_ids(found, room.clock.now())


def running_room(*prompts: int, max_tokens: int = 20, **options: int | bool) -> EngineRoom:
    """A room with requests a, b, ... with prompts of these lengths, each with its first token sampled."""
    room = EngineRoom(**options)  # type: ignore[arg-type]
    for number, length in enumerate(prompts):
        room.add("abcdef"[number], tokens(100 * number, length), max_tokens=max_tokens)
    while len(room.received) < len(prompts):
        room.step()
    return room


def drafts_in(plan: SchedulerOutput) -> dict[str, int]:
    return {request_id: len(drafts) for request_id, drafts in plan.scheduled_spec_decode_tokens.items()}


def test_right_drafts_are_taken_and_one_token_more() -> None:
    """Accepted drafts count as computed; rejected ones do not, and their positions are recomputed."""
    room = running_room(6)
    propose(room, a=(3, 2))
    plan = room.step()
    assert (plan.num_scheduled_tokens, drafts_in(plan)) == ({"a": 6}, {"a": 5})
    assert room.received["a"] == [token_at("a", 6 + i) for i in range(5)]
    request = room.scheduler.requests["a"]
    assert request.num_computed_tokens == request.num_tokens - 1 == 10
    plan = room.step()
    assert plan.scheduled_cached_reqs.num_computed_tokens == [10]
    assert plan.num_scheduled_tokens == {"a": 1}


@pytest.mark.parametrize("num_right", range(7))
def test_only_blocks_of_verified_tokens_are_cached(num_right: int) -> None:
    """Although the step computed more, only blocks full of verified tokens are cached."""
    room = running_room(6)
    propose(room, a=(num_right, 6 - num_right))
    room.step()
    assert room.scheduler.statistics().num_cached_blocks == (7 + num_right) // 4
    room.check_invariants()


@pytest.mark.parametrize("stops_after", [0, 2, 4, 5])
def test_a_stop_token_among_drafts_ends_the_request(stops_after: int) -> None:
    """Verified drafts after the stop token are dropped and not cached."""
    room = EngineRoom()
    room.add("a", tokens(0, 6), max_tokens=20, stops_after=stops_after + 1)
    room.step()
    propose(room, a=(5, 0))
    room.step()
    assert room.finished["a"].finish_reason is FinishReason.STOP
    assert room.received["a"] == [token_at("a", 6 + i) for i in range(stops_after + 2)]
    assert room.scheduler.statistics().num_cached_blocks == (6 + stops_after + 1) // 4
    assert room.scheduler.kv.num_free_blocks == 16


@pytest.mark.parametrize("max_tokens", [2, 3, 5])
def test_no_more_is_drafted_than_may_be_said(max_tokens: int) -> None:
    """The token sampled after the last draft is at most the last one that the request may have."""
    room = running_room(6, max_tokens=max_tokens)
    propose(room, a=(9, 0))
    assert drafts_in(room.step()) == ({"a": max_tokens - 2} if max_tokens > 2 else {})
    assert room.finished["a"].finish_reason is FinishReason.LENGTH
    assert len(room.received["a"]) == max_tokens


def test_drafts_end_where_the_context_does() -> None:
    room = running_room(6, max_model_len=10)
    propose(room, a=(9, 0))
    assert drafts_in(room.step()) == {"a": 2}
    assert len(room.received["a"]) == 4
    assert "a" in room.finished


def test_nobody_is_preempted_for_a_draft() -> None:
    """The only free block goes to the second request, which needs it for its token; drafts of the first one
    use the space in its last block."""
    room = running_room(6, 8, num_blocks=6)
    assert room.scheduler.kv.num_free_blocks == 1
    propose(room, a=(6, 0))
    plan = room.step()
    assert plan.num_scheduled_tokens == {"a": 2, "b": 1}
    assert drafts_in(plan) == {"a": 1}
    assert not plan.preempted_req_ids


def test_nobody_waits_for_the_blocks_of_drafts() -> None:
    """A prompt that fits is admitted in a step whose drafts would have taken its blocks."""
    room = running_room(6, num_blocks=6)
    room.add("b", tokens(100, 12))
    propose(room, a=(6, 0))
    plan = room.step()
    assert plan.num_scheduled_tokens == {"a": 2, "b": 12}


def test_no_pin_is_revoked_for_a_draft() -> None:
    """The second request takes the free block, and the pin stays."""
    room = EngineRoom(ChaosPolicy([]), num_blocks=8)
    room.add("x", tokens(300, 8), max_tokens=1)
    room.add("a", tokens(0, 6), max_tokens=20)
    room.add("b", tokens(100, 8), max_tokens=20)
    room.step()
    statistics = room.scheduler.statistics()
    assert (statistics.num_pinned_blocks, statistics.num_free_blocks) == (2, 1)
    propose(room, a=(6, 0))
    assert drafts_in(room.step()) == {"a": 1}
    assert room.scheduler.statistics().num_pinned_blocks == 2


def test_every_running_request_has_a_token_before_any_has_drafts() -> None:
    room = running_room(6, 6, 6, max_num_batched_tokens=5)
    propose(room, a=(6, 0), b=(6, 0), c=(6, 0))
    plan = room.step()
    assert plan.num_scheduled_tokens == {"a": 3, "b": 1, "c": 1}
    assert drafts_in(plan) == {"a": 2}
    room = running_room(6, 6, 6, max_num_batched_tokens=3)
    propose(room, a=(6, 0))
    assert room.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}
    assert room.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}


def test_drafts_and_a_long_prompt_share_a_step() -> None:
    """The prompt gets what drafts leave of the budget, running or waiting."""
    room = running_room(6, num_blocks=40, max_num_batched_tokens=16)
    room.add("b", tokens(100, 30))
    for num_computed in (0, 11):
        propose(room, a=(4, 0))
        plan = room.step()
        assert plan.num_scheduled_tokens == {"a": 5, "b": 11}
        assert room.scheduler.requests["b"].num_computed_tokens == num_computed + 11


def test_a_step_has_no_more_of_a_request_than_of_a_long_prompt() -> None:
    room = running_room(3, long_prefill_token_threshold=3)
    propose(room, a=(6, 0))
    assert drafts_in(room.step()) == {"a": 2}


def test_only_a_request_whose_tokens_are_all_known_gets_drafts() -> None:
    """Waiting requests, those still in prefill and ended ones get none."""
    room = EngineRoom(max_num_batched_tokens=8)
    room.add("a", tokens(0, 12))
    room.add("b", tokens(100, 12))
    room.step()
    propose(room, a=(3, 0), b=(3, 0))
    assert not drafts_in(room.step())
    room.scheduler.update_draft_token_ids({"gone": [1]}, room.clock.now())
    assert not drafts_in(room.step())


def test_a_token_under_way_is_not_known() -> None:
    """With async scheduling, drafts that arrive too early are dropped."""
    room = EngineRoom(async_scheduling=True)
    room.add("a", tokens(0, 6))
    room.plan_next()
    propose(room, a=(3, 0))
    assert not drafts_in(room.plan_next())


def test_drafts_wait_while_all_is_paused() -> None:
    room = running_room(6)
    propose(room, a=(3, 0))
    room.scheduler.set_pause_state(PauseState.PAUSED_ALL, room.clock.now())
    assert not room.step().num_scheduled_tokens
    room.scheduler.set_pause_state(PauseState.UNPAUSED, room.clock.now())
    assert drafts_in(room.step()) == {"a": 3}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED])
def test_a_request_may_end_while_its_drafts_are_verified(
    status: RequestStatus, async_scheduling: bool
) -> None:
    """Only its known tokens are cached, and every block is freed."""
    room = running_room(6, async_scheduling=async_scheduling)
    while room.under_way:
        room.take_output()
    propose(room, a=(6, 0))
    num_known = room.scheduler.requests["a"].num_tokens
    room.plan_next()
    room.scheduler.finish_requests(["a"], status, room.clock.now())
    room.take_output()
    room.check_invariants()
    statistics = room.scheduler.statistics()
    assert (statistics.num_free_blocks, statistics.num_cached_blocks) == (16, num_known // 4)


def test_a_preempted_request_loses_its_drafts_and_nothing_else() -> None:
    """A request with drafts is preempted for an older one, and its output does not change."""
    room = running_room(7, 7, num_blocks=6, max_tokens=9)
    propose(room, b=(6, 0))
    plans = [room.step()]
    while room.scheduler.has_unfinished_requests():
        propose(room, **{request.request_id: (2, 1) for request in room.scheduler.running})
        plans.append(room.step())
        room.check_invariants()
    assert any(plan.preempted_req_ids for plan in plans)
    for request_id in "ab":
        assert room.received[request_id] == [token_at(request_id, 7 + i) for i in range(9)]


def test_of_an_owner_that_may_have_little_of_a_step_drafts_get_what_is_left() -> None:
    """When several owners share the engine, drafts of an owner with many requests are cut as its prompts
    are."""
    room = EngineRoom(num_blocks=200, max_num_seqs=12, max_num_batched_tokens=64)
    for number in range(9):
        job = JobRef(None, owner="many")
        room.add(f"m{number}", tokens(50 * number, 6), max_tokens=30, job=job)
    room.step()
    room.add("one", tokens(900, 4), max_tokens=30, job=JobRef(None, owner="few"))
    room.step()
    propose(room, **{f"m{number}": (6, 0) for number in range(9)})
    plan = room.step()
    num_unlimited = 9 * 7 + 1
    assert plan.num_scheduled_tokens["one"] == 1
    assert plan.total_num_scheduled_tokens < num_unlimited // 2


def test_what_became_of_drafts_is_counted() -> None:
    room = running_room(6)
    assert room.scheduler.make_stats().spec_decoding is None
    propose(room, a=(2, 3))
    room.step()
    stats = room.scheduler.make_stats().spec_decoding
    assert stats is not None
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (5, 2)
    assert room.scheduler.make_stats().spec_decoding is None
