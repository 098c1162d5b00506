"""Promises about requested lifetimes: lower bounds of pins, up to what holding is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from continuum.retention.ttl import at_least_as_asked
from engine.records.messages import JobRef, TurnReceipt
from tests.continuum.test_policy import make_room
from tests.continuum.test_price_rule import INPUTS, RULE
from tests.core.engine_room import EngineRoom


@pytest.mark.parametrize(
    ("asked_s", "ttl_s", "reason"),
    [
        (0.5, 1.0, "for as long as is worth the most"),
        (30.0, 30.0, "its client asked for as long"),
        (1800.0, 40.0, "its client asked for longer than it is worth"),
    ],
)
def test_a_lifetime_is_a_floor_up_to_its_worth(asked_s: float, ttl_s: float, reason: str) -> None:
    """4 s saved at a tenth of the pool pay for 40 s, however long a client requests."""
    decision = at_least_as_asked(RULE.choose_ttl(INPUTS), INPUTS, asked_s, pool_price=1.0, max_ttl_s=600.0)
    assert (decision.ttl_s, decision.reason) == (ttl_s, reason)


def test_a_lifetime_holds_nothing_whose_copy_is_cheap() -> None:
    copied = replace(INPUTS, reload_s=0.01)
    decision = at_least_as_asked(RULE.choose_ttl(copied), copied, 300.0, pool_price=1.0, max_ttl_s=600.0)
    assert decision.ttl_s == 0.0


def test_a_lifetime_is_a_floor_of_the_pin() -> None:
    """A lifetime applies also to unnamed turns, else pinned only after a tool call; the receipt has the
    requested and the actual lifetime."""
    room = make_room(ttl_rule="fixed", fixed_ttl_s=1.0, max_ttl_s=20.0, pool_price=1e-4)
    receipt = receipt_of(room, "r1", 1, JobRef(asked_ttl_s=1800.0))
    assert (receipt.asked_ttl_s, receipt.ttl_s, receipt.pinned_tokens) == (1800.0, 20.0, 20)
    assert receipt.reason == "its client asked for longer than any pin lasts"
    room.scheduler.expire(room.clock.now() + 19)
    assert room.scheduler.statistics().num_pins == 1
    silent = receipt_of(room, "other", 9, JobRef())
    assert (silent.asked_ttl_s, silent.ttl_s) == (None, 0.0)


def receipt_of(room: EngineRoom, request_id: str, token: int, job: JobRef) -> TurnReceipt:
    room.add(request_id, [token] * 20, job=job)
    room.run()
    receipt = room.finished[request_id].receipt
    assert receipt is not None
    return receipt
