"""Evictions and pauses of other servers: numbers computed by hand from their rules, on the real scheduler.

Blocks have 4 tokens, a step takes 10 ms and 32 tokens.
"""

from __future__ import annotations

import pytest

from eval.baselines.pausing import TICK_S
from tests.eval.baselines.policy_room import PolicyRoom

# ---- tlru ----


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("policy", "num_new", "cached"),
    [
        ("fcfs", 32, (16, 40)),  # Six blocks are needed: the last ones of the older conversation.
        ("tlru:16", 32, (28, 28)),  # 41 - 16 tokens are seven blocks: three of each are evicted first
        ("tlru:16", 36, (24, 28)),  # A seventh block by LRU.
        ("tlru:24", 32, (20, 36)),  # 41 - 24 tokens are five blocks; after them, older ones are evicted
        ("tlru:100", 32, (16, 40)),  # None must be cached: the older conversation is evicted, as by LRU.
        ("tlru:0", 32, (16, 40)),  # All must be cached: as by LRU.
    ],
)
def test_tlru_evicts_first_what_may_be_computed_again(
    policy: str, num_new: int, cached: tuple[int, int], async_scheduling: bool
) -> None:
    """Two conversations of 41 tokens, ten full blocks each, fill most of a pool of 22 when a third
    arrives."""
    found = []
    for job in ("older", "newer"):
        room = PolicyRoom(policy, num_blocks=22, async_scheduling=async_scheduling)
        room.play("older", 40, "ls")
        room.play("newer", 40, "ls")
        room.play("third", num_new, "ls")
        room.play(job, 2, "ls")
        found.append(room.finished[f"{job}2"].num_cached_tokens)
    assert tuple(found) == cached


def test_tlru_keeps_a_conversation_that_went_on() -> None:
    """The tenth block ended its first turn and is in the middle of the second, so it is not among three
    blocks evicted."""
    room = PolicyRoom("tlru:8", num_blocks=24)
    room.play("long", 40, "ls")
    room.play("long", 40, "ls")
    room.play("other", 28, "ls")
    room.play("long", 4, "ls")
    assert room.finished["long3"].num_cached_tokens == 68


# ---- pause ----
#
# Of 1,024 tokens: programs are paused above 972 and resumed up to 870; each counts 100 above its size.


def pausing_room(policy: str, **sizes: int) -> PolicyRoom:
    """A room after one turn of each job; all jobs are running tools."""
    room = PolicyRoom(policy, num_blocks=256, num_host_blocks=256 if policy == "idleness" else 0)
    for job, num_tokens in sizes.items():
        room.play(job, num_tokens, "ls")
    tick(room)
    return room


def tick(room: PolicyRoom) -> None:
    room.wait(TICK_S)
    room.run_for(2)


def waits(room: PolicyRoom, request_id: str) -> bool:
    """Whether the request is not admitted in the next steps."""
    room.run_for(5)
    request = room.scheduler.requests.get(request_id)
    return request is not None and request.first_scheduled_time is None


@pytest.mark.parametrize(("smallest", "is_paused"), [(200, True), (190, False)])
def test_pause_pauses_the_smallest_program_above_its_threshold(smallest: int, is_paused: bool) -> None:
    """341 + 337 + 301 tokens exceed 972; ten fewer do not."""
    room = pausing_room("pause", large=240, middle=236, small=smallest)
    room.send("small", 4)
    assert waits(room, "small2") is is_paused
    room.send("large", 4)
    assert not waits(room, "large2")


def test_pause_resumes_when_there_is_room() -> None:
    """The turn waits until a tick after another program has ended."""
    room = pausing_room("pause", large=240, middle=236, small=200)
    room.send("small", 4)
    tick(room)
    assert waits(room, "small2")
    room.finish_job("large")
    assert waits(room, "small2")
    tick(room)
    assert not waits(room, "small2")


def test_pause_lets_a_turn_end_first() -> None:
    """Three running programs exceed the threshold and finish their turns; then the smallest one's next turn
    waits."""
    room = PolicyRoom("pause", num_blocks=256)
    for job, num_tokens in (("large", 240), ("middle", 236), ("small", 200)):
        room.send(job, num_tokens, max_tokens=10)
    room.run_for(25)
    tick(room)
    room.run()
    assert "small1" in room.finished
    room.send("small", 4)
    room.send("middle", 4)
    assert waits(room, "small2")
    assert "middle2" in room.finished


def test_pause_queues_new_programs_behind_paused_ones() -> None:
    """A small new program would fit, but waits for a tick and for the paused one before it."""
    room = pausing_room("pause", large=240, middle=236, small=200)
    room.send("new", 8)
    assert waits(room, "new1")
    tick(room)
    assert not waits(room, "new1")  # 341 + 337 + 108 fit, 301 more do not


def test_pause_makes_nobody_wait_longer_than_half_an_hour() -> None:
    """The bound is ThunderAgent's, 1800 s."""
    room = pausing_room("pause", large=240, middle=236, small=200)
    room.send("small", 4)
    room.wait(1799)
    assert waits(room, "small2")
    room.wait(1)
    assert not waits(room, "small2")


def test_pause_lets_one_program_go_on_whatever_its_size() -> None:
    """Each exceeds 0.3 of 1,024, so both are paused during their tools. The first to return continues at
    once, the other once the first is paused again."""
    room = pausing_room("pause:0.3", large=240, small=230)
    room.send("small", 4)
    assert not waits(room, "small2")
    for request_id in ("large2", "small3"):
        room.send(request_id[:-1], 4)
        assert waits(room, request_id)
        tick(room)
        assert not waits(room, request_id)


# ---- idleness ----


def idle_room(num_idle: int, **sizes: int) -> PolicyRoom:
    """A room of jobs in tools: the first ``num_idle`` jobs have gaps of 60 s, the others of 0.1 s. Of 1,024
    tokens each takes 106 more than its size; host memory holds 512 more."""
    room = PolicyRoom("idleness", num_blocks=256, num_host_blocks=128)
    jobs = list(sizes)
    for job in jobs[:num_idle]:
        room.play(job, 4, "ls")
    room.wait(60)
    for job in jobs[num_idle:]:
        room.play(job, 4, "ls")
    room.wait(0.1)
    for job in jobs:
        room.play(job, sizes[job], "ls")
    return room


def test_idleness_lets_the_idlest_leave_the_device() -> None:
    """All three are pinned until a tick finds 342 + 342 + 346 tokens; the idlest one's turn then waits."""
    room = idle_room(1, idle=236, busy=236, calm=240)
    assert room.pinned_jobs == ["busy", "calm", "idle"]
    tick(room)
    assert room.pinned_jobs == ["busy", "calm"]
    room.send("idle", 4)
    room.send("busy", 4)
    assert waits(room, "idle3")
    assert room.finished["busy3"].num_cached_tokens == 240
    room.finish_job("calm")
    tick(room)
    assert not waits(room, "idle3")


def test_idleness_keeps_all_that_fit() -> None:
    """With ten tokens fewer no job leaves the device, however idle."""
    room = idle_room(1, idle=236, busy=236, calm=230)
    tick(room)
    assert room.pinned_jobs == ["busy", "calm", "idle"]


def test_idleness_makes_room_for_who_is_busier_now() -> None:
    """The waiting turn's tools took 65 s, the others' have run for 1,000 s: one of those leaves for it, but
    none for a new job."""
    room = idle_room(1, idle=236, busy=236, calm=240)
    tick(room)
    room.send("new", 240)
    room.send("idle", 4)
    tick(room)
    assert waits(room, "idle3")
    room.wait(1000)
    assert not waits(room, "idle3")
    assert waits(room, "new1")
    assert len(room.pinned_jobs) == 2


def test_idleness_prefers_what_is_in_host_memory() -> None:
    """Two jobs have left: the idler one is in host memory, which cannot hold the smaller one as well. Of 346
    freed tokens the idler one gets its need, although the other needs fewer."""
    room = idle_room(2, first=236, second=232, busy=240, calm=240, short=100)
    tick(room)
    assert room.pinned_jobs == ["busy", "calm", "short"]
    room.send("second", 4)
    room.send("first", 4)
    assert waits(room, "first3")
    room.finish_job("busy")
    tick(room)
    assert not waits(room, "first3")
    assert waits(room, "second3")


def test_idleness_gives_pins_up_from_the_idlest_on() -> None:
    """Pins of the idlest jobs are broken first, and the requester's own last."""
    room = idle_room(1, busy=100, calm=100, idle=100)
    request = room.scheduler.requests[room.send("busy", 4)]
    pins = room.scheduler.policy.revocable_for(request, room.clock.now(), last_resort=False)
    assert [pin.job_id for pin in pins] == ["calm", "idle", "busy"]
