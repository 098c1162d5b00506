"""Promises of threads that several owners share."""

from __future__ import annotations

import threading

import pytest

from engine.process.fair_threads import FairThreads


def test_owners_take_turns() -> None:
    """Of a dozen earlier jobs of one owner, only one delays another owner's job."""
    threads = FairThreads(1, "fair")
    order: list[str] = []
    begin = threading.Event()
    threads.submit("first", begin.wait)
    for _ in range(12):
        threads.submit("first", lambda: order.append("first"))
    threads.submit("second", lambda: order.append("second"))
    last = threads.submit("second", lambda: None)
    begin.set()
    last.result(10)
    assert order.index("second") <= 1
    threads.close()


def test_no_owner_has_all_threads() -> None:
    threads = FairThreads(3, "fair", most_per_owner=2)
    blocked = threading.Event()
    for _ in range(5):
        threads.submit("slow", blocked.wait)
    threads.submit("other", lambda: None).result(10)
    blocked.set()
    threads.close()


def test_jobs_that_come_together_do_not_wait_for_one_idle_thread() -> None:
    """Each job gets its own thread while there are threads left."""
    threads = FairThreads(2, "fair")
    threads.submit("", lambda: None).result(10)  # its thread is idle now
    blocked = threading.Event()
    slow = threads.submit("first", blocked.wait)
    threads.submit("second", lambda: None).result(10)
    assert not slow.done()
    blocked.set()
    threads.close(wait=True)


def test_what_nobody_wants_any_more_is_not_done() -> None:
    """Cancelled jobs do not run, nor do those that wait at ``close`` or come later; failures stay alone."""
    threads = FairThreads(1, "fair")
    ran: list[int] = []
    begin = threading.Event()
    threads.submit("", begin.wait)
    threads.submit("", lambda: ran.append(1)).cancel()
    fails = threads.submit("", lambda: 1 / 0)
    begin.set()
    with pytest.raises(ZeroDivisionError):
        fails.result(10)
    end = threading.Event()
    running = threads.submit("", end.wait)
    waiting = threads.submit("", lambda: ran.append(2))
    while not running.running():
        pass
    threads.close()
    assert waiting.cancelled()
    assert threads.submit("", lambda: ran.append(3)).cancelled()
    end.set()
    threads.close(wait=True)
    assert running.done()
    assert not ran
