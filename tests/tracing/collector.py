"""An OpenTelemetry collector for tests: receives OTLP over HTTP, decodes it with the official messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A received span; times in seconds of the wall clock."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    began_s: float
    ended_s: float
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    """Attributes by event name; of several events with one name the last."""
    links: list[str]
    """Ids of the linked spans."""
    status: str
    service: str

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


class Collector:
    """Listens on a free port of this machine while the ``with`` block runs."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.paths: set[str] = set()
        self._arrived = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(self.path, _decode(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[ReceivedSpan]:
        """Spans of this name in the order of their begins."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.began_s)

    def wait_until(self, condition: Callable[[Self], bool], timeout_s: float = 60.0) -> bool:
        """Whether the condition becomes true in time; it is checked whenever spans arrive."""
        with self._arrived:
            return self._arrived.wait_for(lambda: condition(self), timeout_s)

    def _take(self, path: str, spans: list[ReceivedSpan]) -> None:
        with self._arrived:
            self.paths.add(path)
            self.spans += spans
            self._arrived.notify_all()


def _decode(body: bytes) -> list[ReceivedSpan]:
    message = ExportTraceServiceRequest.FromString(body)
    return [
        _received(span, str(_values(resource.resource.attributes)["service.name"]))
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _received(span: trace_pb2.Span, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_s=span.start_time_unix_nano / 1e9,
        ended_s=span.end_time_unix_nano / 1e9,
        attributes=_values(span.attributes),
        events={event.name: _values(event.attributes) for event in span.events},
        links=[link.span_id.hex() for link in span.links],
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        service=service,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)
