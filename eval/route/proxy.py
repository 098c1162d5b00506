"""The application of a route: passes each request to one server, and its answer back as it comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from continuum.routing.home_table import HomeTable, key_of
from engine.clock import MonotonicClock
from engine.core_group.shared_words import shared_words
from engine.routing import RoutedTurn, Router, RouterContext, RouterFactory
from eval.route.fleet import Fleet
from eval.route.told import turn_of

MAX_BODY_BYTES = 256 * 2**20
BLOCK_SIZE = 16
_METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH"]
_OF_A_CONNECTION = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length"),
    )
)
"""Headers that are not passed on."""
_STORED = re.compile(r"/v1/(?:responses|conversations|jobs)/([^/]+)")
_ANSWERS_ID = re.compile(rb'"id"\s*:\s*"((?:resp|conv)_[\w-]+)"')
_FIRST_BYTES = 4096
_LOST = {"type": "api_error", "message": "The server that gave this answer has died; send the request again."}
_LOST_EVENT = b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": _LOST}) + b"\n\n"
"""The end of a stream whose server has died, as OpenAI's and Anthropic's clients understand it."""


class RouteApp:
    """One per process."""

    def __init__(self, urls: Sequence[str], make_router: RouterFactory) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=limits)
        self.fleet = Fleet(urls, self._http)
        self._router: Router = make_router(RouterContext(len(urls), BLOCK_SIZE, shared_words()))
        self._stored = HomeTable(shared_words())
        """Where stored responses and conversations are, by their ids."""
        self._clock = MonotonicClock()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/jobs", self._jobs),
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
        """200 while any server is up."""
        states = {backend.url: "up" if backend.is_up else "down" for backend in self.fleet.backends}
        return JSONResponse({"servers": states}, 200 if "up" in states.values() else 503)

    async def _jobs(self, request: Request) -> Response:
        """The jobs of all servers."""
        jobs = []
        for index in self._up():
            with suppress(httpx.HTTPError):
                answer = await self._send(index, request, b"")
                if answer.status_code != 200:
                    return await self._passed_on(answer, index)
                jobs += msgspec.json.decode(await answer.aread())["data"]
        return JSONResponse({"object": "list", "data": sorted(jobs, key=lambda job: job["idle_s"])})

    async def _pass(self, request: Request) -> Response:
        try:
            body = await _body_of(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if body is None:
            return _error(413, f"The body has more than {MAX_BODY_BYTES} bytes.")
        named = _STORED.match(request.url.path)
        if named is not None:
            return await self._ask_around(request, body, named[1])
        if request.method != "POST":
            return await self._ask_around(request, body, None)
        return await self._route(request, body)

    async def _route(self, request: Request, body: bytes) -> Response:
        """Send it to the server that the router chooses, or to another one if that does not answer at all."""
        turn, failed = turn_of(request.headers, body), list[int]()
        while any(load is not None for load in self.fleet.loads(failed)):
            index = self._chosen(turn, body, failed)
            load = self.fleet.backends[index].load
            load.num_open += 1
            try:
                answer = await self._send(index, request, body)
            except httpx.TransportError:  # nothing has been answered
                load.num_open -= 1
                failed.append(index)
                if self.fleet.lost(index):
                    self._lose(index)
                continue
            return await self._passed_on(answer, index, counted=True)
        return _error(503, "None of the servers answers; try again later.")

    def _chosen(self, turn: RoutedTurn, body: bytes, failed: Sequence[int]) -> int:
        loads = self.fleet.loads(failed)
        if turn.job_id is not None and turn.job_id.startswith(("resp_", "conv_")):
            home = self._stored[key_of(turn.job_id)]
            if home is not None and loads[home] is not None:
                return home
        return self._router.place(turn, loads, self._clock.now())

    async def _ask_around(self, request: Request, body: bytes, name: str | None) -> Response:
        """Of one server: the one that has what is named, else the first that knows it."""
        home = None if name is None else self._stored[key_of(name)]
        order = sorted(self._up(), key=lambda index: index != home)
        for place, index in enumerate(order):
            try:
                answer = await self._send(index, request, body)
            except httpx.TransportError:
                continue
            if answer.status_code != 404 or place == len(order) - 1:
                return await self._passed_on(answer, index)
            await answer.aclose()
        return _error(503, "None of the servers answers; try again later.")

    def _up(self) -> list[int]:
        return [index for index, backend in enumerate(self.fleet.backends) if backend.is_up]

    async def _send(self, index: int, request: Request, body: bytes) -> httpx.Response:
        url = f"{self.fleet.backends[index].url}{request.url.path}"
        headers = _passed(request.headers)
        sent = self._http.build_request(
            request.method, url, params=request.query_params, headers=headers, content=body
        )
        return await self._http.send(sent, stream=True)

    async def _passed_on(self, answer: httpx.Response, index: int, *, counted: bool = False) -> Response:
        is_event_stream = answer.headers.get("content-type", "").startswith("text/event-stream")

        async def chunks() -> AsyncIterator[bytes]:
            first = b""
            try:
                async for chunk in answer.aiter_raw():
                    if len(first) < _FIRST_BYTES:
                        first += chunk
                        for found in _ANSWERS_ID.finditer(first[:_FIRST_BYTES]):
                            self._stored[key_of(found[1].decode())] = index
                    yield chunk
            except httpx.TransportError:
                if not is_event_stream:
                    raise
                yield _LOST_EVENT
            finally:
                await answer.aclose()
                if counted:
                    self.fleet.backends[index].load.num_open -= 1

        headers = _passed(answer.headers)
        if (length := answer.headers.get("content-length")) is not None:
            headers["content-length"] = length
        return StreamingResponse(chunks(), answer.status_code, headers)


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OF_A_CONNECTION}


async def _body_of(request: Request) -> bytes | None:
    """The whole body; None if it is too large."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "RouteError", "code": status}}, status)
