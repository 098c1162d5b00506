"""Converts the trace of a running core to OpenTelemetry spans and sends them to a collector over OTLP/HTTP.

It receives events like any sink of a trace. One thread makes spans of them, another sends these. A collector
that is slow or down loses spans, which are counted, but never delays the core.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tracing.ended_request import EndedRequest
from tracing.events import JobEvent, PinEvent, TraceEvent
from tracing.job_spans import JobSpans
from tracing.span_outbox import OutboxLimits, SpanOutbox

logger = logging.getLogger(__name__)

CAPACITY = 65536
"""Maximum number of events that wait to become spans."""
SERVICE = "continuum"
"""Service name, unless OTEL_SERVICE_NAME is set."""
TRACES_PATH = "/v1/traces"

_Item = JobEvent | PinEvent | EndedRequest | float
"""The last item is the time at which the trace ends."""


class Telemetry:
    """Makes and sends spans for one core; ``close`` ends those that are open."""

    def __init__(
        self, exporter: SpanExporter, *, model_name: str, epoch_ns: int, limits: OutboxLimits | None = None
    ) -> None:
        """``epoch_ns``: the wall clock's time when the events' clock was at 0."""
        self._outbox = SpanOutbox(exporter, limits or OutboxLimits.from_environment())
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        provider.add_span_processor(self._outbox)
        self._spans = JobSpans(provider.get_tracer(SERVICE), model_name=model_name, epoch_ns=epoch_ns)
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        # Each thread has its own counter, so that neither needs a lock.
        self._num_refused = 0
        self._num_lost = 0
        self._num_told = 0
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, endpoint: str, *, model_name: str, epoch_ns: int) -> Self:
        """Opens telemetry that sends spans to this URL; to its ``/v1/traces`` if it has no path."""
        return cls(_QuietExporter(traces_url(endpoint)), model_name=model_name, epoch_ns=epoch_ns)

    def emit(self, event: TraceEvent) -> None:
        """Queues an event of a job or pin and ignores others; never waits, never raises."""
        if isinstance(event, JobEvent | PinEvent):
            self._put(event)

    def request_ended(self, request: EndedRequest) -> None:
        """Queues any request that has left the engine, with or without a job; never waits, never raises."""
        self._put(request)

    def take_dropped(self) -> int:
        """Number of spans and events dropped since the last call."""
        dropped = self._num_refused + self._num_lost + self._outbox.dropped
        newly = dropped - self._num_told
        self._num_told = dropped
        return newly

    def close(self, now_s: float, timeout_s: float) -> None:
        """Ends the open spans and sends them, for at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        self._items.put(now_s)
        self._thread.join(timeout_s)
        self._outbox.close(max(0.0, deadline - time.monotonic()))

    def _put(self, item: _Item) -> None:
        if self._items.qsize() >= CAPACITY:
            self._num_refused += 1
        else:
            self._items.put(item)

    def _run(self) -> None:
        while not isinstance(item := self._items.get(), float):
            try:
                self._spans.take(item)
            except Exception:  # one bad event must not end the telemetry
                self._num_lost += 1
                logger.exception("An event could not be converted to a span.")
        self._spans.close(item)


class _QuietExporter(OTLPSpanExporter):
    """Logs an error once, and again only after the collector has accepted something."""

    def __init__(self, url: str) -> None:
        super().__init__(endpoint=url)
        self._has_complained = False
        exporter_log = logging.getLogger(OTLPSpanExporter.__module__)
        exporter_log.setLevel(logging.ERROR)  # lower levels log retries
        exporter_log.addFilter(self._is_news)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self._has_complained = False
        return result

    def _is_news(self, record: logging.LogRecord) -> bool:
        is_news = not self._has_complained
        self._has_complained = True
        return is_news


def traces_url(endpoint: str) -> str:
    """The URL for spans, from a full URL, as V1's flag takes it, or a collector's address."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


def _resource() -> Resource:
    """The resource from OpenTelemetry's variables, else with our service name."""
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: SERVICE}))
    return resource
