"""Validates untrusted grammars by compiling them in a separate process with limits on time and memory. Some
small grammars would take minutes or gigabytes, and a native library cannot be interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from engine.errors import RequestError, TryAgainError
from engine.process.limited_child import limit_memory, read_message, write_message
from engine.records.structured_outputs import StructuredOutputsParams
from engine.structured_output.backend import GrammarBackend, TokenTable
from engine.structured_output.enforceable import enforceable, without_lenient_schemas
from engine.structured_output.future_cache import FutureCache

TIME_LIMIT_S = 3.0
"""Maximum CPU seconds for one grammar."""
MEMORY_LIMIT_BYTES = 2**30
"""Maximum memory beyond the process's use before the first grammar."""
_FROM_OUTSIDE = {-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
"""Exit codes of a process that was ended from outside, or by the machine for lack of memory: these say
nothing about the grammar."""
MAX_REMEMBERED = 256
"""Maximum number of cached verdicts."""


class Verdict(msgspec.Struct):
    """The error in a grammar, or in the tokens; ``message`` is None if there is none."""

    message: str | None = None
    field: str | None = None
    enforced: StructuredOutputsParams | None = None
    """The enforceable part of the grammar."""

    def raise_if_wrong(self) -> None:
        if self.message is not None:
            raise RequestError(self.message, self.field)


class GrammarValidator:
    """A GrammarCheck that starts the process when there is a grammar to validate, and again after a grammar
    ended it."""

    def __init__(self, tokens: Callable[[], TokenTable]) -> None:
        self._tokens = tokens
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        # One thread: the process validates one grammar at a time.
        self._verdicts: FutureCache[StructuredOutputsParams] = FutureCache(MAX_REMEMBERED, 1, "grammar-check")

    def check(self, params: StructuredOutputsParams, owner: str = "") -> Future[StructuredOutputsParams]:
        return self._verdicts.get(params, lambda: self._validate(params), owner)

    def _validate(
        self, params: StructuredOutputsParams, *, is_again: bool = False
    ) -> StructuredOutputsParams:
        process = self._process or self._start()
        verdict = _ask(process, params)
        if verdict is None:
            self._process = None
            if process.wait() in _FROM_OUTSIDE:
                if is_again or self._closed:
                    raise TryAgainError("The process that validates grammars was ended; try again.")
                return self._validate(params, is_again=True)
            loosened = without_lenient_schemas(params)
            if loosened != params:  # one tool's schema must not fail the request
                return self._validate(loosened)
            out_of_time = process.wait() == -signal.SIGPROF
            limit = f"{TIME_LIMIT_S:g} s" if out_of_time else f"{MEMORY_LIMIT_BYTES // 2**20} MiB"
            raise RequestError(
                f"{params.field} is too complex: compiling it takes more than {limit}.", params.field
            )
        verdict.raise_if_wrong()
        return verdict.enforced or params

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{_BOOTSTRAP}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        verdict = _ask(process, self._tokens())
        if verdict is None:
            raise RuntimeError(f"The process that validates grammars ended with exit code {process.wait()}.")
        verdict.raise_if_wrong()
        if self._closed:
            process.kill()
        self._process = process
        return process

    def close(self) -> None:
        self._closed = True
        self._verdicts.close()
        if self._process is not None:
            self._process.kill()
            with self._process, suppress(BrokenPipeError):  # closes its pipes
                self._process.wait()


def _ask(process: subprocess.Popen[bytes], question: msgspec.Struct) -> Verdict | None:
    """Returns the verdict; None if the grammar ended the process."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        write_message(process.stdin, question)
        answer = read_message(process.stdout)
    except BrokenPipeError:
        return None
    return None if answer is None else msgspec.msgpack.decode(answer, type=Verdict)


# ---- in the process ----

_BOOTSTRAP = "from engine.structured_output.validator import main; main()"


def main() -> None:
    """Validates grammars from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    stdin = sys.stdin.buffer
    stdout = sys.stdout.buffer
    tokens = read_message(stdin)
    if tokens is None:
        return
    try:
        backend = GrammarBackend(msgspec.msgpack.decode(tokens, type=TokenTable))
    except RequestError as error:
        write_message(stdout, Verdict(str(error), error.field))
        return
    write_message(stdout, Verdict())
    limit_memory(MEMORY_LIMIT_BYTES)
    while (question := read_message(stdin)) is not None:
        params = msgspec.msgpack.decode(question, type=StructuredOutputsParams)
        # The default action of the signal ends the process, whatever the library does.
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
        verdict = _verdict(backend, params)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(stdout, verdict)


def _verdict(backend: GrammarBackend, params: StructuredOutputsParams) -> Verdict:
    try:
        enforced = enforceable(params, backend.compile)
    except RequestError as error:
        return Verdict(str(error), error.field)
    return Verdict(enforced=None if enforced == params else enforced)
