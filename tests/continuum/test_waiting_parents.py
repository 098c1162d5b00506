"""A job that waits for sub-agents is held while they work, whatever its tool's curve says; they take
nothing from it."""

from __future__ import annotations

import pytest

from continuum.retention.waiting_parents import LOOK_S, SOON_S
from engine.records.messages import JobStatus
from tests.continuum.job_room import BLOCK, JobRoom, Kept
from tracing.events import PinEvent
from tracing.tracer import Tracer

PROMPT = [1] * 96


def status(room: JobRoom, job_id: str) -> JobStatus:
    told = room.policy.job(job_id, room.clock.now())
    assert told is not None
    return told


def begin(room: JobRoom) -> float:
    """Runs the parent's first turn, which calls a tool; returns how long that is held."""
    room.turn("p1", PROMPT, "parent")
    return room.read("p1", "delegate").ttl_s


def wait(room: JobRoom, seconds: float) -> None:
    for _ in range(int(seconds)):
        room.advance(1)


def test_a_parent_is_held_while_a_sub_agent_works() -> None:
    room = JobRoom()
    ttl_s = begin(room)
    assert ttl_s < 30
    said = [2] * 64
    for number in range(8):
        room.turn(f"c{number}", said, "child", parent="parent")
        room.read(f"c{number}", "make")
        said = [*room.said(f"c{number}"), 7]
        wait(room, 5)
    assert status(room, "parent").pinned_blocks > 0
    assert status(room, "parent").branches[0].reason == "its sub-agents are at work"
    room.turn("answer", said, "child", parent="parent")
    room.read("answer")
    wait(room, 1)
    receipt = room.turn("p2", [*room.said("p1"), *room.tokens["answer"][-8:]], "parent")
    assert receipt.gap_s is not None
    assert receipt.gap_s > ttl_s
    assert (receipt.previous_pin, receipt.recomputed_tokens) == ("handed_over", 0)


def test_it_is_not_held_after_them() -> None:
    room = JobRoom()
    ttl_s = begin(room)
    room.turn("c", [2] * 64, "child", parent="parent")
    wait(room, ttl_s)
    room.turn("c2", [*room.said("c"), 7], "child", parent="parent")
    room.read("c2")
    wait(room, SOON_S + LOOK_S + 1)
    assert status(room, "parent").pinned_blocks == 0


def test_it_is_not_held_while_a_new_job_has_to_wait() -> None:
    room = JobRoom(num_blocks=24)
    ttl_s = begin(room)
    room.ask("c", [2] * 64, "child", parent="parent", max_tokens=200)
    for number in range(3):
        room.ask(f"new{number}", [4 + number] * (8 * BLOCK), f"new{number}", max_tokens=200)
    for _ in range(int(ttl_s) + 1):
        room.step(1.0)
    assert status(room, "child").open_turns
    assert status(room, "parent").pinned_blocks == 0


def test_it_is_not_held_for_ever() -> None:
    room = JobRoom(max_ttl_s=60.0)
    begin(room)
    room.ask("c", [2] * 64, "child", parent="parent", max_tokens=900)
    for _ in range(59):
        room.step(1.0)
    assert status(room, "parent").pinned_blocks > 0
    for _ in range(10):
        room.step(1.0)
    assert status(room, "parent").pinned_blocks == 0


def test_a_job_without_sub_agents_is_held_as_before() -> None:
    room = JobRoom()
    ttl_s = begin(room)
    room.turn("o", [2] * 64, "other")
    wait(room, ttl_s + 1)
    assert status(room, "parent").pinned_blocks == 0


@pytest.mark.parametrize("num_children", [2, 5])
def test_sub_agents_do_not_evict_their_parent(num_children: int) -> None:
    """Few of them fit at once beside the parent, and they soon have waited for too long."""
    room = JobRoom(num_blocks=24, max_wait_s=0.5)
    begin(room)
    held = status(room, "parent").pinned_blocks
    for number in range(num_children):
        room.ask(f"c{number}", [3 + number] * (6 * BLOCK), f"child{number}", parent="parent", max_tokens=40)
    while room.scheduler.has_unfinished_requests():
        room.step(0.04)
        assert status(room, "parent").pinned_blocks == held
    receipt = room.turn("p2", [*room.said("p1"), 7], "parent")
    assert receipt.recomputed_tokens == 0


def test_one_that_could_not_run_otherwise_takes_its_parents_memory() -> None:
    room = JobRoom(num_blocks=24)
    begin(room)
    room.ask("c", [3] * (20 * BLOCK), "child", parent="parent", max_tokens=4)
    room.run()
    assert "c" in room.finished


def test_the_trace_tells_it_once() -> None:
    kept = Kept()
    room = JobRoom(tracer=Tracer(kept))
    ttl_s = begin(room)
    room.turn("c", [2] * 64, "child", parent="parent")
    room.read("c", "make")
    wait(room, ttl_s + 5)
    told = [each for each in kept.events if isinstance(each, PinEvent) and each.rule == "sub-agents"]
    assert [(each.kind, each.req_id, each.inputs["at_work"]) for each in told] == [("decided", "p1", 1)]
