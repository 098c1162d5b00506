"""Requests that are being generated: each has a deadline, and all can be ended at once.

This module does not know HTTP or the format of responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import cast

import msgspec

from engine.api.errors import RequestTimeoutError, ServerClosingError
from engine.api.http.access_log import current_record
from engine.api.processes.shared_load import SharedLoad, Tally
from engine.api.service.limits import Permit
from engine.errors import EngineDeadError, TooLateError
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.request_output import RequestOutput
from engine.records.messages import RequestContext, ToolCall, TurnReceipt
from engine.records.sampling_params import SamplingParams


class Generation:
    """The requests that this process generates for, by id."""

    def __init__(self, engine: AsyncLLM, board: SharedLoad, timeout_s: float | None) -> None:
        """``board`` counts the requests. ``timeout_s``: the maximum time of a request; None means no
        limit."""
        self._engine = engine
        self._board = board
        self._timeout_s = timeout_s
        self._live: set[str] = set()
        self._timed_out: dict[str, RequestTimeoutError] = {}
        self._ended = False

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        context: RequestContext,
        *,
        permit: Permit,
        on_accepted: Callable[[], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the engine's outputs. OverloadedError if too many prompt tokens wait already;
        ServerClosingError or RequestTimeoutError if the request was ended; TooLateError if it begins a job
        that would begin too late."""
        if self._ended:
            raise ServerClosingError
        prefill = permit.prefill(len(prompt_token_ids))
        self._live.add(request_id)
        self._board.add(Tally.LIVE, 1)
        watch = self._watch(request_id, context, permit.age_s)
        record = current_record()
        if record is not None:
            record.began(context, request_id, len(prompt_token_ids))
        try:
            outputs = self._engine.generate(
                prompt_token_ids, params, request_id, context, on_accepted=on_accepted
            )
            async with aclosing(cast(AsyncGenerator[RequestOutput, None], outputs)):
                async for output in outputs:
                    prefill.came(output)
                    if record is not None:
                        record.came(output)
                    if context.job is not None and context.job.prewarms:
                        _leave_out(output, may_be_cut=not self._has_ended(request_id))
                    for answer in output.outputs:
                        if answer.finish_reason == "abort":
                            raise self._why_ended(request_id)
                    yield output
        except TooLateError:
            permit.note_too_late()
            raise
        finally:
            prefill.done()
            self._board.add(Tally.LIVE, -1)
            self._live.discard(request_id)
            self._timed_out.pop(request_id, None)
            if watch is not None:
                watch.cancel()

    def _watch(self, request_id: str, context: RequestContext, age_s: float) -> asyncio.Task[None] | None:
        """Ends the request at the first of its limits, which count from its admission; None if it has
        none."""
        limits: list[tuple[float, str]] = []
        if self._timeout_s is not None:
            limits.append((self._timeout_s, "request_timeout_s"))
        if context.job is not None and context.job.deadline_s is not None:
            limits.append((context.job.deadline_s, "its deadline_s"))
        if not limits:
            return None
        timeout_s, limit = min(limits)
        return asyncio.create_task(self._end_late(request_id, timeout_s, limit, timeout_s - age_s))

    async def _end_late(self, request_id: str, timeout_s: float, limit: str, left_s: float) -> None:
        await asyncio.sleep(left_s)
        self._timed_out[request_id] = RequestTimeoutError(limit, timeout_s)
        await self._engine.abort(request_id)

    def _has_ended(self, request_id: str) -> bool:
        """Whether this process has ended the request."""
        return self._ended or request_id in self._timed_out

    def _why_ended(self, request_id: str) -> Exception:
        return self._timed_out.get(request_id) or ServerClosingError()

    async def close_turn(
        self, context: RequestContext, last: RequestOutput, calls: list[ToolCall]
    ) -> TurnReceipt | None:
        """Reports to the engine that a turn has ended and which tools run now; returns the turn's receipt."""
        job = context.job
        receipt = last.receipt
        if job is None or job.is_last_step:
            return receipt
        # The KV of a single-turn request is never retained, so there is no decision to wait for.
        is_question = job.job_id is None and not calls and (receipt is None or receipt.turn == 1)
        with suppress(EngineDeadError):  # the response itself is complete
            decided = await self._engine.tool_gap_started(last.request_id, calls, wait=not is_question)
            receipt = _decided(decided, receipt)
        return receipt

    async def end_all(self) -> None:
        """Ends every running request with an error, and accepts no more."""
        self._ended = True
        for request_id in list(self._live):
            await self._engine.abort(request_id)


def _leave_out(output: RequestOutput, *, may_be_cut: bool) -> None:
    """Takes the answer out of the output of a request that only prewarms. ``may_be_cut``: the core may have
    ended it, as the turn has come that it was for."""
    for answer in output.outputs:
        answer.text = ""
        answer.token_ids = []
        answer.logprobs = None
        if answer.finish_reason == "stop" or (may_be_cut and answer.finish_reason == "abort"):
            answer.finish_reason = "length"
            answer.stop_reason = None


def _decided(decided: TurnReceipt | None, at_end: TurnReceipt | None) -> TurnReceipt | None:
    """Returns the receipt with the latest decision, which is about one answer; its steps are those of all
    answers."""
    if decided is None or at_end is None:
        return decided or at_end
    return msgspec.structs.replace(
        decided,
        output_steps=at_end.output_steps,
        drafted_tokens=at_end.drafted_tokens,
        accepted_tokens=at_end.accepted_tokens,
    )
