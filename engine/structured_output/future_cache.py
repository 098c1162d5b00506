"""Futures of work that is done once per key, with the most recent ones kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from typing import Generic, TypeVar

import msgspec

from engine.errors import EngineDeadError

T = TypeVar("T")


class FutureCache(Generic[T]):
    """Thread safe. Failures are cached as well."""

    def __init__(self, size: int, num_threads: int, name: str) -> None:
        """``name`` is the prefix of its threads' names."""
        self._size = size
        self._lock = threading.Lock()
        self._futures: OrderedDict[bytes, Future[T]] = OrderedDict()
        self._threads = ThreadPoolExecutor(num_threads, name)

    def get(self, asked: msgspec.Struct, make: Callable[[], T]) -> Future[T]:
        """The result of ``make``, or of an earlier call with the same key; it runs on another thread.

        The future is shared and cannot be cancelled.
        """
        # The order of a dict's keys counts: a schema's is the order of the output.
        key = sha256(msgspec.msgpack.encode(asked)).digest()
        with self._lock:
            known = self._futures.get(key)
            if known is not None:
                self._futures.move_to_end(key)
                return known
            future = self._futures[key] = uncancellable()
            if len(self._futures) > self._size:
                self._futures.popitem(last=False)
        self._threads.submit(resolve, future, make)
        return future

    def close(self) -> None:
        """Let the threads end. Pending futures fail; the work in progress is discarded."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [future for future in self._futures.values() if not future.done()]
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(EngineDeadError("The engine was shut down."))


def uncancellable() -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve(future: Future[T], make: Callable[[], T]) -> None:
    with suppress(InvalidStateError):  # closed meanwhile
        try:
            made = make()
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # a panic of a native library, while a caller waits
            future.set_exception(RuntimeError(repr(error)))
        else:
            future.set_result(made)
