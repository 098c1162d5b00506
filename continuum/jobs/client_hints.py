"""What a client has reported about the tool calls that run after a turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.records.messages import ToolSignal, ToolState
from estimator.expectation import Expectation


@dataclass(slots=True)
class ClientHint:
    """The hints about one tip."""

    state: ToolState = ToolState.STARTED
    expectation: Expectation | None = None
    """The latest stated remaining time."""
    finished_s: float | None = None
    """When all calls had ended, in seconds after the end of the turn."""
    calls_over: set[str] = field(default_factory=set)
    """Ids of parallel calls that have ended, whether finished or canceled."""
    calls_finished: set[str] = field(default_factory=set)

    def take(self, signal: ToolSignal, elapsed_s: float, num_calls: int) -> None:
        """Applies one more signal, ``elapsed_s`` after the turn's end.

        The end of one of several calls does not say when the turn comes. The end of the last one does; it
        counts as finished if any of the calls has finished.
        """
        if signal.state in (ToolState.FINISHED, ToolState.CANCELLED):
            self._end(signal, elapsed_s, num_calls)
            return
        self.state = signal.state
        self.finished_s = None
        remaining_s = remaining_of(signal, elapsed_s)
        if remaining_s is not None:
            self.expectation = Expectation(elapsed_s, remaining_s)

    def _end(self, signal: ToolSignal, elapsed_s: float, num_calls: int) -> None:
        state = signal.state
        if signal.call_id is not None and num_calls > 1:
            self.calls_over.add(signal.call_id)
            if state is ToolState.FINISHED:
                self.calls_finished.add(signal.call_id)
            if len(self.calls_over) < num_calls:
                return
            state = ToolState.FINISHED if self.calls_finished else ToolState.CANCELLED
        self.state = state
        self.finished_s = elapsed_s if state is ToolState.FINISHED else None


def remaining_of(signal: ToolSignal, elapsed_s: float) -> float | None:
    """The remaining seconds that a signal states; None if it states none."""
    if signal.remaining_s is not None:
        return signal.remaining_s
    if signal.expected_s is not None:
        return signal.expected_s
    if signal.fraction:
        return elapsed_s * (1 - signal.fraction) / signal.fraction
    return None
