"""Sessions: requests whose input arrives in parts, and which answer each part.

For the core each part is a turn of one job, which continues the previous turn by its id: only new tokens are
sent and hashed. Between two parts a session holds only what any turn of a job leaves in the core, so that no
request waits for an idle session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from secrets import token_hex
from typing import Protocol, cast

import msgspec

from engine.errors import RequestError
from engine.frontend.request_output import RequestOutput
from engine.records.messages import JobRef, RequestContext
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.tokenization.prompt_encoder import ContinuedTokens

KEPT_S = 60.0
"""How long the KV of a session with its own job is kept at least after each part, as long as holding is
worth it."""


@dataclass(frozen=True, slots=True)
class StreamingInput:
    """One part of a session's input, as in V1."""

    prompt: str | list[int]
    """The text or tokens to append. Special tokens are added only to the first part."""
    sampling_params: SamplingParams | None = None
    """Sampling parameters of the output to this part; None: those of the session."""


class Generate(Protocol):
    """The signature of ``AsyncLLM.generate`` for tokens."""

    def __call__(
        self,
        prompt: list[int],
        sampling_params: SamplingParams,
        request_id: str,
        context: RequestContext,
        *,
        on_accepted: Callable[[], None] | None = None,
    ) -> AsyncIterator[RequestOutput]: ...


@dataclass(frozen=True, slots=True)
class SessionEngine:
    """The functions of the engine that a session calls."""

    generate: Generate
    encode: Callable[[str, bool], Awaitable[list[int]]]
    """Tokenizes a text, with special tokens or without."""
    finish_job: Callable[[str], None]


class StreamingSession:
    """Runs one session. An instance is used once, by ``outputs``."""

    def __init__(
        self,
        engine: SessionEngine,
        inputs: AsyncGenerator[StreamingInput, None],
        params: SamplingParams,
        request_id: str,
        context: RequestContext,
    ) -> None:
        """RequestError for parameters that a session cannot have."""
        _check(params, context)
        self._engine = engine
        self._inputs = inputs
        self._params = params
        self._request_id = request_id
        self._own_job = None if context.job is not None else f"session-{request_id}-{token_hex(4)}"
        if self._own_job is not None:
            context = msgspec.structs.replace(context, job=JobRef(self._own_job, asked_ttl_s=KEPT_S))
        self._context = msgspec.structs.replace(context, keeps_tokens=True)
        self._known: list[int] = []
        """All tokens until now whose KV was computed: the last token of each output is excluded, as in V1."""
        self._highest = 0
        self._aborted = asyncio.Event()

    def abort(self) -> None:
        """Accepts no more input; a running generation must be aborted by its own id."""
        self._aborted.set()

    async def outputs(self, on_accepted: Callable[[], None] | None) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs to each part, the last of which is ``finished``; then those to the next part."""
        try:
            async with aclosing(self._inputs):
                while (part := await self._next_part()) is not None:
                    async for output in self._answer(part, on_accepted):
                        yield output
                    on_accepted = None
        finally:
            if self._own_job is not None:
                self._engine.finish_job(self._own_job)

    async def _next_part(self) -> StreamingInput | None:
        """Waits for the next part; None if there is none, or the session was aborted."""
        if self._aborted.is_set():
            return None
        part = asyncio.ensure_future(anext(self._inputs, None))
        aborted = asyncio.ensure_future(self._aborted.wait())
        try:
            await asyncio.wait({part, aborted}, return_when=asyncio.FIRST_COMPLETED)
            return part.result() if part.done() else None
        finally:
            aborted.cancel()
            if not part.done():
                part.cancel()
                await asyncio.wait({part})

    async def _answer(
        self, part: StreamingInput, on_accepted: Callable[[], None] | None
    ) -> AsyncGenerator[RequestOutput, None]:
        params = self._params if part.sampling_params is None else part.sampling_params
        _check(params, self._context)
        prompt = await self._prompt(part.prompt)
        said: list[int] = []
        answer = self._engine.generate(
            prompt, params, self._request_id, self._context, on_accepted=on_accepted
        )
        async with aclosing(cast(AsyncGenerator[RequestOutput, None], answer)) as outputs:
            async for output in outputs:
                [completion] = output.outputs
                if params.output_kind is RequestOutputKind.DELTA:
                    said += completion.token_ids
                else:
                    said = completion.token_ids
                if completion.finish_reason == "abort":
                    self.abort()
                yield output
        kept = said[:-1]
        self._known = [*prompt, *kept]
        self._highest = max((self._highest, *prompt[len(prompt) - self._num_new :], *kept))

    async def _prompt(self, given: str | list[int]) -> list[int]:
        new = given if isinstance(given, list) else await self._engine.encode(given, not self._known)
        self._num_new = len(new)
        if not self._known:
            return new
        if not all(isinstance(token, int) for token in new):
            raise RequestError("The prompt must hold token ids.", "prompt")
        return ContinuedTokens(self._known, new, self._highest, self._request_id)


def _check(params: SamplingParams, context: RequestContext) -> None:
    if params.n != 1:
        raise RequestError("n must be 1 in a session: it continues a single output.", "n")
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs does not work in a session: its prompt grows.", "prompt_logprobs")
    if context.kv_transfer is not None:
        raise RequestError("A session cannot be combined with kv_transfer_params.", "kv_transfer_params")


class StreamingSessions:
    """The open sessions of one engine."""

    def __init__(self, engine: SessionEngine) -> None:
        self._engine = engine
        self._open: list[tuple[str, StreamingSession]] = []

    def __len__(self) -> int:
        return len(self._open)

    async def run(
        self,
        inputs: AsyncGenerator[StreamingInput, None],
        params: SamplingParams,
        request_id: str,
        context: RequestContext,
        on_accepted: Callable[[], None] | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of a session; RequestError if it is invalid."""
        if request_id in [name for name, _ in self._open]:
            raise RequestError(f"request_id {request_id!r} belongs to an open session.", "request_id")
        opened = (request_id, StreamingSession(self._engine, inputs, params, request_id, context))
        self._open.append(opened)
        try:
            async with aclosing(opened[1].outputs(on_accepted)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._open.remove(opened)

    def abort(self, request_id: str) -> None:
        """Ends all sessions with this id, including those that wait for input."""
        for name, session in self._open:
            if name == request_id:
                session.abort()
