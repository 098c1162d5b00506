"""The application of a route: passes each request to one server, and streams its answer back."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from continuum.routing.home_table import HomeTable, key_of
from engine.api.http.connection import while_connected
from engine.clock import MonotonicClock
from engine.core_group.shared_words import shared_words
from engine.routing import EngineLoad, LeastLoadedRouter, RoutedTurn, Router, RouterContext, RouterFactory
from eval.route.fleet import Fleet
from eval.route.operators import CHANGE_ONE_SERVER, cheapest_to_end, engines_of
from eval.route.told import turn_of

Page = TypeVar("Page")
INLINE_BYTES = 2**20
"""Larger bodies are parsed on a thread."""
PAGE_WITHIN_S = 5.0
KNOWN_WITHIN_S = 2.0
"""How long a turn waits for servers that are asked whether they know its job."""
FOUND_WITHIN_S = 60.0
"""How long a server may be silent when it is queried for jobs or stored objects."""
_GONE = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.ReadError,
    httpx.WriteError,
    httpx.RemoteProtocolError,
)
"""Exceptions that show that a server is gone, not that a request is wrong."""
BLOCK_SIZE = 16
REFUSED = 503
_WITHOUT_BODY = (204, 304)
_METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH"]
_OF_A_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"host", b"content-length", b"date"),
    )
)
"""Headers that are not passed on."""
_ASSISTANT = b'assistant"'
"""In the body of a turn that is not a job's first."""
_OF_A_KEY = (b"authorization", b"x-api-key")
_STORED = re.compile(r"/v1/(?:responses|conversations|jobs)/([^/]+)")
_ANSWERS_ID = re.compile(rb'"id"\s*:\s*"((?:resp|conv)_[\w-]+)"')
_FIRST_BYTES = 4096
_LOST = {"type": "api_error", "message": "The server that gave this answer has died; send the request again."}
_LOST_EVENT = b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": _LOST}) + b"\n\n"
"""The end of a stream whose server has died, in a form that OpenAI's and Anthropic's clients understand."""


class _Jobs(msgspec.Struct):
    """A server's list of jobs."""

    data: list[dict[str, Any]] = []


_jobs = msgspec.json.Decoder(_Jobs)


class RouteApp:
    """The application; one per process."""

    def __init__(
        self,
        urls: Sequence[str],
        make_router: RouterFactory,
        *,
        server_key: str | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        """``server_key``: sent to the servers in place of the clients' keys. ``verify``: how the servers'
        certificates are checked."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=limits, trust_env=False, verify=verify
        )
        self._server_key = None if server_key is None else b"Bearer " + server_key.encode()
        self._http.headers.clear()  # send only the client's headers to servers
        self.fleet = Fleet(urls, self._http)
        self._router: Router = make_router(RouterContext(len(urls), BLOCK_SIZE, shared_words()))
        self._keeps_homes = not isinstance(self._router, LeastLoadedRouter)
        self._stored = HomeTable(shared_words())
        """The server of each stored response and conversation, by its id."""
        self._clock = MonotonicClock()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/jobs", self._jobs),
                Route("/engines", self._engines),
                Route("/{path:path}", self._pass, methods=_METHODS),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        lost: asyncio.Queue[int] = asyncio.Queue()
        tasks = [asyncio.create_task(self.fleet.watch(lost)), asyncio.create_task(self._forget(lost))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await self._http.aclose()

    async def _forget(self, lost: asyncio.Queue[int]) -> None:
        while True:
            self._lose(await lost.get())

    def _lose(self, index: int) -> None:
        self._router.lost(index)
        self._stored.forget(index)

    async def _health(self, request: Request) -> Response:
        """Answers 200 while any server is up."""
        states = {backend.url: "up" if backend.is_up else "down" for backend in self.fleet.backends}
        return JSONResponse({"servers": states}, 200 if "up" in states.values() else 503)

    async def _jobs(self, request: Request) -> Response:
        """Returns the jobs of all servers."""
        pages = await self._ask_all(request, _jobs.decode)
        if isinstance(pages, Response):
            return pages
        jobs = [job for page in pages.values() for job in page.data]
        known = [job for job in jobs if isinstance(job.get("idle_s"), int | float)]
        return JSONResponse({"object": "list", "data": sorted(known, key=lambda job: job["idle_s"])})

    async def _engines(self, request: Request) -> Response:
        """Returns the engine cores of all servers, and the server that costs least to end."""
        servers = await self._ask_all(request, engines_of)
        if isinstance(servers, Response):
            return servers
        data = [{"url": url, **engine} for url, engines in servers.items() for engine in engines]
        return JSONResponse({"object": "list", "data": data, "cheapest_to_end": cheapest_to_end(servers)})

    async def _ask_all(self, request: Request, read: Callable[[bytes], Page]) -> dict[str, Page] | Response:
        """What each server that is up and has such a page answers, by its address; or the answer of the
        first that does not accept the client's key."""
        pages = dict[str, Page]()
        for index in self._up():
            with suppress(httpx.HTTPError, msgspec.DecodeError, RecursionError, TimeoutError):
                async with asyncio.timeout(PAGE_WITHIN_S):
                    answer = await self._send(index, request, b"")
                    if answer.status_code in (401, 403):
                        return self._passed_on(answer, index)
                    text = await answer.aread()
                if answer.status_code == 200:
                    pages[self.fleet.backends[index].url] = read(text)
        return pages

    async def _pass(self, request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        return await while_connected(request, self._answer(request, body))

    async def _answer(self, request: Request, body: bytes) -> Response:
        if request.method == "POST" and request.url.path in CHANGE_ONE_SERVER:
            return _error(400, f"{request.url.path} changes one server: send it to that server itself.")
        named = _STORED.match(request.url.path)
        try:
            if named is not None:
                return await self._ask_around(request, body, named[1])
            if request.method != "POST":
                return await self._ask_around(request, body, None)
            return await self._route(request, body)
        except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeError) as error:
            return _error(400, f"The request cannot be passed on: {error}.")
        except httpx.HTTPError as error:
            return _error(502, f"The server of this request failed: {type(error).__name__}.")

    async def _route(self, request: Request, body: bytes) -> Response:
        """Sends the request to the server that the router chooses, or to another if that does not answer or
        does not take it: it is stopping, or at its limit."""
        is_long = len(body) > INLINE_BYTES
        headers = request.headers
        turn = await asyncio.to_thread(turn_of, headers, body) if is_long else turn_of(headers, body)
        await self._find_home(request, turn, body)
        failed = list[int]()
        while (index := self._next(turn, failed)) is not None:
            load = self.fleet.backends[index].load
            load.num_open += 1
            is_taken = False
            try:
                answer = await self._send(index, request, body)
                is_taken = True
            except _GONE:  # nothing has been answered
                failed.append(index)
                if self.fleet.lost(index):
                    self._lose(index)
                continue
            finally:
                load.num_open -= 0 if is_taken else 1
            if answer.status_code == REFUSED and len(failed) + 1 < len(self.fleet.backends):
                load.num_open -= 1
                failed.append(index)
                await answer.aclose()
                continue
            return self._passed_on(answer, index, counted=True)
        return _error(503, "None of the servers answers; try again later.")

    def _next(self, turn: RoutedTurn, failed: Sequence[int]) -> int | None:
        """The server to ask, after those that failed: one that is up by the last poll, else one that may be
        back since; None if there is none."""
        loads = self.fleet.loads(failed)
        if all(load is None for load in loads):
            return next((index for index in range(len(loads)) if index not in failed), None)
        if turn.job_id is not None and _kind_of(turn.job_id) != "jobs":
            home = self._stored[key_of(turn.job_id)]
            if home is not None and loads[home] is not None:
                return home
        return self._router.place(turn, loads, self._clock.now())

    async def _find_home(self, request: Request, turn: RoutedTurn, body: bytes) -> None:
        """Learns which server has a job that goes on and is new to this route: another route has placed its
        turns, or this one was started again."""
        if turn.job_id is None:
            return
        kind = _kind_of(turn.job_id)
        is_known = self._stored[key_of(turn.job_id)] if kind != "jobs" else self._router.home(turn)
        if is_known is not None or (kind == "jobs" and not (self._keeps_homes and _ASSISTANT in body)):
            return
        up = self._up()
        path = f"/v1/{kind}/{quote(turn.job_id, safe='')}"
        found = await asyncio.gather(*(self._has(index, path, request.headers.raw) for index in up))
        homes = [index for index, has_it in zip(up, found, strict=True) if has_it]
        if homes and kind != "jobs":
            self._stored[key_of(turn.job_id)] = homes[0]
        elif homes:
            loads = self.fleet.loads([index for index in up if index != homes[0]])
            self._router.place(turn, loads, self._clock.now())

    async def _has(self, index: int, path: str, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether a server has this job or object of this client; False if it does not answer soon."""
        url = self.fleet.backends[index].url + path
        keys = self._with_key([(name, value) for name, value in headers if name.lower() in _OF_A_KEY])
        with suppress(httpx.HTTPError, httpx.InvalidURL):
            answer = await self._http.get(url, headers=keys, timeout=KNOWN_WITHIN_S)
            return answer.status_code == 200
        return False

    async def _ask_around(self, request: Request, body: bytes, name: str | None) -> Response:
        """Answers from one server: the one that stores the named object, else the first that knows it."""
        home = None if name is None else self._stored[key_of(name)]
        order = sorted(self._up(), key=lambda index: index != home)
        for place, index in enumerate(order):
            try:
                answer = await self._send(index, request, body, within_s=FOUND_WITHIN_S)
            except (*_GONE, httpx.ReadTimeout):
                continue
            if answer.status_code != 404 or place == len(order) - 1:
                return self._passed_on(answer, index)
            await answer.aclose()
        return _error(503, "None of the servers answers; try again later.")

    def _up(self) -> list[int]:
        return [index for index, backend in enumerate(self.fleet.backends) if backend.is_up]

    async def _send(
        self, index: int, request: Request, body: bytes, within_s: float | None = None
    ) -> httpx.Response:
        """Returns the beginning of a server's answer. ``within_s``: how long the server may be silent."""
        base = httpx.URL(self.fleet.backends[index].url)
        query = request.scope.get("query_string", b"")
        path = request.scope.get("raw_path") or quote(request.url.path).encode()
        target = base.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")
        headers = self._with_key(_passed(request.headers.raw))
        timeout = httpx.Timeout(within_s, connect=5.0)
        sent = self._http.build_request(
            request.method, base.copy_with(raw_path=target), headers=headers, content=body, timeout=timeout
        )
        return await self._http.send(sent, stream=True)

    def _with_key(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The headers with the key for the servers, if the clients' keys are not for them."""
        if self._server_key is None:
            return headers
        kept = [(name, value) for name, value in headers if name.lower() not in _OF_A_KEY]
        return [*kept, (b"authorization", self._server_key)]

    def _passed_on(self, answer: httpx.Response, index: int, *, counted: bool = False) -> Response:
        load = self.fleet.backends[index].load if counted else None
        return PassedOn(answer, load, partial(self._note_ids, index))

    def _note_ids(self, index: int, text: bytes) -> None:
        """Notes which server stores the response whose id the answer begins with."""
        for found in _ANSWERS_ID.finditer(text):
            self._stored[key_of(found[1].decode())] = index


class PassedOn(StreamingResponse):
    """Streams a server's answer. However that ends, even before it has begun, closes the server's stream."""

    def __init__(
        self, answer: httpx.Response, load: EngineLoad | None, note: Callable[[bytes], None]
    ) -> None:
        """``load`` counts the request as open. ``note`` is called with the answer's beginning."""
        self._answer = answer
        self._load = load
        self._note = note
        super().__init__(self._chunks(), answer.status_code)
        length = [(name, value) for name, value in answer.headers.raw if name.lower() == b"content-length"]
        self.raw_headers = [*((name.lower(), value) for name, value in _passed(answer.headers.raw)), *length]
        self._num_bytes = int(length[0][1]) if length else None
        """Bytes of the body; None for one without Content-Length."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD" or self.status_code in _WITHOUT_BODY:
            self._num_bytes = 0
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._load is not None:
                self._load.num_open -= 1
            await self._answer.aclose()

    async def stream_response(self, send: Send) -> None:
        """Ends the answer with the last byte of a known length: a client that has it may send a request on
        the same connection at once, which must not look like a second request before the end of the first."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        num_left = self._num_bytes
        if num_left != 0:
            async for chunk in self.body_iterator:
                num_left = None if num_left is None else num_left - len(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": num_left != 0})
                if num_left == 0:
                    return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncIterator[bytes]:
        first = b""
        is_event_stream = self._answer.headers.get("content-type", "").startswith("text/event-stream")
        try:
            async for chunk in self._answer.aiter_raw():
                if len(first) < _FIRST_BYTES:
                    first += chunk
                    self._note(first[:_FIRST_BYTES])
                yield chunk
        except httpx.TransportError:
            if not is_event_stream:
                raise
            yield _LOST_EVENT


def _kind_of(job_id: str) -> str:
    """The path under which servers know what a job is named by."""
    if job_id.startswith("resp_"):
        return "responses"
    return "conversations" if job_id.startswith("conv_") else "jobs"


def _passed(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers to pass on: none of a connection, nor those that ``Connection`` names."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    left_out = _OF_A_CONNECTION | {part.strip().lower() for part in named.split(b",")}
    return [(name, value) for name, value in headers if name.lower() not in left_out]


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "RouteError", "code": status}}, status)
