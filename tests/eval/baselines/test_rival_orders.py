"""The orders of other servers: numbers computed by hand from their formulas, on the real scheduler.

Blocks have 4 tokens, a step takes 10 ms and 32 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import RequestStatus
from eval.baselines.gittins import REFRESH_S
from eval.baselines.gittins_index import Stage, gittins_indices
from eval.baselines.hrrn import MAX_COMPARED
from tests.core.engine_room import EngineRoom
from tests.eval.baselines.policy_room import PolicyRoom


def keep_busy(room: EngineRoom, max_tokens: int = 2) -> None:
    """Adds a job whose first turn runs for ``max_tokens`` tokens."""
    room.add("busy", [900] * 4, max_tokens=max_tokens, job_id="busy")
    room.step()


def with_host_memory(policy: str, num_blocks: int) -> PolicyRoom:
    """A room with ``num_blocks`` blocks whose evicted KV stays in host memory."""
    return PolicyRoom(policy, num_blocks=num_blocks, max_num_seqs=1, num_host_blocks=64)


# ---- hrrn ----


def test_hrrn_lets_go_first_who_waited_longest_for_its_size() -> None:
    """The ratio is tokens computed since arrival over own tokens: 20/12 of the middle one against 20/40 of
    the large one, then 12/4 of the small one against 32/40, then 36/40 against 0/4 of the last."""
    room = PolicyRoom("hrrn", max_num_seqs=1)
    keep_busy(room)
    for job, num_tokens in (("first", 20), ("large", 40), ("middle", 12)):
        room.send(job, num_tokens)
    assert room.starts(1) == ["first1"]
    room.send("small", 4)
    assert room.starts(2) == ["middle1", "small1"]
    room.send("last", 4)
    assert room.starts(2) == ["large1", "last1"]


def test_hrrn_does_not_starve_the_long() -> None:
    """Next to a stream of short requests it runs once they have had as much as it needs."""
    room = PolicyRoom("hrrn", max_num_seqs=1)
    keep_busy(room)
    room.send("long", 32)
    order = []
    for number in range(12):
        room.send(f"short{number}", 8)
        room.send(f"other{number}", 8)
        order += room.starts(1)
    assert "long1" in order
    assert order.index("long1") <= 4


def test_hrrn_counts_what_is_not_cached() -> None:
    """Of a prompt of 44 tokens 40 are cached: it has 4 to compute, a new one has 8."""
    room = PolicyRoom("hrrn", max_num_seqs=1)
    room.play("cached", 40, "ls")
    keep_busy(room)
    room.send("before", 4)
    room.send("new", 8)
    room.send("cached", 3)
    assert room.starts(3) == ["before1", "cached2", "new1"]


def test_hrrn_looks_prompts_up_again() -> None:
    """What was cached on arrival has been evicted since: it has 44 tokens to compute, a new one 8."""
    room = PolicyRoom("hrrn", num_blocks=20, max_num_seqs=1)
    room.play("evicted", 40, "ls")
    keep_busy(room)
    room.send("large", 72)
    room.send("evicted", 3)
    room.send("new", 8)
    assert room.starts(3) == ["large1", "new1", "evicted2"]


def test_hrrn_serves_long_queues_in_order_of_arrival() -> None:
    """Beyond 128 waiting requests the large one goes first by arrival; among 128 the small one does."""
    for num_waiting, first in ((MAX_COMPARED + 2, "large1"), (MAX_COMPARED, "small1")):
        room = PolicyRoom("hrrn", max_num_seqs=1)
        keep_busy(room)
        room.send("before", 4)
        room.send("large", 40)
        room.send("small", 4)
        for number in range(num_waiting - 2):
            room.send(f"other{number}", 40)
        assert room.starts(2) == ["before1", first]


# ---- wspt ----


def test_wspt_lets_the_shortest_prefill_go_first() -> None:
    """The shortest goes first, whatever arrived first; 40 cached tokens of 43 do not count."""
    room = PolicyRoom("wspt", max_num_seqs=1)
    room.play("cached", 40, "ls")
    keep_busy(room)
    room.send("long", 40)
    room.send("short", 8)
    room.send("cached", 3)
    assert room.starts(3) == ["cached2", "short1", "long1"]


def test_wspt_weighs_by_priority() -> None:
    """40 tokens at priority -9 weigh as 4 at 0: 10/40 against 1/8. A priority above 0 counts as 0."""
    room = PolicyRoom("wspt", max_num_seqs=1)
    keep_busy(room)
    room.add("low", [1] * 4, priority=5)
    room.add("plain", [2] * 8)
    room.add("urgent", [3] * 40, priority=-9)
    assert room.starts(3) == ["low", "urgent", "plain"]


@pytest.mark.parametrize(("num_new", "order"), [(8, ["new1", "hosted2"]), (16, ["hosted2", "new1"])])
def test_wspt_credits_host_memory_with_three_quarters(num_new: int, order: list[str]) -> None:
    """40 tokens in host memory count as 10: with 3 new ones 13."""
    room = with_host_memory("wspt", num_blocks=20)
    room.play("hosted", 40, "ls")
    room.play("fills", 76, "ls")
    keep_busy(room)
    room.send("new", num_new)
    room.send("hosted", 3)
    assert room.starts(2) == order


def test_wspt_lets_the_preempted_go_on_first() -> None:
    """A preempted request was admitted by the router, so a shorter one that arrived later waits."""
    room = PolicyRoom("wspt", num_blocks=12, max_num_seqs=2)
    room.send("grows", 16, max_tokens=20)
    room.send("gives way", 20, max_tokens=20)
    request = room.scheduler.requests["gives way1"]
    room.run_for(14)
    assert request.status is RequestStatus.PREEMPTED
    room.send("short", 4)
    started: list[str] = []
    for _ in range(30):
        plan = room.step()
        started += [*plan.scheduled_cached_reqs.resumed_req_ids]
        started += [new.req_id for new in plan.scheduled_new_reqs]
    assert started == ["gives way1", "short1"]


# ---- gittins ----


def index_after(stages: Sequence[Stage], num_served: int) -> float:
    """By definition: the best number of further turns, up to a hundred times as many as were seen."""
    num_turns = sum(stage.num_turns for stage in stages)
    ends = sum(stage.num_last for stage in stages) / num_turns
    mean_s = sum(stage.served_s for stage in stages) / num_turns
    best, stays, seconds = 0.0, 1.0, 0.0
    for number in range(num_served, 100 * len(stages)):
        stage = stages[number] if number < len(stages) else Stage()
        seconds += stays * (stage.served_s + mean_s) / (stage.num_turns + 1)
        stays *= 1 - (stage.num_last + ends) / (stage.num_turns + 1)
        best = max(best, (1 - stays) / seconds)
    return best


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.floats(0.1, 9)), min_size=1, max_size=7))
def test_gittins_finds_the_greatest_chance_to_end_per_second(turns: list[tuple[int, int, float]]) -> None:
    """Indices equal the definition for any turns, after each of them and beyond the last."""
    stages = [Stage(served, min(served, last), served * mean_s) for served, last, mean_s in turns]
    indices = gittins_indices(stages)
    assert len(indices) == (len(stages) + 1 if any(stage.num_last for stage in stages) else 0)
    for num_served, index in enumerate(indices):
        assert math.isclose(index, index_after(stages, num_served), rel_tol=1e-6)


def play_jobs(room: PolicyRoom, *lengths: int) -> None:
    """Runs whole jobs of ``num_turns`` turns, one after another."""
    for number, num_turns in enumerate(lengths):
        for turn in range(1, num_turns + 1):
            room.play(f"job {number}", 4, "ls", is_last_step=turn == num_turns)


@pytest.mark.parametrize(
    ("lengths", "order"),
    [
        ((), ["older2", "younger3"]),  # Nothing is known: by age.
        ((3, 3, 3), ["younger3", "older2"]),  # Jobs end after three turns: one more, or two.
        ((2, 9, 2, 9), ["older2", "younger3"]),  # After two turns half of them end, others later.
    ],
)
def test_gittins_prefers_who_may_end_soon(lengths: Sequence[int], order: list[str]) -> None:
    """Of two jobs the younger one has had more turns."""
    room = PolicyRoom("gittins", max_num_seqs=1)
    play_jobs(room, *lengths)
    for job in ("older", "younger", "younger"):
        room.play(job, 4, "ls")
    keep_busy(room)
    room.wait(REFRESH_S)
    room.send("younger", 4)
    room.send("older", 4)
    assert room.starts(2) == order


def test_gittins_learns_of_ends_while_others_wait() -> None:
    """When the first job ends, after its third turn, the waiting ones are sorted again."""
    room = PolicyRoom("gittins", max_num_seqs=1)
    for job in ("first", "first", "older", "younger", "younger"):
        room.play(job, 4, "ls")
    room.send("first", 4, is_last_step=True)
    room.send("older", 4)
    room.send("younger", 4)
    room.step(REFRESH_S)
    assert room.starts(2) == ["younger3", "older2"]


@pytest.mark.parametrize(("goes_on", "order"), [(False, ["new1", "older2"]), (True, ["older2", "new1"])])
def test_gittins_takes_an_end_back_that_was_none(goes_on: bool, order: list[str]) -> None:
    """A job without a tool call counts as ended after its first turn, until its next turn arrives."""
    room = PolicyRoom("gittins", max_num_seqs=1)
    for job in ("ends", "older", "long", "long", "long", "long"):
        room.play(job, 4, *(() if job == "ends" else ("ls",)))
    if goes_on:
        room.play("ends", 4, "ls")
    keep_busy(room)
    room.wait(REFRESH_S)
    room.send("older", 4)
    room.send("new", 4)
    assert room.starts(2) == order


def test_gittins_preempts_who_is_last_in_the_queue() -> None:
    """If jobs end after two turns, a running first turn is preempted before a running second one."""
    room = PolicyRoom("gittins", num_blocks=14)
    play_jobs(room, 2, 2, 2)
    room.play("second", 4, "ls")
    room.wait(REFRESH_S)
    room.add("first", [1] * 12, max_tokens=24, job_id="first")
    room.step()
    room.send("second", 8, max_tokens=24)
    room.run()
    assert room.finished["first"].num_preemptions == 1
    assert room.finished["second2"].num_preemptions == 0
