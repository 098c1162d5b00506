"""Promises of ports for servers: an announced length reserves no memory, and slow senders are dropped."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from engine.process.frames import frame_length, receive_exactly


def test_memory_grows_with_what_has_come() -> None:
    """A gibibyte that is announced but never sent costs nothing."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"x" * 1000)
        there.close()
        with pytest.raises(ConnectionError):
            receive_exactly(here, 2**30, None)


def test_a_byte_now_and_then_does_not_hold_a_place() -> None:
    """The deadline applies to the whole message, not to each piece."""
    here, there = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.01):
            there.sendall(b"x")

    with here, there:
        here.settimeout(5.0)
        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError):
            receive_exactly(here, 2**20, time.monotonic() + 0.2)
        assert here.gettimeout() == 5.0
        stop.set()
        thread.join()


def test_a_length_above_the_limit_is_refused() -> None:
    assert frame_length(b"\0\0\1\0", 4096) == 256
    with pytest.raises(ConnectionError, match="above the 4096"):
        frame_length(b"\4\0\0\0", 4096)
