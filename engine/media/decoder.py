"""Decodes files in a separate process, which starts with the first file, and again after a file that ended
it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from threading import Lock

import msgspec

from engine.media.decoder_process import (
    CLIP_TIME_LIMIT_S,
    TIME_LIMIT_S,
    Decoded,
    DecodeOrder,
)
from engine.media.limits import MediaFailure, MediaFault
from engine.process.limited_child import read_message, write_message
from engine.process.spawn import spawn_command
from engine.records.media import MediaKind, MediaModel, MediaSize, PictureModel

_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG")
"""The only environment variables that the process gets: others may hold secrets."""


_PROCESSES = {
    MediaKind.IMAGE: ("engine.media.decoder_process", TIME_LIMIT_S),
    MediaKind.AUDIO: ("engine.media.audio_process", CLIP_TIME_LIMIT_S),
}
"""The module of each kind's process, and its limit of time."""


class MediaDecoder:
    """Decodes one file at a time: pictures or clips. Thread safe."""

    def __init__(self, model: MediaModel) -> None:
        self._model = model
        kind = MediaKind.IMAGE if isinstance(model, PictureModel) else MediaKind.AUDIO
        self._noun = kind.noun
        self._module, self._time_limit_s = _PROCESSES[kind]
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the first file, and after one that ended it."""
        return None if self._process is None else self._process.pid

    def decode(self, data: bytes, path: str) -> MediaSize:
        """Writes the pixels or samples of a file to a new file at ``path``; returns their size.

        MediaFault if it cannot be decoded within the limits, MediaFailure if it cannot be written.
        """
        order = DecodeOrder(data, self._model, path)
        with self._lock:
            answer = self._answer(order)
        if answer.failure is not None:
            raise MediaFailure(f"A decoded {self._noun} cannot be written: {answer.failure}.")
        if answer.fault is not None:
            raise MediaFault(answer.fault)
        assert answer.size is not None
        return answer.size

    def _answer(self, order: DecodeOrder) -> Decoded:
        """Returns the answer of the process; if it ends without one, that of a second process."""
        code = 0
        for _ in range(2):
            process = self._process or self._start()
            answer = _ask(process, order)
            if answer is not None:
                return answer
            self._process = None
            code = _reap(process)
            with suppress(OSError):
                os.unlink(order.path)
            if code == -signal.SIGPROF:
                raise MediaFault(f"takes more than {self._time_limit_s:g} s to decode, the limit")
        if self._closed:
            raise MediaFailure("The server is shutting down.")
        if code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL):
            raise MediaFault("cannot be decoded: it crashes the decoder")
        raise MediaFailure(f"The process that decodes {self._noun}s ended with exit code {code}.")

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise MediaFailure("The server is shutting down.")
        process = subprocess.Popen(
            spawn_command(self._module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(pickle.dumps(sys.path))
            process.stdin.flush()
        self._process = process
        self._end_if_closed()
        return process

    def _end_if_closed(self) -> None:
        """Ends a process that was started while another thread called ``close``."""
        if self._closed and self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process. Repeatable."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            _reap(process)


def _reap(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of the process; returns its exit code."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    return process.wait()


def _ask(process: subprocess.Popen[bytes], order: DecodeOrder) -> Decoded | None:
    """Returns the answer; None if the process ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        write_message(process.stdin, order)
        answer = read_message(process.stdout)
    except (OSError, ValueError):  # an end of a pipe is closed
        return None
    return None if answer is None else msgspec.msgpack.decode(answer, type=Decoded)
