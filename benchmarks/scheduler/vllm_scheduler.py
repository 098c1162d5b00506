"""Measures vLLM's own V1 scheduler in a process of an interpreter that has vLLM, case by case."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from eval.errors import UNREADABLE, ServerError

SCRIPT = Path(__file__).with_name("step_bench_vllm.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
MAX_MODEL_LEN = 8192


class Samples(msgspec.Struct):
    """One case: seconds of each repetition."""

    case: str
    samples_s: list[float]


class _Answer(msgspec.Struct):
    """The answer to one question."""

    version: str
    cases: list[Samples]


class VllmScheduler:
    """Runs inside the ``with`` block; raises ServerError if it cannot."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._stack = ExitStack()
        self.version = ""
        """Version of vLLM, known after the first answer."""

    def __enter__(self) -> Self:
        from engine.worker.loading.tiny_models import make_model_folder

        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-scheduler-"))
        self._errors: IO[bytes] = self._stack.enter_context(tempfile.TemporaryFile())
        # vLLM reads a config.json before it makes a scheduler.
        make_model_folder(folder, "llama", max_position_embeddings=MAX_MODEL_LEN)
        try:
            self._process = subprocess.Popen(
                [self._python, str(SCRIPT), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env={**os.environ, **ENVIRONMENT},
                cwd=folder,
            )
        except OSError as error:
            self._stack.close()
            raise ServerError(f"Cannot run {self._python}: {error.strerror}.") from error
        self._stack.enter_context(self._process)
        self._stack.callback(self._process.kill)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def measure(self, name: str, num_steps: int) -> list[Samples]:
        """Measures one of the script's cases, which may return several figures."""
        questions = self._process.stdin
        answers = self._process.stdout
        assert questions is not None
        assert answers is not None
        try:
            questions.write(f"{name} {num_steps}\n".encode())
        except BrokenPipeError:
            raise self._gone() from None
        for line in answers:
            if line.startswith(b"{"):  # vLLM itself may print, but no line like this
                return self._read(line)
        raise self._gone()

    def _read(self, line: bytes) -> list[Samples]:
        try:
            answer = msgspec.json.decode(line, type=_Answer)
        except UNREADABLE as error:
            raise ServerError(f"{SCRIPT.name} printed something else than cases: {error}.") from error
        self.version = answer.version
        return answer.cases

    def _gone(self) -> ServerError:
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return ServerError(f"vLLM's scheduler cannot be run by {self._python}: {' '.join(last)}")
