"""The blocks reported as saved by a pin equal those that the same requests lose without pins."""

from __future__ import annotations

import pytest

from engine.core.policy import FcfsPolicy, Pin, PinEnd
from engine.core.request import Request, RequestStatus
from tests.core.engine_room import EngineRoom, token_at
from tests.core.test_windows import PinningPolicy

BLOCK = 4
NUM_BLOCKS = 16


class PinsOneTurn(PinningPolicy):
    """Pins the turns of jobs, and records the reported numbers when pins end."""

    def __init__(self) -> None:
        super().__init__()
        self.needed: list[int | None] = []

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        return super().on_turn_end(request, now) if request.request_id.startswith("job") else None

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        super().on_pin_ended(pin, cause, now, by)
        self.needed.append(pin.num_needed_blocks)


def room_after(policy: FcfsPolicy, num_others: int, num_jobs: int = 1) -> EngineRoom:
    """Runs turns of jobs of five blocks each, then other requests of three blocks that share nothing."""
    room = EngineRoom(policy, block_size=BLOCK, num_blocks=NUM_BLOCKS + 1)
    for number in range(num_jobs):
        room.add(f"job{number}", [100 * number + place for place in range(18)], max_tokens=3)
        room.run()
    for number in range(num_others):
        room.add(f"other{number}", [10_000 + 100 * number + place for place in range(12)], max_tokens=1)
        room.run()
    room.check_invariants()
    return room


def lost_without_pins(num_others: int, num_jobs: int) -> int:
    """Blocks of all jobs' turns that are evicted if none is pinned."""
    room = room_after(FcfsPolicy(), num_others, num_jobs)
    kept = 0
    for number in range(num_jobs):
        said = [token_at(f"job{number}", place) for place in (18, 19)]
        room.add("again", [*(100 * number + place for place in range(18)), *said, 7])
        again = room.scheduler.requests["again"]
        kept += len(room.scheduler.kv.pinned.find_longest_cache_hit(again.block_hashes, 20))
        room.scheduler.finish_requests(["again"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    return 5 * num_jobs - kept


@pytest.mark.parametrize("num_jobs", [1, 2])
@pytest.mark.parametrize("num_others", range(8))
def test_a_pin_kept_what_is_lost_without_it(num_others: int, num_jobs: int) -> None:
    policy = PinsOneTurn()
    room = room_after(policy, num_others, num_jobs)
    room.scheduler.pins.end_all(policy.pins(), PinEnd.RELEASED, room.clock.now())
    assert len(policy.needed) == num_jobs
    assert sum(needed or 0 for needed in policy.needed) == lost_without_pins(num_others, num_jobs)


def test_what_pins_hold_alone_is_not_in_use() -> None:
    room = room_after(PinsOneTurn(), 0)
    stats = room.scheduler.make_stats()
    assert stats.num_free_blocks < stats.num_total_blocks
    assert stats.num_pinned_alone_blocks == stats.num_pinned_blocks == 5
    assert stats.kv_usage == 0
