"""The access log: a line of JSON for each request, with who asked, what it took, and never what was said.

It is one file for all API server processes: each line is one write to a file opened for appending. A file
that logrotate has moved is opened again.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.http.auth import OPEN_PATHS, OWNER_HEADER
from engine.frontend.request_output import RequestOutput
from engine.records.messages import RequestContext, TurnReceipt

logger = logging.getLogger(__name__)

MAX_PATH_CHARS = 256
UNSEEN = OPEN_PATHS | {"/favicon.ico"}
"""Paths of probes, scrapers and pages, which are not logged."""


class AccessRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line."""

    time: str
    """When the request came, in UTC."""
    method: str
    path: str
    status: int | None = None
    """None: the client left before an answer began."""
    duration_s: float = 0.0
    """Until the last byte of the answer, or the client's leaving."""
    request_id: str | None = None
    """The response's ``X-Request-Id``."""
    client: str | None = None
    """Address of the connection."""
    key: str | None = None
    """Name of the API key."""
    tenant: str | None = None
    job: str | None = None
    turn: int | None = None
    decisions: list[str] = []
    """Ids of its turns, under which the trace has the scheduler's decisions."""
    adapter: str | None = None
    prompt_tokens: int | None = None
    """None, as the next two, where nothing was generated."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    """Tokens of all answers; of one that was cut, those that had come."""

    def began(self, context: RequestContext, request_id: str, num_prompt_tokens: int) -> None:
        """Notes that a prompt of the request has begun."""
        self.decisions = [*self.decisions, request_id]
        self.prompt_tokens = (self.prompt_tokens or 0) + num_prompt_tokens
        self.output_tokens = self.output_tokens or 0
        if context.job is not None:
            self.tenant = context.job.tenant
            self.job = context.job.job_id
        if context.adapter is not None:
            self.adapter = context.adapter.name

    def came(self, output: RequestOutput) -> None:
        """Notes new tokens of a prompt's answers."""
        self.output_tokens = (self.output_tokens or 0) + sum(len(each.token_ids) for each in output.outputs)
        if output.finished and all(each.finish_reason != "error" for each in output.outputs):
            self.cached_tokens = (self.cached_tokens or 0) + output.num_cached_tokens

    def decided(self, receipt: TurnReceipt) -> None:
        """Notes the job that a turn was assigned to."""
        self.job = receipt.job_id
        self.turn = receipt.turn


_CURRENT: ContextVar[AccessRecord | None] = ContextVar("access_record", default=None)


def current_record() -> AccessRecord | None:
    """The line of the request that runs here; None if no lines are written."""
    return _CURRENT.get()


class _File(WatchedFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        raise  # noqa: PLE0704 - it is called where an exception is handled


class AccessLog:
    """The file."""

    def __init__(self, path: str) -> None:
        self._file = _File(path, encoding="utf-8")
        self._is_failing = False

    def write(self, record: AccessRecord) -> None:
        """Appends a line. A failure is reported once, and costs no request anything."""
        line = msgspec.json.encode(record).decode()
        try:
            self._file.emit(logging.makeLogRecord({"msg": "%s", "args": (line,)}))
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.error("The access log cannot be written: %s", error)
            self._is_failing = True


class AccessLogMiddleware:
    """Writes a line when a request has ended."""

    def __init__(self, app: ASGIApp, log: AccessLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNSEEN:
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        if OWNER_HEADER in headers:  # only authentication, which some refusals do not reach, may set it
            del headers[OWNER_HEADER]
        client = scope.get("client")
        record = AccessRecord(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            method=scope["method"],
            path=scope["path"][:MAX_PATH_CHARS],
            request_id=scope.get("state", {}).get("request_id"),
            client=None if client is None else client[0],
        )

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        begin = time.monotonic()
        token = _CURRENT.set(record)
        try:
            await self._app(scope, receive, send_noted)
        finally:
            _CURRENT.reset(token)
            record.key = Headers(scope=scope).get(OWNER_HEADER) or None
            record.duration_s = round(time.monotonic() - begin, 6)
            self._log.write(record)
