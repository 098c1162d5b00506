"""Priority is the first key of the agent policy's order, lower first, within the bound on waits."""

from __future__ import annotations

from engine.core.request import Request
from engine.records.messages import JobRef
from tests.continuum.job_room import JobRoom

LONG_S = 600.0


class Room(JobRoom):
    """Pins are long here."""

    def __init__(self, num_blocks: int = 65, max_wait_s: float = LONG_S, pool_share: float = 1.0) -> None:
        options = {"max_wait_s": max_wait_s, "pool_share": pool_share}
        super().__init__(num_blocks=num_blocks, ttl_rule="fixed", fixed_ttl_s=LONG_S, **options)  # type: ignore[arg-type]

    def send(self, name: str, length: int, priority: int, job: str | None = None, count: int = 4) -> Request:
        """Adds a request, of the job ``job`` if given."""
        prompt = [sum(map(ord, name))] * length
        told = None if job is None else JobRef(job)
        self.clock.advance(0.001)
        return self.add(name, prompt, max_tokens=count, priority=priority, job=told)

    def starts(self, num_steps: int = 60) -> list[str]:
        """Runs steps; returns the requests that start, in order."""
        return [new.req_id for _ in range(num_steps) for new in self.step().scheduled_new_reqs]


def test_the_better_priority_goes_first_whatever_else_is_known() -> None:
    """Priority goes before warmth and a job's age, which order requests of equal priority."""
    room = Room()
    room.turn("warm1", [5] * 20, "warm")
    for number in range(4):
        room.send(f"busy{number}", 8, 0, count=6 + number)
    room.step()
    room.send("late", 20, 3)
    room.add("warm2", [*room.said("warm1"), 7], priority=1, job=JobRef("warm"))
    room.send("second", 20, 1, "second")
    room.send("third", 20, 1, "third")
    room.send("urgent", 20, -(2**63), "urgent")
    assert room.starts() == ["urgent", "warm2", "second", "third", "late"]


def test_who_has_waited_for_too_long_goes_before_every_priority() -> None:
    """The bound on waits holds for the worst priority too, however many urgent requests arrive."""
    room = Room(max_wait_s=5.0)
    for number in range(4):
        room.send(f"busy{number}", 8, 0, count=6 + number)
    room.step()
    room.send("patient", 20, 2**63 - 1)
    for number in range(3):
        room.clock.advance(2.0)
        room.send(f"urgent{number}", 20, -5, "urgent")
    assert room.starts() == ["patient", "urgent0", "urgent1", "urgent2"]


def test_the_worst_priority_is_preempted_first() -> None:
    """The worst priority is preempted first, although it began first and its job has a pin."""
    room = Room()
    room.turn("old1", [5] * 40, "old")
    low = room.add("old2", [9] * 40, priority=4, job=JobRef("old"), max_tokens=40)
    room.send("new", 20, 0, "new", count=40)
    room.step()
    running = room.scheduler.running
    assert len(running) == 2
    assert room.policy.victim(running, running[1], room.clock.now()) is low


def test_what_is_held_for_a_worse_priority_gives_way_and_for_a_better_one_does_not() -> None:
    """A new job, which otherwise breaks no pin, breaks pins of a worse priority at once; others it waits
    for."""
    for priority, begins in ((-1, ["new"]), (0, []), (1, [])):
        room = Room(num_blocks=17)
        room.turn("held", [5] * 160, "held")
        room.send("busy", 8, priority, count=60)
        room.step()
        assert room.num_pins == 1
        room.send("new", 100, priority, "new")
        assert room.starts(1) == begins
        assert (room.policy.statistics().num_pinned_blocks < 11) is bool(begins)


def test_an_urgent_job_begins_beside_what_jobs_of_a_worse_priority_will_need() -> None:
    """The working set keeps a new job waiting only if those jobs are not of a worse priority."""
    for priority, begins in ((0, []), (-1, ["new"])):
        room = Room(num_blocks=33, pool_share=0.4)
        for number in range(2):
            room.turn(f"begun{number}", [10 + number] * 120, f"begun{number}")
            room.read(f"begun{number}", "ls")
        room.send("busy", 8, priority, count=60)
        room.step()
        room.send("new", 100, priority, "new")
        assert room.starts(1) == begins
