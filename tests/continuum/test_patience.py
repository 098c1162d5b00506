"""With a host tier, a later turn that has waited for long ranks with those whose KV is pinned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from continuum.tuning import Tuning
from tests.continuum.test_admission import CONFIG, HOST_BLOCKS, Room

PATIENCE_S = Tuning().patience_s


def order(room: Room) -> list[str]:
    """The two waiting requests, in the order of the queue."""
    now, policy = room.clock.now(), room.scheduler.policy
    waiting = [room.scheduler.requests[request_id] for request_id in ("new", "old-2")]
    return [each.request_id for each in sorted(waiting, key=lambda each: policy.waiting_key(each, now))]


@pytest.mark.parametrize(("num_host_blocks", "is_patient"), [(HOST_BLOCKS, False), (0, True)])
def test_a_returning_turn_loses_its_patience(num_host_blocks: int, is_patient: bool) -> None:
    """A turn goes before an older new job once its patience ends, and the queue is notified once. Without a
    host tier the order stays: taking memory out of turn would make others recompute."""
    config = replace(CONFIG, pin_budget=0.0)
    room = Room(num_host_blocks, config)
    room.begin("old", 3, "ls")
    room.clock.advance(300.0)
    room.add("new", [60] * 12, job_id="new", max_tokens=1)
    room.clock.advance(1.0)
    room.add("old-2", [*room.tokens["old"], 7], job_id="old", max_tokens=1)
    before = order(room)
    room.clock.advance(PATIENCE_S - 1.0)
    assert order(room) == before
    list(room.scheduler.policy.changed_keys(room.clock.now()))
    room.clock.advance(1.0)
    changed = [each.request_id for each in room.scheduler.policy.changed_keys(room.clock.now())]
    assert changed == ([] if is_patient else ["old-2"])
    assert order(room) == (before if is_patient else ["old-2", "new"])
    assert list(room.scheduler.policy.changed_keys(room.clock.now())) == []
    if not is_patient:
        assert before == ["new", "old-2"]
