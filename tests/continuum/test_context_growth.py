"""Contexts are predicted by what earlier jobs did, and a new job waits for what begun jobs will need."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum.config import ContinuumConfig
from continuum.jobs.branches import BranchEnd
from continuum.jobs.job import BranchTip, Job, Turn
from continuum.learning.context_growth import MAX_AHEAD, SHARES, ContextGrowth
from continuum.learning.kv_cost import PrefillLoad
from continuum.learning.tool_stats import ToolStats
from engine.core.policy import PolicyContext
from engine.core.request import Request
from engine.errors import ConfigError
from engine.records.block_chain import BlockChain
from engine.records.sampling_params import SamplingParams
from estimator.growth import MAX_KINDS
from tests.continuum.job_room import BLOCK, JobRoom

HORIZON_S = 20.0
CONTEXT = PolicyContext(BLOCK, 10_000)


class History:
    """Plays jobs to their ends: each turn takes ``period_s``, and adds tokens to the context."""

    def __init__(self, period_s: float = 5.0) -> None:
        self.growth = ContextGrowth(ToolStats(ContinuumConfig()), CONTEXT, HORIZON_S)
        self.now = 0.0
        self.period_s = period_s
        self.num_jobs = 0

    def job(self, kind: str | None, tenant: str | None = None) -> Job:
        self.num_jobs += 1
        job = Job(f"job{self.num_jobs}", tenant, self.now, self.now, self.now)
        job.kind = None if kind is None else kind.encode()
        return job

    def play(
        self,
        kind: str | None,
        num_blocks: list[int],
        *,
        tenant: str | None = None,
        calls_tool_at_end: bool = False,
    ) -> None:
        """A job with these blocks after each turn."""
        job = self.job(kind, tenant)
        before = None
        for number, blocks in enumerate(num_blocks, start=1):
            self.now += self.period_s
            request = Request("turn", [1], SamplingParams(), self.now)
            self.growth.turn_ended(Turn(job, request, number, before), self.now)
            tip = before = self._tip(job, number, blocks)
            last = number == len(num_blocks)
            tip.tools = [] if last and not calls_tool_at_end else None
            self.growth.on_tools_known(tip, self.now)
            if not last:
                self._continue(tip, num_blocks[number])
            elif calls_tool_at_end:
                self.growth.on_dropped(tip, BranchEnd.JOB_DONE, self.now)

    def _tip(self, job: Job, number: int, blocks: int) -> BranchTip:
        hashes = [bytes([number, i % 256, i // 256]) * 11 for i in range(blocks)]
        return BranchTip(job, f"{job.job_id}-{number}", number, BlockChain(hashes), 0, self.now, (0, 0.0))

    def _continue(self, tip: BranchTip, num_blocks: int) -> None:
        request = Request("next", [1] * (num_blocks * BLOCK), SamplingParams(), self.now)
        self.growth.on_continued(tip, Turn(tip.job, request, tip.turn_number + 1, tip), self.now)


def test_nothing_is_predicted_before_a_turn_followed_another() -> None:
    """Until then a job needs what it has."""
    history = History()
    history.play("agent", [5])
    assert history.growth.blocks(history.job("agent"), 1, 7) == (7, 7, 7)


def test_a_context_grows_as_those_of_its_kind_did_and_ends_when_they_did() -> None:
    """Turns take 5 s: in 10 s two more turns, in 20 s four."""
    history = History(period_s=5.0)
    for _ in range(200):
        history.play("long", [1, 11, 21, 31, 41, 51, 61])
        history.play("short", [1, 2, 3])
    assert history.growth.blocks(history.job("long"), 1, 1) == pytest.approx((1, 21, 41), abs=2)
    now, soon, later = history.growth.blocks(history.job("short"), 1, 1)
    assert now == 1
    assert soon == pytest.approx(3, abs=1)
    assert later == 0, "by then it has ended"


def test_a_job_that_ended_with_a_tool_call_has_ended_too() -> None:
    """Its client announced the end, or it was forgotten."""
    history = History()
    for _ in range(50):
        history.play("agent", [1, 5], calls_tool_at_end=True)
    assert history.growth.blocks(history.job("agent"), 2, 5)[-1] == 0


def test_an_unknown_kind_grows_like_all_jobs_of_its_tenant() -> None:
    """Their mean stands for it; what other tenants' jobs do says nothing."""
    history = History(period_s=10.0)
    for _ in range(50):
        history.play("a", [1, 11, 21])
        history.play("b", [1, 1, 1])
        history.play("a", [1, 301, 601], tenant="other")
    assert history.growth.blocks(history.job("new"), 1, 1)[1] == pytest.approx(6, abs=1)
    assert history.growth.blocks(history.job("a", "third"), 1, 1) == (1, 1, 1)


def test_times_are_those_of_the_turns_that_are_looked_ahead() -> None:
    """Turns that follow each other very fast are looked ahead for less than the horizon."""
    slow = History(period_s=5.0)
    slow.play("a", [1, 2, 3])
    assert slow.growth.times_s() == (0.0, HORIZON_S / 2, HORIZON_S)
    fast = History(period_s=0.01)
    fast.play("a", [1, 2, 3])
    assert fast.growth.times_s()[-1] == pytest.approx(0.01 * MAX_AHEAD)


@given(
    st.lists(
        st.tuples(st.sampled_from([None, "a", "b"]), st.lists(st.integers(0, 300), min_size=1, max_size=9)),
        max_size=12,
    ),
    st.integers(1, 400),
    st.integers(0, 10_000),
)
def test_a_prediction_is_never_negative_nor_more_than_all_growth(
    jobs: list[tuple[str | None, list[int]]], num_turns: int, num_blocks: int
) -> None:
    """Whatever was seen, each time has a whole number of blocks."""
    history = History()
    for kind, blocks in jobs:
        history.play(kind, blocks)
    predicted = history.growth.blocks(history.job("a"), num_turns, num_blocks)
    assert len(predicted) == len(SHARES)
    assert predicted[0] == num_blocks
    assert all(0 <= blocks <= num_blocks + 33 * 300 for blocks in predicted)


def test_kinds_are_bounded() -> None:
    """The kind not seen for longest is forgotten, and grows like all jobs again."""
    history = History(period_s=20.0)
    for _ in range(400):
        history.play("first", [1, 100])
    assert history.growth.blocks(history.job("first"), 1, 1)[-1] > 90
    for number in range(MAX_KINDS):
        history.play(f"kind {number}", [1, 1, 1, 1])
    assert history.growth.blocks(history.job("first"), 1, 1)[-1] < 90


def test_a_tenant_with_many_kinds_displaces_its_own() -> None:
    """What is known of another tenant's jobs stays."""
    history = History(period_s=20.0)
    for _ in range(40):
        history.play("agent", [1, 100], tenant="quiet")
    for number in range(2 * MAX_KINDS):
        history.play(f"kind {number}", [1, 1], tenant="flood")
    assert history.growth.blocks(history.job("agent", "quiet"), 1, 1)[-1] > 90


def _agent(room: JobRoom, name: str, num_turns: int) -> None:
    """A job whose first prompt is one block, and which doubles with each turn."""
    prompt = [len(room.finished) + 1] * BLOCK
    for number in range(num_turns):
        request_id = f"{name}-{number}"
        room.turn(request_id, prompt, name, max_tokens=2, last=number + 1 == num_turns)
        if number + 1 < num_turns:
            room.read(request_id, "ls")
        room.advance(1.0)
        prompt = [*prompt, *room.said(request_id)[len(prompt) :], *[7] * len(prompt)]


def _running(room: JobRoom, num_jobs: int) -> set[str]:
    """Which of so many new jobs start at once. The first one of them runs in any case."""
    for number in range(num_jobs):
        room.ask(f"new{number}", [500 + number] * BLOCK, f"new{number}", max_tokens=20)
    room.step()
    waiting = {request.request_id for request in room.scheduler.waiting}
    return {f"new{number}" for number in range(num_jobs)} - waiting


def test_small_prompts_that_grow_are_not_all_admitted_at_once() -> None:
    """All jobs of one block fit into the pool; once it is known that such jobs grow to 16 blocks, not all
    begin."""
    inexperienced = JobRoom(num_blocks=41)
    assert len(_running(inexperienced, 4)) == 4
    experienced = JobRoom(num_blocks=41)
    for number in range(12):
        _agent(experienced, f"old{number}", 5)
    assert 1 <= len(_running(experienced, 4)) <= 2


def test_growth_survives_a_restart(tmp_path: Path) -> None:
    """After a restart with its file, not all such jobs begin either."""
    state = str(tmp_path / "state")
    room = JobRoom(num_blocks=41, estimator_state=state)
    for number in range(12):
        _agent(room, f"old{number}", 5)
    room.scheduler.close(room.clock.now())
    restarted = JobRoom(num_blocks=41, estimator_state=state)
    assert _running(restarted, 4) == _running(room, 4)


def _num_that_fit(room: JobRoom) -> int | None:
    jobs = room.scheduler.make_stats().jobs
    assert jobs is not None
    return jobs.num_that_fit


def test_how_many_more_jobs_fit_is_reported() -> None:
    """By what jobs grow to, and less with each job that begins; unknown before any job began."""
    room = JobRoom(num_blocks=41)
    assert _num_that_fit(room) is None
    for number in range(12):
        _agent(room, f"old{number}", 5)
    before = _num_that_fit(room)
    assert before is not None
    assert 2 <= before <= 6
    _running(room, 2)
    after = _num_that_fit(room)
    assert after is not None
    assert after < before


def test_answers_that_nothing_follows_are_soon_not_held() -> None:
    """The first ones are held for ``answer_ttl_s``, since nothing is known of them."""
    room = JobRoom(num_blocks=41, answer_ttl_s=2.0)
    held = []
    for number in range(12):
        room.turn(f"r{number}", [number] * 5 * BLOCK, f"job{number}")
        held.append(room.read(f"r{number}").ttl_s)
        room.advance(60.0)
    assert held == [2.0] * 4 + [0.0] * 8


def test_answers_that_are_soon_followed_are_held() -> None:
    """A person who replies at once finds the KV."""
    room = JobRoom(num_blocks=41, answer_ttl_s=2.0)
    prompt = [1] * BLOCK
    for number in range(16):
        room.turn(f"r{number}", prompt, "chat", max_tokens=2)
        receipt = room.read(f"r{number}")
        room.advance(1.0)
        prompt = [*room.said(f"r{number}"), 7]
    assert receipt.ttl_s > 0


def test_another_tenants_answers_and_single_questions_say_nothing() -> None:
    """Nothing follows them; answers of a tenant whose jobs did not end so far are held all the same."""
    room = JobRoom(num_blocks=41, answer_ttl_s=2.0)
    for number in range(12):
        room.turn(f"r{number}", [number] * 5 * BLOCK, f"job{number}", tenant="flood")
        room.read(f"r{number}")
        room.turn(f"q{number}", [20 + number] * 5 * BLOCK)
        room.read(f"q{number}")
        room.advance(60.0)
    room.turn("other", [99] * 5 * BLOCK, "other", tenant="another")
    assert room.read("other").ttl_s == 2.0


def test_the_load_is_the_mean_number_of_prompts_at_a_time() -> None:
    """Three at a time for five minutes are three; minutes later, hardly any."""
    load = PrefillLoad()
    assert load.value(0.0) == 0.0
    for second in range(300):
        load.observe(3.0, float(second))
    assert load.value(300.0) == pytest.approx(3.0, rel=0.05)
    assert load.value(900.0) < 0.01


def test_config_is_checked() -> None:
    """The horizon is above 0."""
    with pytest.raises(ConfigError, match="growth_horizon_s must be above 0"):
        ContinuumConfig(growth_horizon_s=0.0)
