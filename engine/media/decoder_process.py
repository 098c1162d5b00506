"""The process that decodes pictures of clients: small, limited in time and memory, without secrets. Any
picture may end it; its parent then starts another one.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec

from engine.media.limits import PictureFault
from engine.process.limited_child import limit_memory, read_message, write_message
from engine.records.picture import PictureModel

TIME_LIMIT_S = 10.0
"""Maximum CPU time for one picture, in seconds."""
MEMORY_LIMIT_BYTES = 3 * 2**29
"""Maximum memory beyond what the process uses before the first picture: the largest allowed picture needs
several times 64 million pixels of four bytes."""


class DecodeOrder(msgspec.Struct, array_like=True):
    """One picture to decode: the bytes of its file, and the path to which its pixels are written."""

    data: bytes
    model: PictureModel
    path: str


class Decoded(msgspec.Struct, array_like=True, omit_defaults=True):
    """The size of the decoded picture, or why it was not decoded."""

    height: int = 0
    width: int = 0
    fault: str | None = None
    """What is wrong with the picture; None if nothing is."""
    failure: str | None = None
    """An error of this server, such as a full disk."""


def main() -> None:
    """Decodes the pictures that arrive on standard input until it ends."""
    from engine.media.decoding import decode

    def answer(order: DecodeOrder) -> Decoded:
        try:
            return Decoded(*decode(order.data, order.model, order.path))
        except PictureFault as error:
            return Decoded(fault=str(error))
        except OSError as error:
            return Decoded(failure=f"{error.strerror}: {order.path}")

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(MEMORY_LIMIT_BYTES)
    stdin = sys.stdin.buffer
    stdout = sys.stdout.buffer
    while (order := read_message(stdin)) is not None:
        # The default action of the signal ends the process, whatever the decoder is doing.
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
        decoded = answer(msgspec.msgpack.decode(order, type=DecodeOrder))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(stdout, decoded)
