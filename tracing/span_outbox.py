"""Sends ended spans to a collector in batches, on a separate thread. Spans that do not fit or cannot be sent
are counted and dropped.

OpenTelemetry's own batch processor drops spans, too, but reports it only in a log, and may take half a minute
to stop.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxLimits:
    """Limits of the queue and of batches."""

    capacity: int = 8192
    """Maximum number of spans in the queue."""
    batch: int = 512
    """Maximum number of spans in a batch."""
    delay_s: float = 5.0
    """Maximum wait of a span before a batch that is not full is sent."""

    @classmethod
    def from_environment(cls) -> OutboxLimits:
        """Reads OpenTelemetry's variables; a value that is not a positive number is ignored."""
        capacity = _positive("OTEL_BSP_MAX_QUEUE_SIZE", cls().capacity)
        return cls(
            capacity=capacity,
            batch=min(capacity, _positive("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", cls().batch)),
            delay_s=_positive("OTEL_BSP_SCHEDULE_DELAY", round(cls().delay_s * 1000)) / 1000,
        )


def _positive(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else default


class SpanOutbox(SpanProcessor):
    """A queue between the thread that ends spans and the thread that sends them."""

    def __init__(self, exporter: SpanExporter, limits: OutboxLimits) -> None:
        self._exporter = exporter
        self._limits = limits
        self._pending: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._closing = self._closed = False
        # Each thread has its own counter, so that neither needs a lock.
        self._num_refused = 0
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="telemetry-outbox", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of dropped spans: the queue was full, or the collector did not accept them."""
        return self._num_refused + self._num_lost

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span; never waits."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if len(self._pending) >= self._limits.capacity or self._closing:
            self._num_refused += 1
            return
        self._pending.append(span)
        if len(self._pending) >= self._limits.batch:
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Sends pending spans for at most ``timeout_s``; counts and drops the rest."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        self._closed = True
        self._exporter.shutdown()  # ends a retry that waits
        self._num_refused += len(self._pending)
        self._pending.clear()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(self._limits.delay_s)
            # Both before reading the queue: a span added later sets the first again, and none is added once
            # the second is set.
            self._wake.clear()
            is_last = self._closing
            while self._pending and not self._closed:
                self._send(self._take())

    def _take(self) -> list[ReadableSpan]:
        batch: list[ReadableSpan] = []
        with suppress(IndexError):
            while len(batch) < self._limits.batch:
                batch.append(self._pending.popleft())
        return batch

    def _send(self, batch: list[ReadableSpan]) -> None:
        """Sends a batch; returns when the collector has it, or when the exporter gave up."""
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # any error: only telemetry is lost
            sent = False
        if not sent:
            self._num_lost += len(batch)
