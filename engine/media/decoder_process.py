"""The process that decodes pictures of clients: small, limited in time and memory, without secrets. Any file
may end it; its parent then starts another one. Clips have a process of their own, ``audio_process``.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable

import msgspec

from engine.media.limits import MediaFault
from engine.process.limited_child import limit_memory, read_message, write_message
from engine.records.media import MediaModel, MediaSize

TIME_LIMIT_S = 10.0
"""Maximum CPU time for one picture, in seconds."""
CLIP_TIME_LIMIT_S = 60.0
"""Maximum CPU time for one clip: half an hour of Opus takes 20 s."""
MEMORY_LIMIT_BYTES = 3 * 2**29
"""Maximum memory beyond what the process uses before the first file: the largest allowed picture needs
several times 64 million pixels of four bytes."""

Decode = Callable[[bytes, MediaModel, str], MediaSize]
"""Writes the pixels or samples of a file to a path, and returns their size. MediaFault if it is bad."""


class DecodeOrder(msgspec.Struct, array_like=True):
    """One file to decode: its bytes, and the path to which its pixels or samples are written."""

    data: bytes
    model: MediaModel
    path: str


class Decoded(msgspec.Struct, array_like=True, omit_defaults=True):
    """The size of what was decoded, or why it was not decoded."""

    size: MediaSize | None = None
    fault: str | None = None
    """What is wrong with the file; None if nothing is."""
    failure: str | None = None
    """An error of this server, such as a full disk."""


def main() -> None:
    """Decodes the pictures that arrive on standard input until it ends."""
    from engine.media.decoding import decode

    decode_orders(decode, TIME_LIMIT_S)


def decode_orders(decode: Decode, time_limit_s: float) -> None:
    """Limits this process, then decodes the files that arrive on standard input until it ends."""

    def answer(order: DecodeOrder) -> Decoded:
        try:
            return Decoded(decode(order.data, order.model, order.path))
        except MediaFault as error:
            return Decoded(fault=str(error))
        except OSError as error:
            return Decoded(failure=f"{error.strerror}: {order.path}")

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(MEMORY_LIMIT_BYTES)
    stdin = sys.stdin.buffer
    stdout = sys.stdout.buffer
    while (order := read_message(stdin)) is not None:
        # The default action of the signal ends the process, whatever the decoder is doing.
        signal.setitimer(signal.ITIMER_PROF, time_limit_s)
        decoded = answer(msgspec.msgpack.decode(order, type=DecodeOrder))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(stdout, decoded)
