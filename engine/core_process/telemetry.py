"""Connects a core to OpenTelemetry, if configured; only then are its libraries imported.

``tracing.telemetry`` sends the spans.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from engine.config.engine_config import TelemetryConfig
from engine.core.request import Request
from engine.core_process.core_part import CorePart
from engine.errors import ConfigError
from engine.records.reported_stats import SchedulerStats
from tracing.ended_request import EndedRequest

if TYPE_CHECKING:
    from tracing.telemetry import Telemetry

CLOSE_TIMEOUT_S = 2.0
"""How long the last spans may take to reach their collector when the engine stops."""
PROTOCOL = "http/protobuf"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""The first variable that is set counts."""


def open_telemetry(config: TelemetryConfig, now: float) -> Telemetry | None:
    """Open the exporter; None if no endpoint is configured. ConfigError if spans cannot be sent. ``now`` is
    the time on the clock of the trace's events."""
    if config.otlp_traces_endpoint is None:
        return None
    _check_protocol()
    try:
        from tracing.telemetry import Telemetry
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'continuum-engine[otel]'."
        ) from error
    return Telemetry.open(
        config.otlp_traces_endpoint,
        model_name=config.model_name,
        epoch_ns=time.time_ns() - round(now * 1e9),
    )


def _check_protocol() -> None:
    for variable in PROTOCOL_VARIABLES:
        wanted = os.environ.get(variable)
        if wanted is not None:
            if wanted != PROTOCOL:
                raise ConfigError(f"{variable} is {wanted!r}, but spans are sent as {PROTOCOL} only.")
            return


class RequestSpans(CorePart):
    """Sends a span for each request that ends."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def request_ended(self, request: Request, now: float) -> None:
        self._telemetry.request_ended(_ended(request, now))

    def fill_stats(self, stats: SchedulerStats) -> None:
        stats.telemetry_dropped = self._telemetry.take_dropped()

    def persist(self, now: float) -> None:
        self._telemetry.close(now, CLOSE_TIMEOUT_S)


def _ended(request: Request, now: float) -> EndedRequest:
    job = request.job
    reason = request.status.finish_reason
    assert reason is not None, "it has ended"
    failed = str(reason) == "error"
    return EndedRequest(
        request_id=request.request_id,
        external_id=request.external_id,
        traceparent=job.traceparent if job is not None else None,
        parent_job=job.parent_id if job is not None else None,
        arrival_s=request.arrival_time,
        first_scheduled_s=request.first_scheduled_time,
        first_token_s=request.first_token_time,
        ended_s=now,
        finish_reason=str(reason),
        error=str(request.stop_reason) if failed else None,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_loaded_tokens=request.num_external_computed_tokens,
        num_preemptions=request.num_preemptions,
        is_chat=job is not None and job.num_replies is not None,
        max_tokens=request.max_tokens,
        temperature=request.sampling_params.temperature,
        top_p=request.sampling_params.top_p,
    )
