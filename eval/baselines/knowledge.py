"""What a policy may know beyond what an engine sees: profiled costs and, for an oracle, the future."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.core.policy import PolicyContext, SchedulingPolicy


class Knowledge(Protocol):
    """Provided by the simulator. Costs are those of an offline profile; the rest is unknown in reality."""

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """Seconds to compute the KV of ``num_tokens`` after ``context_tokens``, alone on the device."""

    def reload_s(self, num_tokens: int) -> float | None:
        """Seconds to load ``num_tokens`` of KV back from host memory; None without a host tier."""

    def gap_s(self, request_id: str) -> float | None:
        """Returns the seconds from this turn's end to the job's next turn; None if it was the last."""

    def remaining_s(self, request_id: str) -> float:
        """Seconds of the job's model work from this turn on, alone on the device with its prefix kept."""


MakePolicy = Callable[[PolicyContext, Knowledge], SchedulingPolicy]


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy as a command line names it."""

    name: str
    """Name as given, with its parameters: ``fixed-ttl:10``."""
    make: MakePolicy
