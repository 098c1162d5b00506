"""Waiting is bounded next to agents that always return: for a question, a job's first turn, and a turn whose
KV is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import Request
from engine.records.messages import JobRef
from tests.continuum.job_room import BLOCK, JobRoom

MAX_WAIT_S = 5.0
STEP_S = 0.1
TURN_TOKENS = 10
NUM_AGENTS = 8
SEATS = 4


class Crowd:
    """Agents whose tools take no time: when a turn ends, its job's next one arrives at once, with pinned KV.

    There are twice as many as may run at once, so that some always wait.
    """

    def __init__(self, room: JobRoom) -> None:
        self._room = room
        self._num_turns = [0] * NUM_AGENTS

    def step(self) -> None:
        for agent in range(NUM_AGENTS):
            last = f"{agent}-{self._num_turns[agent]}"
            if last in self._room.finished or not self._num_turns[agent]:
                self._send(agent, self._history(agent, last))
        self._room.step(STEP_S)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def seconds_until_started(self, request: Request) -> float:
        """Steps until a new request starts, at most ten times the bound; returns its wait."""
        for _ in range(round(10 * MAX_WAIT_S / STEP_S)):
            self.step()
            if request.first_scheduled_time is not None:
                return request.first_scheduled_time - request.arrival_time
        raise AssertionError("it never started")

    def _history(self, agent: int, last: str) -> Sequence[int]:
        """The agent's next history; restarted when it gets long, so that the pool is never too small."""
        said = self._room.tokens.get(last, [])
        return said if 0 < len(said) < 8 * BLOCK else [agent] * (3 * BLOCK)

    def _send(self, agent: int, history: Sequence[int]) -> None:
        self._num_turns[agent] += 1
        name = f"{agent}-{self._num_turns[agent]}"
        self._room.ask(name, [*history, 500, 501], f"agent{agent}", max_tokens=TURN_TOKENS - agent % 4)


def crowded_room(max_return_wait_s: float = MAX_WAIT_S) -> tuple[JobRoom, Crowd]:
    """A room where turns of agents have waited for a while, all of them warm."""
    room = JobRoom(
        max_wait_s=MAX_WAIT_S, max_return_wait_s=max_return_wait_s, ttl_rule="fixed", fixed_ttl_s=600.0
    )
    crowd = Crowd(room)
    crowd.run(2 * MAX_WAIT_S)
    assert len(room.scheduler.waiting) >= NUM_AGENTS - SEATS
    return room, crowd


@pytest.mark.parametrize(
    "job", [None, JobRef(None), JobRef("new")], ids=["of no job", "nobody says whose", "a job's first"]
)
@pytest.mark.parametrize("num_blocks", [1, 40])
def test_who_came_after_the_agents_starts_soon_after_its_bound(job: JobRef | None, num_blocks: int) -> None:
    """Whatever the prompt's size: beyond the bound it waits for one running turn to end, or a few if it needs
    the blocks of several."""
    room, crowd = crowded_room()
    request = room.add("asked", [900] * (num_blocks * BLOCK), job=job, max_tokens=2)
    waited_s = crowd.seconds_until_started(request)
    assert waited_s < MAX_WAIT_S + 2 * TURN_TOKENS * STEP_S
    crowd.run(MAX_WAIT_S)
    assert "asked" in room.finished


def test_a_turn_whose_kv_is_lost_starts_soon_after_its_bound() -> None:
    """Its job began before all others, but its pin has expired."""
    room = JobRoom(max_wait_s=MAX_WAIT_S, ttl_rule="fixed", fixed_ttl_s=1.0)
    room.turn("first", [900] * (6 * BLOCK), "old")
    room.advance(2.0)
    assert not room.num_pins
    crowd = Crowd(room)
    crowd.run(2 * MAX_WAIT_S)
    request = room.ask("second", [*room.said("first"), 7], "old")
    assert crowd.seconds_until_started(request) < MAX_WAIT_S + 2 * TURN_TOKENS * STEP_S


def test_a_job_that_has_begun_has_a_bound_of_its_own() -> None:
    """Its next turn, with lost KV, has a shorter bound than an earlier question."""
    room = JobRoom(max_wait_s=10 * MAX_WAIT_S, max_return_wait_s=MAX_WAIT_S, ttl_rule="fixed", fixed_ttl_s=1)
    room.turn("first", [900] * (6 * BLOCK), "old")
    room.advance(2.0)
    crowd = Crowd(room)
    crowd.run(2 * MAX_WAIT_S)
    question = room.add("asked", [901] * (6 * BLOCK), max_tokens=2)
    turn = room.ask("second", [*room.said("first"), 7], "old")
    assert MAX_WAIT_S <= crowd.seconds_until_started(turn) < MAX_WAIT_S + 2 * TURN_TOKENS * STEP_S
    assert question.first_scheduled_time is None


def test_its_bound_is_never_above_that_of_all() -> None:
    room, crowd = crowded_room(max_return_wait_s=100 * MAX_WAIT_S)
    turn = room.ask("lost", [*room.said("0-1"), 7], "agent0", max_tokens=2)
    assert crowd.seconds_until_started(turn) < MAX_WAIT_S + 2 * TURN_TOKENS * STEP_S


def test_who_hears_nothing_waits_for_less() -> None:
    """A turn without a stream, whose client gives up sooner, starts before an earlier one."""
    room = JobRoom(
        max_wait_s=10 * MAX_WAIT_S, max_silent_wait_s=MAX_WAIT_S, ttl_rule="fixed", fixed_ttl_s=600.0
    )
    crowd = Crowd(room)
    crowd.run(2 * MAX_WAIT_S)
    heard = room.add("heard", [901] * BLOCK, job=JobRef("heard"), max_tokens=2)
    silent = room.add("silent", [900] * BLOCK, job=JobRef("silent", is_silent=True), max_tokens=2)
    assert MAX_WAIT_S <= crowd.seconds_until_started(silent) < MAX_WAIT_S + 2 * TURN_TOKENS * STEP_S
    assert heard.first_scheduled_time is None


def test_who_is_in_time_waits_behind_the_warm_ones() -> None:
    """Before the bound is reached, warm turns go first, so that pinned memory is used first."""
    _, crowd = (found := crowded_room())
    request = found[0].ask("asked", [900] * BLOCK, "new", max_tokens=2)
    assert crowd.seconds_until_started(request) >= MAX_WAIT_S


def test_those_who_waited_too_long_start_in_the_order_in_which_they_came() -> None:
    """A small question does not pass an earlier large one, however many blocks are free."""
    room, crowd = crowded_room()
    large = room.add("large", [901] * (40 * BLOCK), max_tokens=2)
    crowd.step()
    small = [room.add(f"small{number}", [902 + number] * 4, max_tokens=2) for number in range(3)]
    crowd.run(2 * MAX_WAIT_S)
    started = [request.first_scheduled_time for request in (large, *small)]
    assert None not in started
    assert started == sorted(started, key=lambda time_s: time_s or 0.0)


def test_a_deadline_bounds_the_wait() -> None:
    """A request starts when half of its deadline is over, before one that came first and has none."""
    room = JobRoom(max_wait_s=10 * MAX_WAIT_S, ttl_rule="fixed", fixed_ttl_s=600.0)
    crowd = Crowd(room)
    crowd.run(2 * MAX_WAIT_S)
    patient = room.add("patient", [901] * BLOCK, job=JobRef("patient"), max_tokens=2)
    urgent = room.add("urgent", [900] * BLOCK, job=JobRef("urgent", deadline_s=2 * MAX_WAIT_S), max_tokens=2)
    assert MAX_WAIT_S <= crowd.seconds_until_started(urgent) < MAX_WAIT_S + 2 * TURN_TOKENS * STEP_S
    assert patient.first_scheduled_time is None


# ---- random sequences of requests ----

WHO = st.sampled_from([None, None, "a", "b", "c", "d", "e", "f", "g"])
"""A question without a job, or the job whose next turn it is."""
BRIEF_WAIT_S = 1.0


def checked_step(room: JobRoom) -> None:
    """Runs a step and checks that no overdue request is passed by a later one."""
    queued, now = list(room.scheduler.waiting), room.clock.now()
    room.step(STEP_S)
    still_there = {request.request_id for request in room.scheduler.waiting}
    overdue = [each for each in queued if now - each.arrival_time >= BRIEF_WAIT_S]
    passed_s = [each.arrival_time for each in overdue if each.request_id in still_there]
    started_s = [each.arrival_time for each in queued if each.request_id not in still_there]
    assert not passed_s or max(started_s, default=0.0) <= min(passed_s)


@given(st.lists(st.tuples(WHO, st.integers(1, 300), st.integers(0, 4)), min_size=10, max_size=60))
def test_who_has_waited_too_long_is_passed_by_nobody_who_came_later(
    comes: list[tuple[str | None, int, int]],
) -> None:
    """For questions and turns of any size in a small pool: none overdue is passed, and all are answered."""
    room = JobRoom(num_blocks=49, max_wait_s=BRIEF_WAIT_S, ttl_rule="fixed", fixed_ttl_s=600.0)
    last: dict[str, str] = {}
    for number, (who, num_tokens, num_steps) in enumerate(comes):
        name, more = f"{who}{number}", [number] * num_tokens
        if who is None:
            room.add(name, more, max_tokens=3)
        elif last.get(who) in (None, *room.finished):
            history = room.tokens[last[who]] if who in last and len(room.tokens[last[who]]) < 400 else []
            room.ask(name, [*history, *more], who, max_tokens=5)
            last[who] = name
        for _ in range(num_steps):
            checked_step(room)
    while room.scheduler.has_unfinished_requests():
        checked_step(room)
