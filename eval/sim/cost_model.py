"""The cost of a step: the interface between the simulated executor and the models of hardware."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class StepWork:
    """The work of one step, in the sums that its time depends on."""

    prefills: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (tokens computed now, tokens whose KV was there before), one per request that computes several
    tokens or a part of its prompt."""
    num_decodes: int = 0
    """Requests that compute one token after their prompt."""
    decode_context_tokens: int = 0
    """Sum over these requests of the tokens whose KV is read."""


class StepCost(Protocol):
    """Seconds of the parts of a run, on one replica."""

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def step_overhead_s(self) -> float:
        """Fixed seconds of every step: scheduling, launches, transfer to the API server."""

    @property
    def arrival_overhead_s(self) -> float:
        """Time from the client's sending to the scheduler's queue: HTTP, template, tokenizer."""

    @property
    def reply_overhead_s(self) -> float:
        """Time from a step's end until the client has its tokens."""

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step, including its overhead."""

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """Seconds to compute ``num_tokens`` after ``context_tokens`` in steps of the usual size, alone."""

    def copy_s(self, num_tokens: int) -> float:
        """Seconds to copy the KV of ``num_tokens`` between host and device."""

    def notes(self) -> list[str]:
        """What is measured and what is assumed, a sentence each, for the report."""
