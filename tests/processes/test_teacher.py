"""The thread whose lessons are learned in a separate process."""

from __future__ import annotations

import logging
import threading
from functools import partial

import msgspec
import pytest

from engine.process import teacher
from engine.process.teacher import Teacher
from engine.records.lessons import Lesson, ModelLearned
from estimator.learned.models import decode_durations, decode_work
from tests.estimator.learned.made_calls import made_calls
from tests.estimator.learned.made_jobs import made_jobs

TRAINER = "estimator.learned.trainer"


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "LOOK_S", 0.01)


@pytest.mark.slow
def test_lessons_become_models() -> None:
    """Too few jobs give no model, and the next lesson is taken all the same; calls are a lesson, too."""
    lessons = [made_jobs(2), made_jobs(5), made_calls(120)]
    told: list[ModelLearned] = []
    came = threading.Event()

    def take() -> Lesson | None:
        return partial(msgspec.msgpack.encode, lessons.pop(0)) if lessons else None

    def tell(model: ModelLearned) -> None:
        told.append(model)
        if len(told) == 2:
            came.set()

    running = Teacher(TRAINER, take, tell)
    assert came.wait(60)
    running.close()
    assert decode_work(told[0].model).num_jobs == 10
    assert decode_durations(told[1].model).num_calls == 120


def test_a_trainer_that_fails_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """After a failure nothing more is learned: the cause would make the next lesson fail, too."""
    asked = []

    def take() -> Lesson:
        asked.append(1)
        return lambda: b"no lesson"

    with caplog.at_level(logging.WARNING):
        running = Teacher(TRAINER, take, lambda model: asked.append(2))
        running._thread.join(60)
    assert not running._thread.is_alive()
    assert asked == [1]
    assert [record.message for record in caplog.records if "Nothing more is learned" in record.message]


def test_closing_kills_a_trainer_that_runs() -> None:
    """A server that stops kills the running trainer."""
    begun = threading.Event()

    def take() -> Lesson:
        begun.set()
        return partial(msgspec.msgpack.encode, made_jobs(60))

    running = Teacher(TRAINER, take, lambda model: None)
    assert begun.wait(60)
    running.close()
    running._thread.join(60)
    assert not running._thread.is_alive()


def test_a_lesson_that_takes_too_long_is_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer's process is killed; the server goes on without lessons."""
    monkeypatch.setattr(teacher, "MAX_LESSON_S", 0.01)
    with caplog.at_level(logging.WARNING):
        running = Teacher(TRAINER, lambda: partial(msgspec.msgpack.encode, made_jobs(60)), lambda model: None)
        running._thread.join(30)
    assert not running._thread.is_alive()
    assert "a lesson took more than 0.01 s" in caplog.text
