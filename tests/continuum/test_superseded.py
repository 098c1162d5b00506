"""Superseded blocks are freed at once, and only they: branches that may return keep their KV."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum.config import ContinuumConfig
from continuum.jobs.shared_prefixes import SharedPrefixes, landmarks_of
from continuum.policy import ContinuumPolicy
from engine.core.policy import PolicyContext
from engine.core.request import RequestStatus
from engine.records.messages import JobRef, ToolCall, ToolGapStarted, ToolSignal, ToolState, TurnReceipt
from tests.continuum.job_room import BLOCK, JobRoom
from tests.core.engine_room import EngineRoom
from tracing.events import JobEvent, PinEvent, TraceEvent, TraceHeader
from tracing.reader import read_trace
from tracing.tracer import Tracer
from tracing.writer import TraceWriter

SYSTEM = list(range(100, 132))
"""Two blocks."""
TASK = list(range(200, 248))
"""Three blocks."""
RESULT = [7] * 40
SUMMARY = list(range(300, 340))
OTHERS = list(range(500, 628))
"""Eight blocks of another client."""


def converse(room: JobRoom, num_turns: int, *, job_id: str = "job", prompt: list[int] | None = None) -> None:
    """Runs ``num_turns`` turns, each with 33 tokens of reply and 40 of a result; the last is an answer."""
    prompt = [*SYSTEM, *TASK] if prompt is None else prompt
    for number in range(num_turns):
        name = f"{job_id}-{number}"
        room.turn(name, prompt, job_id, num_replies=number, num_results=number, max_tokens=33)
        room.read(name, *(["ls"] if number < num_turns - 1 else []))
        prompt = [*room.said(name), *RESULT]


def compact(room: JobRoom, job_id: str = "job", **said: object) -> TurnReceipt:
    """Continues the conversation from a summary of it."""
    prompt = [*SYSTEM, *SUMMARY]
    return room.turn(f"{job_id}-summary", prompt, job_id, **{"num_replies": 0, "num_results": 0, **said})


def num_cached(room: JobRoom, request_id: str, prompt: list[int]) -> int:
    """Tokens of this prompt that a new request finds cached."""
    request = room.ask(request_id, prompt, max_tokens=1)
    room.run()
    return request.num_cached_tokens or 0


def fill(room: JobRoom, num_blocks: int) -> None:
    """Adds a request without a job that needs this many blocks while it runs."""
    room.turn("big", [*range(700, 700 + num_blocks * BLOCK - 8)], "somebody", max_tokens=2, last=True)


# ---- what is released ----


def test_a_compacted_history_is_let_go_when_the_next_turn_comes() -> None:
    """The next prompt begins with the system text and a summary: the pin loses everything after the system
    text, and the receipt says so."""
    room = JobRoom()
    converse(room, 3)
    num_tokens = len(room.said("job-2")) // BLOCK * BLOCK
    room.ask("job-summary", [*SYSTEM, *SUMMARY], "job", num_replies=0)
    room.step()
    assert [pin.num_blocks for pin in room.policy.pins()] == [len(SYSTEM) // BLOCK]
    room.run()
    receipt = room.finished["job-summary"].receipt
    assert receipt is not None
    assert receipt.superseded_tokens == num_tokens - len(SYSTEM)
    assert receipt.cached_tokens == len(SYSTEM)
    stats = room.scheduler.make_stats()
    assert stats.superseded_blocks == receipt.superseded_tokens // BLOCK
    assert stats.pin_block_s["superseded"] >= 0
    room.scheduler.check_invariants()


@pytest.mark.parametrize("release_superseded", [True, False])
def test_dead_blocks_are_used_before_what_others_left_behind(release_superseded: bool) -> None:
    """When the pool runs short, dead blocks are used before another client's older prompt, which pure LRU
    would evict."""
    room = JobRoom(num_blocks=41, release_superseded=release_superseded)
    room.turn("other", OTHERS, "other", last=True, max_tokens=1)
    converse(room, 3)
    compact(room)
    room.advance(20)
    fill(room, 24)
    assert (num_cached(room, "again", [*OTHERS, 1]) == len(OTHERS)) is release_superseded
    room.scheduler.check_invariants()


def test_a_history_whose_pin_has_run_out_is_let_go_too() -> None:
    """Cached blocks of an expired pin are freed too."""
    room = JobRoom(num_blocks=41)
    converse(room, 3)
    room.advance(30)
    assert not room.num_pins
    room.turn("other", OTHERS, "other", last=True, max_tokens=1)
    assert compact(room).superseded_tokens > 0
    assert room.scheduler.make_stats().superseded_blocks > 0
    room.advance(20)
    fill(room, 20)
    assert num_cached(room, "again", [*OTHERS, 1]) == len(OTHERS)


def test_a_rewound_conversation_keeps_what_it_goes_on_from() -> None:
    """If the second turn is resent with other words, everything up to it stays; the rest is released."""
    room = JobRoom()
    converse(room, 4)
    begun = room.said("job-0")
    receipt = room.turn("anew", [*begun, *[8] * 30], "job", num_replies=1, num_results=0)
    num_kept = len(begun) // BLOCK * BLOCK
    assert receipt.cached_tokens == num_kept
    assert receipt.superseded_tokens == len(room.said("job-3")) // BLOCK * BLOCK - num_kept


def test_an_edit_in_the_middle_takes_the_place_and_lets_the_rest_go() -> None:
    """An edit while the tool runs is the job's next turn: the pin is cut where the prompt diverges, and the
    rest is handed over."""
    room = JobRoom()
    room.turn("r1", [*SYSTEM, *TASK], "job", num_replies=0, max_tokens=49)
    room.read("r1", "ls")
    said = room.said("r1")
    said[50] = 9
    receipt = room.turn("r2", [*said, *RESULT], "job", num_replies=1)
    assert (receipt.previous_pin, receipt.cached_tokens) == ("handed_over", 48)
    assert receipt.superseded_tokens == 128 - 48
    assert room.ends() == {"handed_over": 1}


def test_a_prompt_that_changes_at_its_start_ends_the_pin() -> None:
    """The pin ends as superseded, and the receipt says so."""
    room = JobRoom()
    room.turn("r1", [1, *SYSTEM, *TASK], "job", num_replies=0, max_tokens=33)
    room.read("r1", "ls")
    receipt = room.turn("r2", [2, *room.said("r1")[1:], 7], "job", num_replies=1)
    assert receipt.previous_pin == "superseded"
    assert room.ends() == {"superseded": 1}


def test_a_reply_that_is_rendered_anew_is_let_go() -> None:
    """If a template leaves out the reasoning, only the prompt before the reply stays."""
    room = JobRoom()
    room.turn("r1", [*SYSTEM, *TASK], "job", num_replies=0, max_tokens=65)
    room.read("r1", "ls")
    receipt = room.turn("r2", [*SYSTEM, *TASK, *[6] * 20, *RESULT], "job", num_replies=1)
    assert (receipt.cached_tokens, receipt.previous_pin) == (80, "handed_over")
    assert receipt.superseded_tokens == len(room.said("r1")) // BLOCK * BLOCK - 80


# ---- what is kept ----


def test_a_sub_agent_does_not_supersede_the_one_whose_tool_it_is() -> None:
    """The main agent's call runs, so its turn is expected back, whatever begins with the same text."""
    room = JobRoom()
    converse(room, 2)
    room.turn("r2", [*room.said("job-1"), *RESULT], "job", num_replies=2, num_results=1)
    room.read("r2", "agent")
    receipt = room.turn("sub", [*SYSTEM, *[9] * 40], "job", num_replies=0, num_results=0)
    assert receipt.superseded_tokens == 0
    back = room.turn("r3", [*room.said("r2"), *RESULT], "job", num_replies=3, num_results=2)
    assert (back.previous_pin, back.recomputed_tokens) == ("handed_over", 0)
    assert room.scheduler.make_stats().superseded_blocks == 0


def test_a_call_that_its_client_gave_up_is_waited_for_no_more() -> None:
    """A call that its client gave up, as when a user interrupts the agent, is no longer awaited."""
    room = JobRoom()
    converse(room, 2)
    room.turn("r2", [*room.said("job-1"), *RESULT], "job", num_replies=2, num_results=1)
    room.read("r2", "make")
    room.scheduler.signal(ToolSignal("job", ToolState.CANCELLED), room.clock.now())
    receipt = room.turn("anew", [*room.said("job-0"), *[8] * 30], "job", num_replies=1, num_results=0)
    assert receipt.superseded_tokens > 0


def test_a_question_beside_the_conversation_supersedes_nothing() -> None:
    """A prompt with the last prompt but not its reply keeps the reply: the client may still continue it."""
    room = JobRoom()
    converse(room, 2)
    aside = [*room.said("job-1")[:-33], *[9] * 20]
    assert room.turn("aside", aside, "job", num_replies=1, num_results=1).superseded_tokens == 0


def test_a_single_question_is_not_superseded_by_the_next() -> None:
    """Two short conversations of one job share a system text; neither has a history to compact."""
    room = JobRoom()
    for name, question in (("a", [1] * 60), ("b", [2] * 40)):
        receipt = room.turn(name, [*SYSTEM, *question], "job", num_replies=0)
        room.read(name)
        assert receipt.superseded_tokens == 0


def test_blocks_of_another_job_stay() -> None:
    """Of two jobs with one history and no pins, neither loses blocks that the other may request."""
    room = JobRoom()
    converse(room, 3)
    twin = room.turn("twin", [*room.said("job-2"), *RESULT], "twin", num_replies=3, num_results=2)
    assert twin.cached_tokens > 0
    room.advance(60)
    assert compact(room).superseded_tokens == 0
    assert room.scheduler.make_stats().superseded_blocks == 0


def test_a_branch_that_comes_back_after_all_finds_its_blocks_while_nobody_needed_them() -> None:
    """Two conversations of one job share a system text, the second shorter: the first loses its pin once,
    finds all of its KV when it returns, and is not superseded again."""
    room = JobRoom()
    converse(room, 3)
    assert compact(room).superseded_tokens > 0
    room.read("job-summary")
    back = room.turn("r3", [*room.said("job-2"), *RESULT], "job", num_replies=3, num_results=2)
    assert (back.turn, back.recomputed_tokens) == (5, 0)
    room.read("r3")
    again = room.turn("third", [*SYSTEM, *[5] * 40], "job", num_replies=0)
    assert again.superseded_tokens == 0
    room.scheduler.check_invariants()


def test_an_aborted_turn_leaves_the_tip_it_had_changed() -> None:
    """The retry takes the tip's place again, and blocks that were not reused are found."""
    room = JobRoom()
    room.turn("r1", [*SYSTEM, *TASK], "job", num_replies=0, max_tokens=49)
    said = room.said("r1")
    room.ask("edited", [*said[:50], 9, *said[51:], 7], "job", num_replies=1)
    room.step()
    room.scheduler.finish_requests(["edited"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    receipt = room.turn("r2", [*said, *RESULT], "job", num_replies=1)
    assert (receipt.turn, receipt.cached_tokens) == (3, 128)
    room.scheduler.check_invariants()


# ---- the host tier ----


def test_copies_on_the_host_give_way_first() -> None:
    """Host copies of a compacted history are evicted before another job's older copies."""
    policy = ContinuumPolicy(PolicyContext(BLOCK, 40, num_host_blocks=1000), ContinuumConfig())
    room = EngineRoom(
        policy,
        block_size=BLOCK,
        num_blocks=41,
        max_model_len=1024,
        max_num_batched_tokens=512,
        num_host_blocks=36,
        min_load_tokens=BLOCK,
    )
    assert room.connector is not None
    other = room.add("other", OTHERS, max_tokens=1)
    room.run()
    prompt = [*SYSTEM, *TASK]
    for number in range(3):
        room.add(f"r{number}", prompt, max_tokens=33, job=JobRef("job", num_replies=number))
        room.run()
        calls = [ToolCall("bash", '{"command": "ls"}')] if number < 2 else []
        room.scheduler.signal(ToolGapStarted(f"r{number}", calls), room.clock.now())
        prompt = [*room.tokens[f"r{number}"], *RESULT]
    room.add("summary", [*SYSTEM, *SUMMARY], max_tokens=8, job=JobRef("job", num_replies=0))
    room.run()
    room.add("big", list(range(700, 900)), max_tokens=1)
    room.run()
    room.check_invariants()
    assert room.connector.tier.count_held(other.block_hashes) == len(other.block_hashes)


# ---- the trace ----


def traced(tmp_path: Path, name: str) -> tuple[JobRoom, TraceWriter]:
    writer = TraceWriter.open(str(tmp_path / name))
    writer.emit(TraceHeader(wall_time_s=0.0, monotonic_s=0.0))
    return JobRoom(tracer=Tracer(writer)), writer


def test_the_trace_tells_who_went_on_without_what(tmp_path: Path) -> None:
    """The turn's arrival event names the end of the superseded turn; the pin's event has this cause only."""
    room, writer = traced(tmp_path, "trace.jsonl")
    converse(room, 3)
    compact(room)
    room.advance(60)
    room.turn("r1", [1, *SYSTEM, *TASK], "other", num_replies=0, max_tokens=33)
    room.turn("r2", [2, *room.said("r1")[1:], 7], "other", num_replies=1)
    writer.close()
    events: list[TraceEvent] = list(read_trace(str(tmp_path / "trace.jsonl")))
    arrived = [e for e in events if isinstance(e, JobEvent) and e.kind == "turn_arrived" and e.supersedes]
    assert [(e.req_id, e.supersedes) for e in arrived] == [("job-summary", "job-2"), ("r2", "r1")]
    pins = [e for e in events if isinstance(e, PinEvent) and e.cause == "superseded"]
    assert [(e.kind, e.req_id, e.by) for e in pins] == [
        ("shrunk", "job-2", "job-summary"),
        ("ended", "r1", "r2"),
    ]
    assert pins[0].num_blocks * BLOCK == arrived[0].superseded_tokens
    ended = [e.pin_id for e in events if isinstance(e, PinEvent) and e.kind == "ended"]
    assert len(ended) == len(set(ended))


# ---- random sequences of prompts ----

Step = tuple[int, int, int, bool]
"""The turn to start from, the number of its blocks to keep, further tokens, and whether a tool runs."""


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(1, 60), st.booleans()), max_size=12)
)
def test_whatever_a_job_asks_blocks_and_pins_stay_in_order(steps: list[Step]) -> None:
    """Branches, edits, rewinds and summaries in any order keep blocks and pins consistent in a small pool."""
    room = JobRoom(num_blocks=33)
    room.turn("t0", [*SYSTEM, *TASK], "job", max_tokens=20)
    for number, (which, num_blocks, num_more, runs) in enumerate(steps, start=1):
        begun = room.said(f"t{which % number}")[: max(1, num_blocks * BLOCK)]
        prompt = [*begun, *[number] * num_more][:400]
        room.turn(f"t{number}", prompt, "job", max_tokens=20)
        room.read(f"t{number}", *(["ls"] if runs else []))
        room.check_invariants()
    room.advance(700)
    assert not room.num_pins
    assert room.policy.statistics().num_pinned_blocks == 0


@given(st.lists(st.lists(st.integers(0, 1), max_size=40), min_size=1, max_size=8))
def test_what_others_share_lies_between_what_surely_is_and_what_may_be(chains: list[list[int]]) -> None:
    """The estimate is between the sure and the possible number, which differ by at most a half."""
    names: dict[tuple[int, ...], bytes] = {}
    for chain in chains:
        for end in range(1, len(chain) + 1):
            names.setdefault(tuple(chain[:end]), len(names).to_bytes(8, "big"))
    hashed = [[names[tuple(chain[:end])] for end in range(1, len(chain) + 1)] for chain in chains]
    first, others = hashed[0], hashed[1:]
    kept = SharedPrefixes()
    marks = [landmarks_of(each, len(each)) for each in others]
    for each in marks:
        kept.add(each)
    told = kept.num_shared_blocks(landmarks_of(first, len(first)), ())
    shared = max((_num_shared(first, other) for other in others), default=0)
    surely = kept.num_surely_shared_blocks(landmarks_of(first, len(first)))
    assert surely <= shared <= told <= max(1, 1.5 * shared + 1)
    assert told <= max(1, 1.5 * surely)
    for each in marks:
        kept.remove(each)
    assert not len(kept)


def _num_shared(one: list[bytes], other: list[bytes]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
