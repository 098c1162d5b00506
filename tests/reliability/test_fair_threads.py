"""Promises of threads that several owners share."""

from __future__ import annotations

import threading

from engine.process.fair_threads import FairThreads


def test_owners_take_turns() -> None:
    """A dozen jobs of one owner hold up another's one job by one of them."""
    threads, order, done, begin = FairThreads(1, "fair"), list[str](), threading.Event(), threading.Event()
    threads.submit("first", begin.wait)
    for _ in range(12):
        threads.submit("first", lambda: order.append("first"))
    threads.submit("second", lambda: order.append("second"))
    threads.submit("second", done.set)
    begin.set()
    assert done.wait(10)
    assert order.index("second") <= 1
    threads.close()


def test_no_owner_has_all_threads() -> None:
    threads, blocked, done = FairThreads(3, "fair", most_per_owner=2), threading.Event(), threading.Event()
    for _ in range(5):
        threads.submit("slow", blocked.wait)
    threads.submit("other", done.set)
    assert done.wait(10)
    blocked.set()
    threads.close()


def test_what_nobody_wants_any_more_is_not_done() -> None:
    threads, ran, done = FairThreads(1, "fair"), list[int](), threading.Event()
    threads.submit("", lambda: ran.append(1), lambda: False)
    threads.submit("", lambda: 1 / 0)  # which costs nobody else anything
    threads.submit("", done.set)
    assert done.wait(10)
    assert not ran
    threads.close()
