"""Requests on their way through the engine: each has a deadline, and all can be ended at once.

It must not know HTTP, nor how an answer is spelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import cast

from engine.api.errors import RequestTimeoutError, ServerClosingError
from engine.api.limits import Seat
from engine.api.processes.load_board import LoadBoard, Tally
from engine.async_llm import AsyncLLM
from engine.errors import EngineDeadError
from engine.messages import RequestContext, ToolCall, TurnReceipt
from engine.request_output import RequestOutput
from engine.sampling_params import SamplingParams


class Generation:
    """The requests that one process generates for, by id."""

    def __init__(self, engine: AsyncLLM, board: LoadBoard, timeout_s: float | None) -> None:
        """``board`` counts them; ``timeout_s``: a request is ended after so long, None: never."""
        self._engine = engine
        self._board = board
        self._timeout_s = timeout_s
        self._live: set[str] = set()
        self._timed_out: set[str] = set()
        self._ended = False

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        context: RequestContext,
        *,
        seat: Seat,
        on_taken: Callable[[], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs. OverloadedError if the prompt is too much beside the others; if the request
        was ended, ServerClosingError or RequestTimeoutError."""
        if self._ended:
            raise ServerClosingError
        prefill = seat.prefill(len(prompt_token_ids))
        self._live.add(request_id)
        self._board.add(Tally.LIVE, 1)
        watch = self._watch(request_id)
        try:
            outputs = self._engine.generate(prompt_token_ids, params, request_id, context, on_taken=on_taken)
            async with aclosing(cast(AsyncGenerator[RequestOutput, None], outputs)):
                async for output in outputs:
                    prefill.done()
                    for answer in output.outputs:
                        if answer.finish_reason == "abort":
                            raise self._why_ended(request_id)
                    yield output
        finally:
            prefill.done()
            self._board.add(Tally.LIVE, -1)
            self._live.discard(request_id)
            self._timed_out.discard(request_id)
            if watch is not None:
                watch.cancel()

    def _watch(self, request_id: str) -> asyncio.Task[None] | None:
        if self._timeout_s is None:
            return None
        return asyncio.create_task(self._end_late(request_id, self._timeout_s))

    async def _end_late(self, request_id: str, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        self._timed_out.add(request_id)
        await self._engine.abort(request_id)

    def _why_ended(self, request_id: str) -> Exception:
        if self._timeout_s is not None and request_id in self._timed_out:
            return RequestTimeoutError(self._timeout_s)
        return ServerClosingError()

    async def close_turn(
        self, context: RequestContext, last: RequestOutput, calls: list[ToolCall]
    ) -> TurnReceipt | None:
        """A turn has ended: tell the engine which tools run now; what it does about the job's KV."""
        job, receipt = context.job, last.receipt
        if job is None or job.is_last_step:
            return receipt
        # Of a single question it is known beforehand what is decided: nothing is held for it.
        is_question = job.job_id is None and not calls and (receipt is None or receipt.turn == 1)
        with suppress(EngineDeadError):  # the answer itself is complete
            decided = await self._engine.tool_gap_started(last.request_id, calls, wait=not is_question)
            receipt = decided or receipt
        return receipt

    async def end_all(self) -> None:
        """End every request that is still running with an error, and take no more."""
        self._ended = True
        for request_id in list(self._live):
            await self._engine.abort(request_id)
