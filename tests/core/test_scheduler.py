"""Promises of the scheduler, one per test, with a fake model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.outputs import SchedulerOutput
from engine.core.policy import FcfsPolicy, PriorityPolicy
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.core.scheduler_report import PauseState
from engine.records.messages import FinishReason, MediaSpan
from engine.records.sampling_params import SamplingParams
from tests.core.engine_room import EngineRoom


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_prefill_and_decode_share_one_budget() -> None:
    """A decoding request takes one token of the budget, a waiting prompt takes the rest."""
    room = EngineRoom(max_num_batched_tokens=10, num_blocks=40)
    room.add("a", tokens(0, 6), max_tokens=8)
    room.step()
    room.add("b", tokens(100, 20))
    assert room.step().num_scheduled_tokens == {"a": 1, "b": 9}
    assert room.step().num_scheduled_tokens == {"a": 1, "b": 9}
    assert room.step().num_scheduled_tokens == {"a": 1, "b": 2}


def test_long_prefill_token_threshold_caps_one_request() -> None:
    """With a threshold of 4 no request gets more than 4 prompt tokens in a step, new or running."""
    room = EngineRoom(long_prefill_token_threshold=4, num_blocks=40)
    room.add("a", tokens(0, 10))
    room.add("b", tokens(100, 3))
    assert room.step().num_scheduled_tokens == {"a": 4, "b": 3}
    assert room.step().num_scheduled_tokens == {"a": 4, "b": 1}


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget() -> None:
    """A prompt longer than the rest of the budget is not cut."""
    room = EngineRoom(enable_chunked_prefill=False, max_num_batched_tokens=12, num_blocks=40)
    room.add("a", tokens(0, 8))
    room.add("b", tokens(100, 8))
    assert room.step().num_scheduled_tokens == {"a": 8}
    assert room.step().num_scheduled_tokens == {"a": 1, "b": 8}


def test_reserve_full_isl_admits_only_what_fits_whole() -> None:
    """With the reserve, a prompt is admitted only if it fits as a whole; without, if its first chunk fits."""
    for reserve in (True, False):
        room = EngineRoom(num_blocks=9, max_num_batched_tokens=16, scheduler_reserve_full_isl=reserve)
        room.add("a", tokens(0, 12), max_tokens=3)
        room.step()
        room.add("b", tokens(100, 24), max_tokens=1)
        assert ("b" in room.step().num_scheduled_tokens) is not reserve


def test_the_last_prompt_token_is_always_computed() -> None:
    """A fully cached prompt still has its last block computed, for the logits."""
    room = EngineRoom(num_blocks=40)
    room.add("a", tokens(0, 16))
    room.run()
    room.add("b", tokens(0, 16))
    (new,) = room.step().scheduled_new_reqs
    assert new.num_computed_tokens == 12


def test_another_cache_salt_shares_nothing() -> None:
    """Equal tokens under another cache salt are another prefix."""
    room = EngineRoom(num_blocks=40)
    room.add("a", tokens(0, 16))
    room.run()
    request = Request(
        "b",
        tokens(0, 16),
        SamplingParams(max_tokens=4, ignore_eos=True),
        room.clock.now(),
        cache_salt="other",
        block_hasher=room.scheduler.request_block_hasher,
    )
    room.tokens["b"] = request.all_token_ids
    room.scheduler.add_request(request, 0.0)
    assert room.step().scheduled_new_reqs[0].num_computed_tokens == 0


def test_fcfs_preempts_the_youngest_and_resumes_it_first() -> None:
    """Without free blocks the last running request is preempted; none is admitted in that step, and it
    resumes before new ones."""
    room = EngineRoom(num_blocks=7, max_num_seqs=3)
    room.add("a", tokens(0, 8), max_tokens=9)
    room.add("b", tokens(100, 8), max_tokens=9)
    while not (plan := room.step()).preempted_req_ids:
        pass
    assert plan.preempted_req_ids == {"b"}
    assert set(plan.num_scheduled_tokens) == {"a"}
    room.add("c", tokens(200, 4), max_tokens=1)
    while "b" not in plan.num_scheduled_tokens:
        assert "c" not in plan.num_scheduled_tokens
        plan = room.step()
    assert plan.scheduled_cached_reqs.resumed_req_ids == {"b"}
    resumed = plan.scheduled_cached_reqs.resumed_token_ids["b"]
    assert len(resumed) > 8
    assert resumed == room.tokens["b"][: len(resumed)]
    room.run()
    assert set(room.finished) == {"a", "b", "c"}
    assert room.finished["b"].num_preemptions >= 1


def test_a_victim_already_scheduled_in_the_step_is_rolled_back() -> None:
    """PRIORITY: the victim's tokens and budget are returned, and what it had not computed is not cached."""
    room = EngineRoom(PriorityPolicy(), num_blocks=7, max_num_seqs=3, max_num_batched_tokens=16)
    room.add("worse", tokens(0, 7), max_tokens=9, priority=1)
    room.add("better", tokens(100, 8), max_tokens=9, priority=0)
    # The worse request was added first, so it is first in the running list once both run.
    plans = [room.step() for _ in range(2)]
    assert set(plans[-1].num_scheduled_tokens) == {"worse", "better"}
    while not (plan := room.step()).preempted_req_ids:
        room.scheduler.check_invariants()
    assert plan.preempted_req_ids == {"worse"}
    assert set(plan.num_scheduled_tokens) == {"better"}
    assert plan.total_num_scheduled_tokens == 1
    room.scheduler.check_invariants()
    room.run()
    assert set(room.finished) == {"worse", "better"}


def test_those_behind_a_request_that_preempts_itself_run_in_the_same_step() -> None:
    """A request that preempts itself frees its blocks for the better ones after it in the running list."""
    room = EngineRoom(
        PriorityPolicy(),
        block_size=16,
        num_blocks=6,
        max_model_len=256,
        max_num_batched_tokens=200,
        long_prefill_token_threshold=15,
        scheduler_reserve_full_isl=False,
    )
    room.add("worst", tokens(0, 200), priority=9)
    room.step()
    room.add("best", tokens(1000, 15))
    room.step()
    room.add("middle", tokens(2000, 1), priority=1)
    assert room.step().num_scheduled_tokens == {"worst": 15, "best": 1, "middle": 1}
    plan = room.step()
    assert plan.preempted_req_ids == {"worst"}
    assert plan.num_scheduled_tokens == {"best": 1, "middle": 1}
    assert room.scheduler.replan_at_once
    room.check_invariants()


def withdraw(chunk: int) -> tuple[EngineRoom, SchedulerOutput]:
    """Runs to the step in which a prefilling request gets ``chunk`` tokens and is withdrawn for a better one.

    The better one needs its second block in step 5; until then the other has taken all other blocks.
    """
    room = EngineRoom(
        PriorityPolicy(),
        num_blocks=5 * chunk // 4 + 3,
        max_model_len=5 * chunk + 8,
        max_num_batched_tokens=chunk + 2,
        long_prefill_token_threshold=chunk,
        scheduler_reserve_full_isl=False,
    )
    room.add("worse", tokens(0, 5 * chunk + 4), priority=1)
    room.add("better", tokens(1000, 1), max_tokens=9)
    room.add("third", tokens(2000, 1), max_tokens=9)
    room.scheduler.waiting.rekey(room.scheduler.requests["worse"], (-1, 0.0))  # Admitted first.
    assert room.step().num_scheduled_tokens == {"worse": chunk, "better": 1, "third": 1}
    assert isinstance(room.scheduler, Scheduler)
    room.scheduler.config = replace(room.scheduler.config, max_num_batched_tokens=chunk + 1)
    while not (plan := room.step()).preempted_req_ids:
        pass
    assert plan.preempted_req_ids == {"worse"}
    return room, plan


def test_a_withdrawn_victim_gives_its_budget_to_those_behind() -> None:
    """The victim's tokens of this step go to requests that would have got none."""
    _, plan = withdraw(chunk=4)
    assert plan.num_scheduled_tokens == {"better": 1, "third": 1}


def test_what_a_withdrawn_victim_never_computed_is_not_found() -> None:
    """Blocks that it had not computed are not cached; those of earlier steps stay cached."""
    room, _ = withdraw(chunk=12)
    found = [
        room.scheduler.kv.pool.get_cached_block(block_hash) is not None
        for block_hash in room.scheduler.requests["worse"].block_hashes
    ]
    assert found == [True] * 12 + [False] * 4


def test_pause_states() -> None:
    """PAUSED_NEW lets running requests continue, PAUSED_ALL none; both keep all requests."""
    room = EngineRoom(num_blocks=40)
    room.add("a", tokens(0, 4))
    room.step()
    room.add("b", tokens(100, 4))
    room.scheduler.set_pause_state(PauseState.PAUSED_NEW, room.clock.now())
    assert set(room.step().num_scheduled_tokens) == {"a"}
    room.scheduler.set_pause_state(PauseState.PAUSED_ALL, room.clock.now())
    assert not room.step().num_scheduled_tokens
    room.scheduler.set_pause_state(PauseState.UNPAUSED, room.clock.now())
    assert set(room.step().num_scheduled_tokens) == {"a", "b"}
    room.run()


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "preempted"])
def test_an_abort_at_any_moment_gives_everything_back(when: str) -> None:
    """An abort while waiting, in prefill, in decode or preempted frees all blocks and informs the worker."""
    room = EngineRoom(num_blocks=7, max_num_seqs=2, max_num_batched_tokens=6)
    if when == "preempted":
        room.add("a", tokens(0, 8), max_tokens=9)
    victim = room.add("b", tokens(100, 8), max_tokens=9)
    moments = {
        "waiting": lambda: victim.status is RequestStatus.WAITING,
        "prefill": lambda: 0 < victim.num_computed_tokens < 8,
        "decode": lambda: victim.num_output_tokens > 1,
        "preempted": lambda: victim.status is RequestStatus.PREEMPTED,
    }
    while not moments[when]():
        room.step()
    (output,) = room.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    assert output.finish_reason is FinishReason.ABORT
    assert not room.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    room.scheduler.check_invariants()
    assert "b" in room.step().finished_req_ids
    room.run()
    assert room.scheduler.kv.num_free_blocks == 6


class RefusesOdd(FcfsPolicy):
    """Refuses to admit the requests in ``held_back``."""

    def __init__(self) -> None:
        self.held_back = {"b"}

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        return request.request_id not in self.held_back


def test_a_request_that_may_not_start_does_not_block_those_behind() -> None:
    """Set aside in one step, the request keeps its place for the next."""
    policy = RefusesOdd()
    room = EngineRoom(policy, num_blocks=40, max_num_seqs=2)
    for request_id in ("a", "b", "c", "d"):
        room.add(request_id, tokens(ord(request_id), 4), max_tokens=2)
    assert [r.req_id for r in room.step().scheduled_new_reqs] == ["a", "c"]
    policy.held_back = set()
    room.step()
    assert [r.req_id for r in room.step().scheduled_new_reqs] == ["b", "d"]


def test_deltas_carry_only_what_changed() -> None:
    """A running request gets new block ids when it crosses a block, and nothing else; a new one gets
    everything."""
    room = EngineRoom(num_blocks=40)
    room.add("a", tokens(0, 7), max_tokens=4)
    first = room.step()
    assert len(first.scheduled_new_reqs[0].block_ids) == 2
    second, third = room.step(), room.step()
    assert second.scheduled_cached_reqs.new_block_ids == [[]]
    assert [len(ids) for ids in third.scheduled_cached_reqs.new_block_ids] == [1]
    assert third.scheduled_cached_reqs.num_computed_tokens == [8]
    assert not third.scheduled_cached_reqs.resumed_token_ids


def test_statistics_add_up() -> None:
    """Counts of queues and blocks add up; counters restart with each report."""
    room = EngineRoom(num_blocks=40)
    room.add("a", tokens(0, 16))
    room.add("b", tokens(0, 16))
    room.step()
    stats = room.scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.step_tokens) == (2, 0, 20)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (32, 12)
    assert room.scheduler.make_stats().step_tokens == 0
    assert room.scheduler.statistics().num_free_blocks == 39 - 5


@pytest.mark.parametrize("policy", [FcfsPolicy, PriorityPolicy])
def test_a_picture_that_waits_for_the_encoder_holds_up_no_text(policy: type[FcfsPolicy]) -> None:
    """Text requests after it are admitted, as they need no encoder; other pictures wait."""
    room = EngineRoom(policy(), num_blocks=100, max_num_seqs=8, long_prefill_token_threshold=4)
    room.read_pictures(20, 20)

    def picture(name: str) -> None:
        prompt = [ord(name)] * 22
        room.add(name, prompt, max_tokens=9, media=[MediaSpan(name, 0, 20 if name != "c" else 4)])

    picture("a")
    room.step()
    for name in "bc":
        picture(name)
    room.add("text", [7] * 9, max_tokens=3)
    first: dict[str, int] = {}
    for step in range(60):
        for name in room.step().num_scheduled_tokens:
            first.setdefault(name, step)
        room.check_invariants()
    assert first["text"] < first["b"] <= first["c"]
    assert room.finished.keys() == {"a", "b", "c", "text"}
