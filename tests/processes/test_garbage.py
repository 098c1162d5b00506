"""A process frees what its work has touched at its first idle time, and not before it has worked."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.process.trim import POLL_S, await_idle_after


class Worked:
    """A process that uses the given CPU time between two looks."""

    def __init__(self, used_s: Iterable[float]) -> None:
        self._used_s = iter(used_s)
        self.cpu_s = 100.0
        self.looks = 0

    def sleep(self, seconds: float) -> None:
        assert seconds == POLL_S
        self.cpu_s += next(self._used_s)
        self.looks += 1


@pytest.mark.parametrize(
    ("used_s", "looks"),
    [
        ([1.9, 0.001], 2),
        ([0.003] * 20, 17),
        ([0.001, 0.001, 0.2, 1.0, 0.5, 0.0], 6),
        ([0.03, 0.01, 0.03, 0.01], 4),
    ],
    ids=["a burst", "clocks alone", "a long work", "short works"],
)
def test_it_lets_go_at_the_first_rest_after_its_work(used_s: list[float], looks: int) -> None:
    """Idle time before the work, short pauses and the end of the work are distinguished."""
    process = Worked(used_s)
    await_idle_after(0.05, lambda: process.cpu_s, process.sleep)
    assert process.looks == looks


def test_it_waits_as_long_as_there_is_work() -> None:
    """A server that is never idle frees nothing."""
    process = Worked([1.5] * 100)
    with pytest.raises(StopIteration):
        await_idle_after(0.05, lambda: process.cpu_s, process.sleep)
    assert process.looks == 100
