"""Telemetry data of a request that has ended in the core. Times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """One record for every request, also under policies without jobs."""

    request_id: str
    """Id of the request in the trace."""
    external_id: str
    """Id by which the client knows it."""
    traceparent: str | None
    """The client's span, in W3C's form, as it was sent."""
    parent_job: str | None = None
    """The job that waits for this one; None unless it is a sub-agent's."""
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    ended_s: float
    finish_reason: str
    error: str | None
    """The error message, if it ended with an error."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_loaded_tokens: int
    """Number of the cached tokens that were loaded from the host tier."""
    num_preemptions: int
    is_chat: bool
    """Whether its prompt was a conversation."""
    max_tokens: int
    temperature: float
    top_p: float
