"""Signals of clients about their tool calls change how long a turn is pinned, if earlier ones were right."""

from __future__ import annotations

import pytest

from engine.records.messages import BranchStatus, ToolSignal, ToolState
from tests.continuum.job_room import JobRoom

PROMPT = list(range(100, 196))


def tell(room: JobRoom, state: ToolState, **said: object) -> BranchStatus:
    """Sends the client's signal about job "job"; returns the status of its latest turn."""
    room.scheduler.signal(ToolSignal("job", state, **said), room.clock.now())  # type: ignore[arg-type]
    return standing(room)


def standing(room: JobRoom) -> BranchStatus:
    status = room.policy.job("job", room.clock.now())
    assert status is not None
    return status.branches[-1]


def started(room: JobRoom, *commands: str) -> JobRoom:
    """Runs the job's first turn, which ends with these calls."""
    room.turn("r1", PROMPT, "job")
    room.read("r1", *commands)
    return room


def learned(room: JobRoom, command: str, gap_s: float, times: int = 12) -> JobRoom:
    """Teaches that the command takes this long."""
    for number in range(times):
        job = f"{command}{number}"
        room.turn(f"{job}-1", [number, *PROMPT], job)
        room.read(f"{job}-1", command)
        room.advance(gap_s)
        room.turn(f"{job}-2", [*room.said(f"{job}-1"), 7], job, last=True)
    return room


def test_a_call_that_is_known_to_be_slow_is_held_where_its_client_says_it_is_quick() -> None:
    """A slow call is pinned if its client expects seconds; a quick one is released if its client expects an
    hour."""
    room = started(learned(JobRoom(), "make all", 300), "make all")
    assert standing(room).ttl_s is None
    other = started(learned(JobRoom(), "ls -l", 0.5), "ls -l")
    assert standing(other).ttl_s is not None
    quick = started_again(learned(JobRoom(max_ttl_s=1000), "make all", 300), expected_s=2)
    assert quick.ttl_s is not None
    assert 2 < quick.ttl_s < 30
    slow = tell(other, ToolState.STARTED, expected_s=3600)
    assert slow.ttl_s is None
    assert slow.pinned_blocks == 0


def started_again(room: JobRoom, expected_s: float) -> BranchStatus:
    """Sends the signal within the grace period after the turn's end, before the tool is read."""
    room.turn("r1", PROMPT, "job")
    tip = tell(room, ToolState.STARTED, tool="make", expected_s=expected_s)
    assert tip.tools == ["make"]
    return tip


def test_what_is_expected_is_seen_with_how_sure_it_is() -> None:
    """Median and deciles are around the client's estimate, and move with time."""
    room = started(JobRoom(), "deploy")
    assert standing(room).expected_return_s is None
    tip = tell(room, ToolState.STARTED, expected_s=20)
    early, median, late = tip.earliest_return_s, tip.expected_return_s, tip.latest_return_s
    assert early is not None
    assert median is not None
    assert late is not None
    assert 8 < early < median < late < 50
    assert median == pytest.approx(20, rel=0.2)
    room.clock.advance(10)
    later = standing(room).expected_return_s
    assert later is not None
    assert 5 < later < median


@pytest.mark.parametrize("said", [{"remaining_s": 8.0}, {"fraction": 0.6}])
def test_progress_moves_the_deadline(said: dict[str, float]) -> None:
    """After 12 of 20 seconds, a signal with the seconds left or the share done extends the deadline."""
    room = started(JobRoom(), "deploy")
    room.clock.advance(9)
    before = standing(room).ttl_s
    assert before is not None
    assert before < 2
    room.clock.advance(0.9)
    tip = tell(room, ToolState.PROGRESS, remaining_s=8.0)
    assert tip.ttl_s is not None
    assert tip.ttl_s > 8
    assert tip.told == "progress"
    room.clock.advance(2.1)
    again = tell(room, ToolState.PROGRESS, **said)
    assert again.ttl_s is not None
    assert again.expected_return_s == pytest.approx(8, rel=0.25)


def test_a_finished_call_is_held_for_the_turn_that_is_about_to_come() -> None:
    """The pin is shortened to the time that the next turn needs to arrive; the turn then finds its KV."""
    room = started(JobRoom(), "deploy")
    before = tell(room, ToolState.STARTED, expected_s=20)
    room.clock.advance(3)
    tip = tell(room, ToolState.FINISHED)
    assert tip.expected_return_s is not None
    assert tip.expected_return_s < 1
    assert tip.ttl_s is not None
    assert before.ttl_s is not None
    assert 1 < tip.ttl_s < before.ttl_s - 3
    room.clock.advance(0.3)
    assert room.turn("r2", [*room.said("r1"), 7], "job").previous_pin == "handed_over"


def test_a_cancelled_call_is_let_go_and_teaches_no_duration() -> None:
    """The call counts as censored at its current length; a turn that arrives all the same teaches nothing
    more."""
    room = started(JobRoom(), "deploy")
    room.clock.advance(3)
    tip = tell(room, ToolState.CANCELLED)
    assert (tip.ttl_s, tip.reason, tip.told) == (
        None,
        "the client cancelled the call",
        "cancelled",
    )
    assert room.num_pins == 0
    assert room.ends() == {"released": 1}
    curve = room.policy.tools.curve(None)
    room.turn("r2", [*room.said("r1"), 7], "job")
    after = room.policy.tools.curve(None)
    assert curve.num_observations == after.num_observations
    assert curve.cdf(3.5) == after.cdf(3.5) < 0.7


@pytest.mark.parametrize("rule", ["median-horizon", "price", "fork", "paper", "fixed"])
def test_a_call_that_was_cut_off_tells_nothing_of_when_others_return(rule: str) -> None:
    """Under every rule, if the only known call was cancelled, the next one is pinned as if none were
    known."""
    ttls_s = []
    for is_cancelled in (False, True):
        room = started(JobRoom(ttl_rule=rule), "deploy")
        if is_cancelled:
            tell(room, ToolState.CANCELLED)
        room.turn("other", [9, *PROMPT], "other")
        receipt = room.read("other", "deploy")
        ttls_s.append(receipt.ttl_s)
        assert all(pin.deadline_s >= room.clock.now() for pin in room.policy.pins())
    assert ttls_s[0] == ttls_s[1]


def test_of_parallel_calls_the_last_one_decides() -> None:
    """A call that ends among others decides nothing; the turn returns if any of them has a result."""
    room = started(JobRoom(), "ls", "make")
    assert tell(room, ToolState.CANCELLED, call_id="a").ttl_s is not None
    assert tell(room, ToolState.CANCELLED, call_id="a").ttl_s is not None
    last = tell(room, ToolState.FINISHED, call_id="b")
    assert last.told == "finished"
    assert last.ttl_s is not None
    other = started(JobRoom(), "ls", "make")
    tell(other, ToolState.CANCELLED, call_id="a")
    assert tell(other, ToolState.CANCELLED, call_id="b").ttl_s is None


def test_a_client_that_is_always_wrong_is_not_believed() -> None:
    """A client that repeatedly says one second and takes a hundred is expected to take a hundred; another
    client is still believed."""
    room = JobRoom(num_blocks=257)
    for number in range(20):
        job = f"j{number}"
        room.turn(f"{job}-1", [number, *PROMPT], job, tenant="liar")
        room.read(f"{job}-1", "deploy")
        room.scheduler.signal(ToolSignal(job, ToolState.STARTED, expected_s=1.0), room.clock.now())
        room.advance(100)
        room.turn(f"{job}-2", [*room.said(f"{job}-1"), 7], job, tenant="liar", last=True)
    expected_s = []
    for tenant in ("liar", "honest"):
        room.turn(tenant, [50, *PROMPT, *tenant.encode()], tenant, tenant=tenant)
        room.read(tenant, "deploy")
        room.scheduler.signal(ToolSignal(tenant, ToolState.STARTED, expected_s=1.0), room.clock.now())
        status = room.policy.job(tenant, room.clock.now())
        assert status is not None
        expected_s.append(status.expected_return_s)
    liar_s, honest_s = expected_s
    assert liar_s is not None
    assert liar_s > 50
    assert honest_s is not None


def test_a_signal_may_name_the_turn_it_means() -> None:
    """Of two branches only the named one moves."""
    room = JobRoom()
    for name, prompt in (("main", PROMPT), ("sub", [9, *PROMPT])):
        room.turn(name, prompt, "job")
        room.read(name, "deploy")
    room.clock.advance(1)
    tell(room, ToolState.CANCELLED, request_id="main")
    status = room.policy.job("job", room.clock.now())
    assert status is not None
    assert {each.request_id: each.told for each in status.branches} == {"main": "cancelled", "sub": None}
    receipt = room.scheduler.signal(
        ToolSignal("job", ToolState.FINISHED, request_id="nobody's"), room.clock.now()
    )
    assert receipt is None
    assert room.scheduler.signal(ToolSignal("no job", ToolState.FINISHED), room.clock.now()) is None


def test_a_signal_makes_a_job_of_a_question() -> None:
    """A signal about a tool that the API server process could not read makes the question an inferred job."""
    room = JobRoom()
    job_id = room.turn("r1", PROMPT).job_id
    room.scheduler.signal(
        ToolSignal(job_id, ToolState.STARTED, tool="search", expected_s=5), room.clock.now()
    )
    assert room.num_pins == 1
    room.advance(4)
    assert room.num_pins == 1
    assert room.turn("r2", [*room.said("r1"), 7]).previous_pin == "handed_over"
