"""Writes the scheduler trace of a simulation: like a server's, in simulated time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from eval.errors import EvalError, UsageError
from eval.sim.replicas.make import COARSE
from eval.sim.sim_config import SimConfig
from tracing.tracer import Tracer
from tracing.writer import TraceWriter


@dataclass(frozen=True, slots=True)
class SimTrace:
    """An open trace, or none."""

    writer: TraceWriter | None

    @property
    def tracer(self) -> Tracer | None:
        """The tracer that a simulator emits to."""
        return None if self.writer is None else Tracer(self.writer)

    def close(self) -> None:
        """Waits until all is written."""
        if self.writer is not None:
            self.writer.close(timeout_s=None)

    def notes(self) -> list[str]:
        """Notes on what is wrong with a closed trace."""
        if self.writer is None or not self.writer.dropped:
            return []
        return [f"the trace is NOT WHOLE: {self.writer.dropped:,} events could not be written"]


def open_trace(path: Path | None, config: SimConfig) -> SimTrace:
    """Opens a trace at ``path``, which the simulator begins; none without a path. EvalError if it cannot be
    written."""
    if path is None:
        return SimTrace(None)
    if config.replica_model == COARSE:
        raise UsageError("--trace records a scheduler's decisions: leave out --replica-model coarse.")
    if config.num_replicas > 1:
        raise UsageError("--trace records a single engine: leave --replicas at 1.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # No client waits for a simulated step, so no event needs to be dropped.
        writer = TraceWriter.open(str(path), capacity=sys.maxsize)
    except OSError as error:
        raise EvalError(f"Cannot write the trace {path}: {error.strerror}.") from error
    return SimTrace(writer)
