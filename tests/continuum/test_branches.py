"""One job with many prompts: branches, overlaps and retries stay separate; divergence from the job is
found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.continuum.job_room import JobRoom
from tracing.events import JobEvent, TraceHeader
from tracing.reader import read_trace
from tracing.tracer import Tracer
from tracing.writer import TraceWriter

MAIN = list(range(100, 196))
SUB = list(range(300, 380))


def test_a_question_beside_a_running_tool_does_not_close_its_gap() -> None:
    """While a tool runs, a prompt with the history but no reply to that call leaves pin and gap with the
    call's turn."""
    room = JobRoom()
    room.turn("r1", MAIN, "job", num_replies=0, num_results=0)
    room.read("r1", "make")
    room.advance(2)
    beside = room.turn("title", [*MAIN, *[9] * 30], "job", num_replies=0, num_results=0)
    assert (beside.gap_s, beside.previous_pin) == (None, None)
    room.advance(3)
    back = room.turn("r2", [*room.said("r1"), *[7] * 20], "job", num_replies=1, num_results=1)
    assert back.gap_s == pytest.approx(5, abs=0.5)
    assert back.previous_pin == "handed_over"


def test_a_conversation_that_goes_on_without_its_result_teaches_no_duration() -> None:
    """The client gave up the call, so its duration is censored: at least this long."""
    room = JobRoom()
    prompt, results = MAIN, 0
    for number in range(8):
        room.turn(f"r{number}", prompt, "job", num_replies=number, num_results=results)
        room.read(f"r{number}", "make")
        room.advance(1)
        results += number == 0  # Only the first call gets its result.
        prompt = [*room.said(f"r{number}"), *[7] * 4]
    status = room.policy.job("job", room.clock.now())
    assert status is not None
    assert status.turns == 8
    curve = room.policy.tools.curve(None)
    assert 0.05 < curve.cdf(1.5) < 0.5


def test_sub_agents_under_one_id_keep_their_own_pins() -> None:
    """Two alternating branches each find their own KV, with one pin each."""
    room = JobRoom()
    for number in range(3):
        for name, prompt in (("main", MAIN), ("sub", SUB)):
            begun = room.said(f"{name}{number - 1}") if number else prompt
            receipt = room.turn(
                f"{name}{number}", [*begun, number], "job", num_replies=number, num_results=number
            )
            room.read(f"{name}{number}", "ls")
            assert receipt.previous_pin == ("handed_over" if number else None)
            assert receipt.recomputed_tokens == 0
            assert receipt.diverged_at_token is None
    assert room.num_pins == 2
    status = room.policy.job("job", room.clock.now())
    assert status is not None
    assert (status.turns, len(status.branches), status.pinned_blocks > 0) == (6, 2, True)


def test_samples_of_one_prompt_asked_at_once_are_branches() -> None:
    """Concurrent equal prompts are separate branches: each may be continued, and is pinned."""
    room = JobRoom()
    for name in "ab":
        room.ask(name, MAIN, "job", num_replies=0)
    room.run()
    assert room.num_pins == 2
    for number, name in enumerate("ba"):
        receipt = room.turn(f"{name}2", [*room.said(name), 7], "job", num_replies=1)
        assert (receipt.turn, receipt.previous_pin) == (3 + number, "handed_over")
        assert receipt.diverged_at_token is None
    assert room.num_pins == 2


@pytest.mark.parametrize("length", [5, 16, 17, 96, 101])
def test_what_was_answered_and_is_asked_again_is_a_branch(length: int) -> None:
    """Equal prompts one after the other are separate branches, numbered by arrival, each with its pin, for
    any length of the prompt."""
    room = JobRoom()
    prompt = MAIN[:length]
    for number in range(1, 4):
        receipt = room.turn(f"r{number}", prompt, "job", num_replies=0)
        room.read(f"r{number}", "ls")
        assert (receipt.turn, receipt.gap_s, receipt.previous_pin) == (number, None, None)
        assert room.num_pins == number
    for number in (2, 1, 3):
        receipt = room.turn(f"r{number}-next", [*room.said(f"r{number}"), 7], "job", num_replies=1)
        assert receipt.previous_pin == "handed_over"
    assert (receipt.turn, room.num_pins) == (6, 3)
    room.scheduler.check_invariants()


# ---- divergence from the job ----


def test_a_changed_message_is_told_with_its_place_and_its_price() -> None:
    """A token changed in mid-history: the turn still is its job's next one, takes over the rest of the pin,
    and its receipt says where the prompt diverged and at what cost."""
    room = JobRoom()
    room.turn("r1", MAIN, "job", num_replies=0, max_tokens=33)
    room.read("r1", "ls")
    said = room.said("r1")
    said[50] = 9
    receipt = room.turn("r2", [*said, *[7] * 20], "job", num_replies=1)
    assert (receipt.turn, receipt.previous_pin) == (2, "handed_over")
    assert (receipt.diverged_at_token, receipt.diverged_tokens) == (48, 128 - 48)
    assert receipt.cached_tokens == 48
    assert room.num_pins == 1


def test_a_prompt_that_changes_at_its_start_loses_all() -> None:
    """A changed first token, as a header that is new in each request, loses everything."""
    room = JobRoom()
    room.turn("r1", [1, *MAIN], "job", num_replies=0, max_tokens=33)
    said = room.said("r1")
    receipt = room.turn("r2", [2, *said[1:], 7], "job", num_replies=1)
    assert (receipt.diverged_at_token, receipt.diverged_tokens) == (0, 128)


def test_where_replies_are_not_counted_only_a_lone_chain_can_part() -> None:
    """Without reply counts, divergence is reported for a single chain only, not with two branches."""
    room = JobRoom()
    room.turn("r1", MAIN, "job", max_tokens=33)
    said = room.said("r1")
    said[50] = 9
    receipt = room.turn("r2", [*said, *[7] * 20], "job")
    assert (receipt.diverged_at_token, receipt.previous_pin) == (48, None)
    said[40] = 9
    assert room.turn("r3", [*said, *[7] * 20], "job").diverged_at_token is None


@pytest.mark.parametrize("num_replies", [0, None])
def test_a_new_branch_parts_from_nothing(num_replies: int | None) -> None:
    """A sub-agent's first prompt that shares only a system prompt, or nothing, does not diverge."""
    room = JobRoom()
    room.turn("r1", MAIN, "job", num_replies=3)
    for number, prompt in enumerate(([*MAIN[:64], *[9] * 20], SUB)):
        receipt = room.turn(f"sub{number}", prompt, "job", num_replies=num_replies)
        assert (receipt.diverged_at_token, receipt.diverged_tokens) == (None, 0)


def test_the_trace_tells_where_a_prompt_parted(tmp_path: Path) -> None:
    """The trace event of the turn's arrival has the divergence, before anything is computed."""
    writer = TraceWriter.open(str(tmp_path / "trace.jsonl"))
    writer.emit(TraceHeader(wall_time_s=0.0, monotonic_s=0.0))
    room = JobRoom(tracer=Tracer(writer))
    room.turn("r1", MAIN, "job", num_replies=0)
    room.turn("r2", [9, *MAIN[1:], *[7] * 40], "job", num_replies=1)
    writer.close()
    events = [each for each in read_trace(str(tmp_path / "trace.jsonl")) if isinstance(each, JobEvent)]
    (arrived,) = (each for each in events if each.kind == "turn_arrived" and each.req_id == "r2")
    assert (arrived.diverged_at_token, arrived.diverged_tokens) == (0, 112)
