"""The agent policy's promises about jobs, pins and order, with the real scheduler on a manual clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy, ContinuumPolicyFactory
from engine.core.policy import PolicyContext
from engine.core.request import RequestStatus
from engine.errors import ConfigError
from engine.records.messages import JobFinished, ToolCall, ToolGapStarted, TurnReceipt
from tests.core.engine_room import EngineRoom
from tracing.events import JobEvent, PinEvent, TraceEvent
from tracing.reader import read_trace
from tracing.tracer import Tracer
from tracing.writer import TraceWriter

BLOCK = 4


def make_room(num_blocks: int = 33, tracer: Tracer | None = None, **options: object) -> EngineRoom:
    """A room with the agent policy; ``options`` are fields of ContinuumConfig."""
    config = ContinuumConfig(**options)  # type: ignore[arg-type]
    policy = ContinuumPolicyFactory(config)(PolicyContext(BLOCK, num_blocks - 1, tracer))
    assert isinstance(policy, ContinuumPolicy)
    return EngineRoom(policy, block_size=BLOCK, num_blocks=num_blocks, max_model_len=96, tracer=tracer)


def turn(room: EngineRoom, request_id: str, job: str, prompt: list[int], **options: object) -> TurnReceipt:
    """Runs one turn to its end; returns its receipt."""
    room.add(request_id, prompt, job_id=job, **options)  # type: ignore[arg-type]
    room.run()
    receipt = room.finished[request_id].receipt
    assert receipt is not None
    return receipt


def tools_start(room: EngineRoom, job: str, request_id: str, *commands: str) -> TurnReceipt | None:
    calls = [ToolCall("bash", f'{{"command": "{command}"}}') for command in commands]
    return room.scheduler.signal(ToolGapStarted(request_id, calls), room.clock.now())


def prompt_of(room: EngineRoom, request_id: str, *more: int) -> list[int]:
    return [*room.tokens[request_id], *more]


def pins(room: EngineRoom) -> int:
    return room.scheduler.statistics().num_pins


def ended(room: EngineRoom) -> dict[str, int]:
    return {str(cause): count for cause, count in room.scheduler.make_stats().pins_ended.items()}


def test_a_turn_is_held_and_handed_over_to_the_next() -> None:
    """The second turn finds all full blocks of the first, prompt and output, and takes over its pin."""
    room = make_room()
    first = turn(room, "r1", "a", list(range(20)))
    assert (first.turn, first.cached_tokens, first.pinned_tokens, first.previous_pin) == (1, 0, 20, None)
    assert first.ttl_s == 10.0
    room.clock.advance(5)
    second = turn(room, "r2", "a", prompt_of(room, "r1", 7, 7, 7))
    assert (second.turn, second.cached_tokens, second.recomputed_tokens) == (2, 20, 0)
    assert second.previous_pin == "handed_over"
    assert second.gap_s == pytest.approx(5)
    assert pins(room) == 1
    assert ended(room) == {"handed_over": 1}


def test_a_pin_expires_at_its_deadline_and_not_before() -> None:
    """Blocks of an expired pin are free but still cached, and a later turn may find them."""
    room = make_room()
    turn(room, "r1", "a", list(range(20)))
    deadline_s = room.scheduler.next_due_s()
    assert deadline_s is not None
    assert deadline_s == pytest.approx(room.clock.now() + 10)
    room.scheduler.expire(deadline_s - 0.001)
    assert pins(room) == 1
    room.scheduler.expire(deadline_s)
    assert pins(room) == 0
    assert ended(room) == {"expired": 1}
    assert room.scheduler.statistics().num_free_blocks == 32
    assert turn(room, "r2", "a", prompt_of(room, "r1", 7)).previous_pin == "expired"


def test_a_returned_turn_that_waits_keeps_its_pin() -> None:
    """While a pin's next turn waits in the queue, the pin holds past its deadline."""
    room = make_room()
    turn(room, "r1", "a", list(range(20)))
    for i in range(4):
        room.add(f"busy{i}", [100 + i] * 4, max_tokens=40)
    room.step()
    room.add("r2", prompt_of(room, "r1", 7), job_id="a")
    room.clock.advance(60)
    room.step()
    assert pins(room) == 1
    room.run()
    assert room.finished["r2"].receipt is not None
    assert room.finished["r2"].receipt.cached_tokens == 20


def test_the_last_step_releases_everything() -> None:
    """After is_last_step nothing is pinned, and the job's other pins are released."""
    room = make_room()
    turn(room, "r1", "a", list(range(20)))
    turn(room, "branch", "a", [9] * 12)
    assert pins(room) == 2
    receipt = turn(room, "r2", "a", prompt_of(room, "r1", 7), is_last_step=True)
    assert (receipt.pinned_tokens, receipt.reason) == (0, "last step of the job")
    assert pins(room) == 0
    assert ended(room) == {"handed_over": 1, "released": 1}


def test_a_client_that_closes_the_job_releases_its_pins() -> None:
    """JobFinished ends the pins at once."""
    room = make_room()
    turn(room, "r1", "a", list(range(20)))
    room.scheduler.signal(JobFinished("a"), room.clock.now())
    assert pins(room) == 0
    assert ended(room) == {"released": 1}


@pytest.mark.parametrize("while_waiting", [True, False])
def test_an_aborted_turn_is_not_pinned(while_waiting: bool) -> None:
    """After a disconnect neither the aborted turn nor the pin it had returned to stays."""
    room = make_room()
    turn(room, "r1", "a", list(range(20)))
    room.add("r2", prompt_of(room, "r1", 7), job_id="a", max_tokens=20)
    if not while_waiting:
        room.step()
    room.scheduler.finish_requests(["r2"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    assert pins(room) == 0
    assert ended(room) == ({"released": 1} if while_waiting else {"handed_over": 1})
    room.scheduler.check_invariants()


def test_a_stop_string_ends_a_turn_like_eos_does() -> None:
    """A turn stopped from outside is pinned."""
    room = make_room()
    room.add("r1", list(range(20)), job_id="a", max_tokens=20)
    for _ in range(4):
        room.step()
    (output,) = room.scheduler.finish_requests(["r1"], RequestStatus.FINISHED_STOPPED, room.clock.now())
    assert output.receipt is not None
    assert output.receipt.pinned_tokens == 20
    assert pins(room) == 1


def test_tips_of_one_job_are_kept_apart() -> None:
    """Sub-agents that share an id and a system prompt have separate pins, and each finds its own KV."""
    room = make_room(num_blocks=65)
    system = [1] * 12
    turn(room, "a1", "job", system + [2] * 12)
    turn(room, "b1", "job", system + [3] * 12)
    assert pins(room) == 2
    second = turn(room, "b2", "job", prompt_of(room, "b1", 8, 8))
    assert second.cached_tokens == 24
    assert pins(room) == 2
    assert turn(room, "a2", "job", prompt_of(room, "a1", 8, 8)).previous_pin == "handed_over"
    assert pins(room) == 2


def test_a_reply_rendered_anew_still_continues_its_turn() -> None:
    """If the next prompt differs from the reply's start on, the old pin is replaced."""
    room = make_room()
    turn(room, "r1", "a", list(range(20)), max_tokens=12)
    second = turn(room, "r2", "a", [*range(20), 50, 51, 52, 53, 54, 55])
    assert second.previous_pin == "handed_over"
    assert second.cached_tokens == 20
    assert pins(room) == 1


def test_a_stop_to_pins_by_budget_and_tenant_share() -> None:
    """A tip beyond the budget, or its tenant's share of it, is released, and the receipt says so."""
    room = make_room(pin_budget=0.5, pin_tenant_share=0.5)
    assert turn(room, "r1", "a", [1] * 28, tenant="x").pinned_tokens == 28
    refused = turn(room, "r2", "b", [2] * 28, tenant="x")
    assert (refused.pinned_tokens, refused.reason) == (0, "pin budget is used up")
    assert turn(room, "r3", "c", [3] * 28, tenant="y").pinned_tokens == 28
    assert pins(room) == 2


def test_an_older_job_displaces_younger_pins_from_the_budget() -> None:
    """The older job keeps its KV; a younger one never displaces it."""
    room = make_room(pin_budget=0.5)
    turn(room, "old1", "old", [1] * 4)
    room.clock.advance(1)
    assert turn(room, "young1", "young", [2] * 44).pinned_tokens == 44
    held = turn(room, "old2", "old", prompt_of(room, "old1", *[3] * 30))
    assert held.pinned_tokens >= 36
    assert ended(room) == {"handed_over": 1, "revoked": 1}
    assert turn(room, "young2", "young", prompt_of(room, "young1", 5)).pinned_tokens == 0


def test_order_is_preempted_then_warm_then_program_age() -> None:
    """Preempted turns go first, then warm turns, then turns of the job that began first."""
    room = make_room(num_blocks=65)
    turn(room, "old1", "old", [1] * 8)
    turn(room, "young1", "young", [2] * 8)
    room.clock.advance(11)
    room.scheduler.expire(room.clock.now())
    turn(room, "warm1", "warm", [3] * 8)
    for i in range(4):
        room.add(f"busy{i}", [100 + i] * 4, max_tokens=3)
    room.step()
    room.add("new", [9] * 8, job_id="new", max_tokens=1)
    room.add("young2", prompt_of(room, "young1", 5), job_id="young", max_tokens=1)
    room.add("old2", prompt_of(room, "old1", 5), job_id="old", max_tokens=1)
    room.add("warm2", prompt_of(room, "warm1", 5), job_id="warm", max_tokens=1)
    started: list[str] = []
    while len(started) < 4:
        started.extend(r.req_id for r in room.step().scheduled_new_reqs)
    assert started == ["warm2", "old2", "young2", "new"]


def test_a_warm_turn_passes_one_that_finds_no_room() -> None:
    """A warm turn holds memory that only running it can free; a cold turn of a younger job waits."""
    room = make_room(num_blocks=25, ttl_rule="fixed", fixed_ttl_s=600)
    turn(room, "warm1", "warm", [1] * 20)
    room.clock.advance(1)
    room.add("busy", [5] * 8, max_tokens=50)
    room.step()
    big = room.add("big", [6] * 80, job_id="big", max_tokens=2)
    # A preempted turn goes before all warm ones.
    big.status = RequestStatus.PREEMPTED
    room.scheduler.waiting.rekey(big, room.scheduler.policy.waiting_key(big, room.clock.now()))
    room.add("small", [7] * 8, job_id="small", max_tokens=2)
    room.add("warm2", prompt_of(room, "warm1", 5, 5), job_id="warm", max_tokens=2)
    plan = room.step()
    assert [r.req_id for r in plan.scheduled_new_reqs] == ["warm2"]


def test_a_new_job_may_not_break_a_pin_until_it_has_waited_its_bound() -> None:
    """While something runs a new job waits for pins; after max_wait_s it breaks them, tail first."""
    room = make_room(num_blocks=17, max_wait_s=5, fixed_ttl_s=600, ttl_rule="fixed")
    turn(room, "r1", "a", [1] * 40)
    room.add("busy", [5] * 8, max_tokens=60)
    room.step()
    room.add("new", [2] * 24, job_id="b")
    room.step()
    assert "new" not in room.last_plan.num_scheduled_tokens  # type: ignore[union-attr]
    room.clock.advance(5)
    assert "new" in room.step().num_scheduled_tokens
    # Only the needed part of the pin was revoked.
    assert 0 < room.scheduler.statistics().num_pinned_blocks < 10


def test_pins_never_stop_the_engine() -> None:
    """If nothing runs and the first waiting turn does not fit, pins give way in the same step."""
    room = make_room(num_blocks=17, ttl_rule="fixed", fixed_ttl_s=600)
    turn(room, "r1", "a", [1] * 52)
    room.add("new", [2] * 40, job_id="b")
    assert "new" in room.step().num_scheduled_tokens


@pytest.mark.parametrize("pinned_is_younger", [True, False])
def test_growing_turns_take_a_younger_jobs_pin_but_not_an_older_ones(pinned_is_younger: bool) -> None:
    """Growing turns revoke a younger job's pin from its tail; turns younger than the pin's job are
    preempted."""
    room = make_room(num_blocks=17, ttl_rule="fixed", fixed_ttl_s=600)

    def hold() -> None:
        turn(room, "held", "held", [1] * 32)
        room.clock.advance(1)

    if not pinned_is_younger:
        hold()
    turn(room, "a1", "a", [7] * 4)
    turn(room, "b1", "b", [8] * 4)
    if pinned_is_younger:
        room.clock.advance(1)
        hold()
    room.add("a2", prompt_of(room, "a1", 5), job_id="a", max_tokens=20)
    room.add("b2", prompt_of(room, "b1", 5), job_id="b", max_tokens=20)
    room.run()
    num_preemptions = sum(output.num_preemptions for output in room.finished.values())
    assert (num_preemptions == 0) is pinned_is_younger


def test_tools_that_return_late_are_learned_and_let_go() -> None:
    """Once a kind of call is known to take minutes its KV is not pinned; for a quick one it is."""
    room = make_room(num_blocks=65)
    for i in range(12):
        for command, gap_s in (("make all", 300.0), ("ls -l", 0.5)):
            job = f"{command}{i}"
            turn(room, f"{job}-1", job, [i] * 8)
            tools_start(room, job, f"{job}-1", command)
            room.clock.advance(gap_s)
            turn(room, f"{job}-2", job, prompt_of(room, f"{job}-1", 5), is_last_step=True)
    turn(room, "slow", "slow", [50] * 8)
    slow = tools_start(room, "slow", "slow", "make all")
    turn(room, "quick", "quick", [51] * 8)
    quick = tools_start(room, "quick", "quick", "ls -l")
    both = turn(room, "both", "both", [52] * 8)
    both_receipt = tools_start(room, "both", "both", "ls -l", "make all")
    assert slow is not None
    assert quick is not None
    assert both_receipt is not None
    assert (slow.ttl_s, slow.pinned_tokens) == (0.0, 0)
    assert quick.pinned_tokens == both.pinned_tokens == 8
    assert quick.expected_tool_s == pytest.approx(0.5, rel=0.3)
    assert both_receipt.pinned_tokens == 0
    assert pins(room) == 1


def test_a_quick_call_is_held_although_calls_in_general_are_slow() -> None:
    """Until the API server process has read the turn a grace pin holds its KV; then its own tool decides."""
    room = make_room(num_blocks=65)
    for i in range(30):
        command, gap_s = ("ls", 0.5) if i % 3 == 0 else ("make all", 300.0)
        turn(room, f"{i}-1", f"{i}", [i] * 8)
        tools_start(room, f"{i}", f"{i}-1", command)
        room.clock.advance(gap_s)
        turn(room, f"{i}-2", f"{i}", prompt_of(room, f"{i}-1", 5), is_last_step=True)
    for command, num_pins in (("make all", 0), ("ls", 1)):
        at_end = turn(room, command, command, [50] * 8)
        assert at_end.reason == "median time to return is beyond the horizon"
        assert pins(room) == 1
        tools_start(room, command, command, command)
        assert pins(room) == num_pins


def test_a_hold_depends_on_the_tool_below_the_horizon() -> None:
    """Quick calls are pinned for less time than longer ones, though other kinds lend both the same prior."""
    room = make_room(num_blocks=257)
    ttl_s = {}
    for number in range(40):
        for command, gap_s in (("ls", 0.1), ("pytest", 4.0), ("npm install", 20.0), ("make all", 90.0)):
            job = f"{command}{number}"
            turn(room, f"{job}-1", job, [number + 1] * 8)
            receipt = tools_start(room, job, f"{job}-1", command)
            assert receipt is not None
            ttl_s[command] = receipt.ttl_s
            room.clock.advance(gap_s)
            room.scheduler.expire(room.clock.now())
            turn(room, f"{job}-2", job, prompt_of(room, f"{job}-1", 5), is_last_step=True)
    assert ttl_s["make all"] == 0
    assert 0.1 < ttl_s["ls"] < 0.6 * ttl_s["pytest"]
    assert 4.0 < ttl_s["pytest"] < ttl_s["npm install"]


def test_a_turn_without_a_tool_call_is_held_briefly() -> None:
    """A turn without calls is probably the last one, and is pinned for 2 s until answers are known to
    return."""
    room = make_room()
    turn(room, "r1", "a", list(range(20)))
    receipt = tools_start(room, "a", "r1")
    assert receipt is not None
    assert receipt.ttl_s == 2.0


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    """A new policy with the same state file knows the tool at once."""
    state = str(tmp_path / "tools")

    def known_duration(room: EngineRoom) -> float | None:
        turn(room, "probe", "probe", [60] * 8)
        receipt = tools_start(room, "probe", "probe", "pytest -q")
        assert receipt is not None
        return receipt.expected_tool_s

    room = make_room(num_blocks=65, estimator_state=state)
    assert known_duration(room) is None
    for i in range(5):
        turn(room, f"r{i}", f"j{i}", [i] * 8)
        tools_start(room, f"j{i}", f"r{i}", "pytest -q")
        room.clock.advance(3)
        turn(room, f"s{i}", f"j{i}", prompt_of(room, f"r{i}", 5))
    room.scheduler.close(room.clock.now())
    learned = known_duration(make_room(num_blocks=65, estimator_state=state))
    assert learned == pytest.approx(3, rel=0.3)


@pytest.mark.parametrize("content", [b"not a state", None])
def test_a_state_that_cannot_be_used_stops_the_start(tmp_path: Path, content: bytes | None) -> None:
    """A foreign file or an unwritable place is reported in one sentence at the start."""
    path = tmp_path / "missing" / "state"
    if content is not None:
        path = tmp_path / "state"
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="estimator state"):
        make_room(estimator_state=str(path))


def test_what_was_learned_is_saved_now_and_then(tmp_path: Path) -> None:
    """A crash loses at most the last minute."""
    state = tmp_path / "tools"
    room = make_room(num_blocks=65, estimator_state=str(state))
    empty = state.read_bytes()
    for i in range(4):
        turn(room, f"r{i}", f"j{i}", [i] * 8)
        tools_start(room, f"j{i}", f"r{i}", "pytest -q")
        room.clock.advance(40)
        turn(room, f"s{i}", f"j{i}", prompt_of(room, f"r{i}", 5))
    policy = room.scheduler.policy
    assert isinstance(policy, ContinuumPolicy)
    policy.tools.wait_until_written()
    assert state.read_bytes() != empty


def test_jobs_are_forgotten_in_the_end() -> None:
    """The table of jobs is bounded; a call of a forgotten job counts as censored at its current length."""
    room = make_room(max_jobs=3)
    for i in range(10):
        turn(room, f"r{i}", f"j{i}", [i] * 8)
        room.clock.advance(20)
    policy = room.scheduler.policy
    assert isinstance(policy, ContinuumPolicy)
    assert policy.statistics().num_jobs <= 4


def read_events(run: Callable[[TraceWriter], None], path: Path) -> list[TraceEvent]:
    writer = TraceWriter.open(str(path))
    run(writer)
    writer.close()
    return list(read_trace(str(path)))


def test_every_pin_has_one_end_in_the_trace(tmp_path: Path) -> None:
    """Each pin is created once and ended once with a cause; each decision has its inputs."""
    from tracing.events import TraceHeader

    def run(writer: TraceWriter) -> None:
        writer.emit(TraceHeader(wall_time_s=0.0, monotonic_s=0.0))
        room = make_room(tracer=Tracer(writer))
        for job in "abc":
            turn(room, f"{job}1", job, [ord(job)] * 12)
            tools_start(room, job, f"{job}1", "ls")
            room.clock.advance(1 if job != "b" else 30)
            turn(room, f"{job}2", job, prompt_of(room, f"{job}1", 5), is_last_step=job == "a")
        room.clock.advance(100)
        room.step()

    events = read_events(run, tmp_path / "trace.jsonl")
    pin_events = [e for e in events if isinstance(e, PinEvent)]
    created = [e.pin_id for e in pin_events if e.kind == "created"]
    assert created == sorted(set(created), key=lambda i: i or 0)
    assert sorted(e.pin_id or 0 for e in pin_events if e.kind == "ended") == created
    assert {e.cause for e in pin_events if e.kind == "ended"} == {"handed_over", "expired"}
    decisions = [e for e in pin_events if e.kind == "decided"]
    assert all({"tool_observations", "prefill_s", "elapsed_s"} <= set(e.inputs) for e in decisions)
    assert [e.kind for e in events if isinstance(e, JobEvent) and e.job_id == "a"] == [
        "turn_arrived", "turn_admitted", "turn_ended", "tools_started",
        "turn_arrived", "turn_admitted", "turn_ended", "finished",
    ]  # fmt: skip


@pytest.mark.parametrize("has_host_tier", [False, True])
def test_a_new_job_waits_for_what_is_held_only_where_it_would_be_computed_again(has_host_tier: bool) -> None:
    """Of 24 blocks 15 are pinned for a tool, another job runs, and a new one needs ten. Without a host tier
    it waits until they expire. With one, it breaks the pin after waiting longer than a reload takes."""
    policy = ContinuumPolicyFactory(ContinuumConfig(ttl_rule="fixed", fixed_ttl_s=60.0))(
        PolicyContext(BLOCK, 24, num_host_blocks=1000 * has_host_tier)
    )
    room = EngineRoom(policy, block_size=BLOCK, num_blocks=25, max_model_len=96)
    turn(room, "r1", "a", list(range(60)))
    room.add("busy", [1, 2, 3, 4], max_tokens=20)
    room.add("r2", list(range(100, 136)), job_id="b")
    room.step()
    room.clock.advance(5)
    room.step()
    assert room.scheduler.statistics().num_running == (2 if has_host_tier else 1)
    assert (room.scheduler.statistics().num_pinned_blocks < 15) == has_host_tier
    room.clock.advance(60)
    room.step()
    assert room.scheduler.statistics().num_running == 2


@pytest.mark.parametrize(
    ("lengths", "has_host_tier", "first"),
    [
        ([4, 4, 4], True, "older"),
        ([1, 1, 1, 1, 8], True, "newcomer"),
        ([1, 1, 1, 1, 8], False, "older"),
    ],
)
def test_with_copies_in_host_memory_age_counts_where_it_tells_who_is_sooner_done(
    lengths: list[int], has_host_tier: bool, first: str
) -> None:
    """With a host tier, the older job's turn goes before a new job only if jobs have similar lengths; after
    many short jobs and a long one, turns go by arrival. If lost KV must be recomputed, the older job always
    goes first."""
    config = ContinuumConfig(ttl_rule="fixed", fixed_ttl_s=0.0, min_ended_jobs=3)
    policy = ContinuumPolicyFactory(config)(PolicyContext(BLOCK, 64, num_host_blocks=1000 * has_host_tier))
    room = EngineRoom(policy, block_size=BLOCK, num_blocks=65, max_model_len=96, max_num_seqs=1)
    for job, num_turns in enumerate(lengths):
        prompt = [100 + job, 1, 2, 3]
        for number in range(1, num_turns + 1):
            turn(room, f"{job}-{number}", str(job), prompt, max_tokens=4)
            tools_start(room, str(job), f"{job}-{number}", *["ls"][: num_turns - number])
            prompt = prompt_of(room, f"{job}-{number}", number, 7)
    turn(room, "old1", "older", [1, 2, 3, 4, 5], max_tokens=4)
    tools_start(room, "older", "old1", "ls")
    room.clock.advance(30)
    room.add("busy", [50, 51, 52, 53])
    room.step()
    room.add("newcomer", [60, 61, 62, 63], job_id="new")
    room.clock.advance(1)
    room.add("older", prompt_of(room, "old1", 6, 7), job_id="older")
    room.run()
    assert next(name for name in room.finished if name in ("older", "newcomer")) == first


def test_a_reset_that_fails_changes_nothing() -> None:
    """While a request runs, the prefix cache and pins stay; afterwards a reset clears both."""
    room = make_room()
    turn(room, "r1", "a", list(range(20)))
    room.add("busy", list(range(500, 508)), max_tokens=8)
    room.step()
    assert not room.scheduler.reset_prefix_cache(room.clock.now())
    assert (pins(room), ended(room)) == (1, {})
    room.run()
    assert turn(room, "r2", "a", prompt_of(room, "r1", 7)).previous_pin == "handed_over"
    assert room.scheduler.reset_prefix_cache(room.clock.now())
    statistics = room.scheduler.statistics()
    assert (pins(room), statistics.num_cached_blocks) == (0, 0)
    assert ended(room)["released"] == 1


def test_cached_blocks_are_counted_in_use_or_not() -> None:
    """The gauge counts all blocks with a cached prefix, also those of running requests."""
    room = make_room()
    room.add("r1", list(range(18)), max_tokens=8)
    room.step()
    stats = room.scheduler.make_stats()
    assert stats.num_total_blocks - stats.num_free_blocks == 5
    assert stats.num_cached_blocks == room.scheduler.statistics().num_cached_blocks == 4
