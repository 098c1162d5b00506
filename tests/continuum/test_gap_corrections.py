"""The learned correction of call durations in the policy: what it changes, and when it is dropped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from continuum.learning import gap_corrections
from engine.records.lessons import ModelLearned
from engine.records.messages import TurnReceipt
from estimator.learned.call_history import FEATURES, PastCall, log_of
from estimator.learned.duration_model import DurationModel
from estimator.learned.models import encode_model
from estimator.state import load_learned
from tests.continuum.job_room import JobRoom
from tests.estimator.learned.made_calls import constant_model

TWICE = constant_model(math.log(2))
NO_BETTER = constant_model(math.log(2), loss=0.2, loss_without=0.2)


def learn(room: JobRoom, model: DurationModel) -> None:
    room.scheduler.signal(ModelLearned(encode_model(model).decode()), room.clock.now())


def called(room: JobRoom, name: str, command: str = "pytest") -> TurnReceipt:
    """Runs a job's first turn, which ends with this call."""
    room.turn(f"{name}-1", [len(room.tokens) + 1] * 60, name)
    return room.read(f"{name}-1", command)


def gap(room: JobRoom, name: str, seconds: float, command: str = "pytest") -> float | None:
    """Runs a job of two turns with this call between them; returns the call's predicted duration."""
    expected_s = called(room, name, command).expected_tool_s
    room.clock.advance(seconds)
    room.turn(f"{name}-2", [*room.said(f"{name}-1"), *[7] * 20], name)
    room.read(f"{name}-2")
    return expected_s


def experienced(**options: Any) -> JobRoom:
    """A room that has seen tests of about two seconds."""
    room = JobRoom(num_blocks=900, **options)
    for number in range(8):
        gap(room, f"first{number}", 1.5 + 0.1 * number)
    return room


def test_a_call_is_predicted_as_corrected() -> None:
    """A model corrects predictions; a model no better than none changes no bit."""
    without, twice, useless = (experienced() for _ in range(3))
    learn(twice, TWICE)
    learn(useless, NO_BETTER)
    expected_s, corrected_s, same_s = (gap(room, "next", 2.0) for room in (without, twice, useless))
    assert expected_s is not None
    assert corrected_s == pytest.approx(2 * expected_s, rel=0.01)
    assert same_s == expected_s


def test_nothing_is_held_by_it() -> None:
    """Corrections change reported predictions, in receipts and the job list alike, but no pin."""
    without, twice = experienced(), experienced()
    learn(twice, TWICE)
    plain, corrected = called(without, "next"), called(twice, "next")
    assert corrected.expected_tool_s != plain.expected_tool_s
    assert msgspec.structs.replace(corrected, expected_tool_s=plain.expected_tool_s) == plain
    status = twice.policy.job("next", twice.clock.now())
    assert status is not None
    assert status.expected_return_s == pytest.approx(corrected.expected_tool_s, abs=0.1)


def test_a_model_that_is_wrong_is_believed_no_longer() -> None:
    """A wrong correction is dropped for the tool that it is wrong about."""
    room = experienced()
    learn(room, TWICE)
    first_s = gap(room, "next", 1.8)
    for number in range(25):
        last_s = gap(room, f"later{number}", 1.8)
    assert first_s is not None
    assert last_s is not None
    assert last_s < 0.6 * first_s


def test_calls_that_ended_are_a_lesson(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough new calls form one lesson, with the predictions made for them."""
    monkeypatch.setattr(gap_corrections, "MIN_NEW_CALLS", 4)
    room = JobRoom(num_blocks=900)
    for number in range(5):
        assert room.policy.take_lesson() is None
        gap(room, f"job{number}", 1.5, "ls")
    lesson = room.policy.take_lesson()
    assert lesson is not None
    calls = msgspec.msgpack.decode(lesson(), type=list[PastCall])
    assert [(call.group, call.kind) for call in calls] == [(f"job{n}", "bash") for n in range(1, 5)]
    assert calls[0].log_s == pytest.approx(log_of(1.5))
    named = dict(zip(FEATURES, calls[0].row, strict=True))
    assert named["ln of the 0.5 quantile"] == pytest.approx(log_of(1.5), abs=0.1)
    assert (named["turns before this one"], named["calls in parallel"]) == (0, 1)
    assert named["ln of generated tokens"] == pytest.approx(math.log(21))
    assert room.policy.take_lesson() is None


def test_a_server_that_does_not_learn_collects_nothing() -> None:
    """Without learning, a server collects nothing but applies the model that it was given."""
    room = experienced(learn_order=False)
    assert not room.policy._learners.corrections._past
    learn(room, TWICE)
    assert gap(room, "next", 2.0) == pytest.approx(2 * (gap(experienced(), "next", 2.0) or 0), rel=0.01)


def test_it_outlives_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "learned.json"
    room = experienced(estimator_state=str(state))
    learn(room, TWICE)
    room.policy.close()
    assert load_learned(state).duration_model == TWICE
    again, without = JobRoom(estimator_state=str(state)), experienced()
    assert gap(again, "next", 2.0) == pytest.approx(2 * (gap(without, "next", 2.0) or 0), rel=0.05)
