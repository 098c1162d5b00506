"""Futures of work that is done once per key; the most recent ones are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from hashlib import sha256
from typing import Generic, NoReturn, TypeVar

import msgspec

from engine.errors import EngineDeadError, RequestError
from engine.process.fair_threads import FairThreads

T = TypeVar("T")


class FutureCache(Generic[T]):
    """Thread safe. An invalid request is cached as well; another failure is not, since it may be temporary.

    Owners take turns. Work in progress is never forgotten.
    """

    def __init__(self, size: int, num_threads: int, name: str) -> None:
        """``name`` is the prefix of the threads' names."""
        self._size = size
        self._lock = threading.Lock()
        self._futures: OrderedDict[bytes, Future[T]] = OrderedDict()
        self._threads = FairThreads(num_threads, name)

    def get(self, asked: msgspec.Struct, make: Callable[[], T], owner: str = "") -> Future[T]:
        """Returns the result of ``make``, or of an earlier call with the same key; ``make`` runs on another
        thread.

        The future is shared and cannot be cancelled.
        """
        # The order of a dict's keys matters: a schema's is the order of the output.
        key = sha256(msgspec.msgpack.encode(asked)).digest()
        with self._lock:
            known = self._futures.get(key)
            if known is not None:
                self._futures.move_to_end(key)
                return known
            future = self._futures[key] = uncancellable()
            if len(self._futures) > self._size:
                self._forget_oldest()
        future.add_done_callback(lambda done: self._forget_failed(key, done))
        if self._threads.submit(owner, lambda: resolve(future, make)).cancelled():
            resolve(future, _shut_down)
        return future

    def _forget_oldest(self) -> None:
        for key, future in self._futures.items():
            if future.done():
                del self._futures[key]
                return

    def _forget_failed(self, key: bytes, done: Future[T]) -> None:
        """Forgets a failure, so that the next caller tries again, unless the request is invalid."""
        error = done.exception()
        if error is None or isinstance(error, RequestError):
            return
        with self._lock:
            if self._futures.get(key) is done:
                del self._futures[key]

    def close(self) -> None:
        """Ends the threads. Pending futures fail; work in progress is discarded."""
        self._threads.close()
        with self._lock:
            waiting = [future for future in self._futures.values() if not future.done()]
        for future in waiting:
            resolve(future, _shut_down)


def _shut_down() -> NoReturn:
    raise EngineDeadError("The engine was shut down.")


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
