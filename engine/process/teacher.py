"""Trains the policy's models in a separate process, and passes them to the core.

The core neither loads the library that learns nor waits for it.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable

from engine.process.spawn import spawn_command, spawn_input
from engine.records.lessons import Lesson, ModelLearned

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval in which the thread checks whether a lesson is due."""
MAX_LESSON_S = 300.0
"""A trainer that takes longer is killed."""


class Teacher:
    """A thread that fetches lessons and runs the trainer; stops after the first failure."""

    def __init__(
        self, trainer: str, take_lesson: Callable[[], Lesson | None], tell: Callable[[ModelLearned], object]
    ) -> None:
        """``trainer``: a module whose ``main`` reads a lesson from standard input and writes a model, or
        nothing, to standard output."""
        self._command = spawn_command(trainer)
        self._take_lesson = take_lesson
        self._tell = tell
        self._closed = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="teacher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            lesson = self._take_lesson()
            if lesson is not None and not self._teach(lesson()):
                return

    def _teach(self, lesson: bytes) -> bool:
        """Trains on a lesson; returns whether to go on."""
        try:
            model = self._run_trainer(lesson)
            if model and not self._closed.is_set():
                self._tell(ModelLearned(model.decode()))
        except Exception as error:
            if not self._closed.is_set():
                logger.warning("Nothing more is learned: %s", error)
            return False
        return not self._closed.is_set()

    def _run_trainer(self, lesson: bytes) -> bytes:
        """Returns what the trainer wrote; RuntimeError if it failed."""
        with subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            self._child = child
            if self._closed.is_set():
                child.kill()
            try:
                model, errors = child.communicate(spawn_input(lesson), MAX_LESSON_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise RuntimeError(f"a lesson took more than {MAX_LESSON_S:g} s.") from None
            finally:
                self._child = None
        if child.returncode:
            last = (errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            raise RuntimeError(f"the trainer ended: {last}")
        return model

    def close(self) -> None:
        """Stops learning; kills a running trainer."""
        self._closed.set()
        child = self._child
        if child is not None:
            child.kill()
