"""The process that decodes pictures of clients: small, limited in time and memory, without secrets. It may
end at any picture; its parent starts another one.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec

from engine.media.limits import PictureFault
from engine.media.picture import PictureModel
from engine.process.limited_child import limit_memory, read_message, write_message

TIME_LIMIT_S = 10.0
"""The most CPU seconds for one picture."""
MEMORY_LIMIT_BYTES = 3 * 2**29
"""The most memory beyond what the process takes before the first picture: the largest one that is decoded
takes 64 million pixels of four bytes, several times."""


class DecodeOrder(msgspec.Struct, array_like=True):
    """One picture to decode: the bytes of its file, and where its pixels go."""

    data: bytes
    model: PictureModel
    path: str


class Decoded(msgspec.Struct, array_like=True, omit_defaults=True):
    """The size of the pixels, or why there are none."""

    height: int = 0
    width: int = 0
    fault: str | None = None
    """What is wrong with the picture."""
    failure: str | None = None
    """What went wrong here, such as a full disk."""


def main() -> None:
    """Decodes what comes on standard input until it ends."""
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
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while (order := read_message(stdin)) is not None:
        # The default action of the signal ends the process, whatever the decoder is doing.
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
        decoded = answer(msgspec.msgpack.decode(order, type=DecodeOrder))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(stdout, decoded)
