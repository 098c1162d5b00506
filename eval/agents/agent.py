"""An agent: calls its model, runs the calls in the response, returns the results, until there is an answer.

It does not know the model's transport, what the tools do, or who watches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from eval.agents.model import Call, ChatModel, Message, ModelReply, Schema
from eval.load.client import TurnFailedError


class Tools(Protocol):
    """The tools that an agent may call. A call that fails or is refused returns a text that says so."""

    @property
    def schemas(self) -> list[Schema]: ...

    def run(self, name: str, arguments: str) -> str:
        """Returns the result of a call with these JSON arguments. Called from threads, several at once."""
        ...


class Ending(StrEnum):
    """How an agent's run ended."""

    ANSWERED = "answered"
    OVER_LIMIT = "over_limit"
    """The last allowed response still calls tools."""
    FAILED = "failed"
    """A request failed."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call, and how long it took."""

    call: Call
    result: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """One response of the model and its tool calls. Times are seconds since the prompt."""

    number: int
    """Number of the turn, from 1."""
    start_s: float
    reply: ModelReply
    results: tuple[CallResult, ...] = ()
    gap_s: float = 0.0
    """Seconds from the end of the response until all results have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """All turns of an agent for one prompt."""

    ending: Ending
    answer: str
    """The answer; empty if there is none."""
    turns: tuple[AgentTurn, ...]
    seconds: float
    error: str | None = None
    """Why the request after these turns failed."""


@dataclass(frozen=True, slots=True)
class TextCame:
    """A piece of a response's text has arrived."""

    text: str


@dataclass(frozen=True, slots=True)
class ReplyCame:
    """A response is complete; its calls, if any, run now."""

    reply: ModelReply


@dataclass(frozen=True, slots=True)
class ResultCame:
    """A call has ended, and so have the calls before it in the response."""

    result: CallResult


Event = TextCame | ReplyCame | ResultCame
Watch = Callable[[Event], None]
DelayOf = Callable[[Call], float]
"""Returns the least seconds that a call takes."""


@dataclass(slots=True, kw_only=True)
class Agent:
    """One conversation with a model that may call tools."""

    model: ChatModel
    tools: Tools
    max_turns: int
    """Maximum number of responses to one prompt."""
    job_id: str | None = None
    """The job's id; None: the server infers which turns belong together."""
    delay_of: DelayOf = lambda call: 0.0
    watch: Watch = lambda event: None
    messages: list[Message] = field(default_factory=list)
    """The conversation so far; may begin with a system message."""

    async def ask(self, prompt: str) -> AgentRun:
        """Works until there is an answer, the limit is reached or a request fails.

        Without an answer, or if cancelled, restores the conversation. Raises ServerGoneError.
        """
        num_before = len(self.messages)
        self.messages.append({"role": "user", "content": prompt})
        answered = False
        try:
            run = await self._work()
            answered = run.ending is Ending.ANSWERED
        finally:
            if not answered:
                del self.messages[num_before:]
        return run

    async def _work(self) -> AgentRun:
        started = time.perf_counter()
        turns: list[AgentTurn] = []

        def ended(ending: Ending, answer: str = "", error: str | None = None) -> AgentRun:
            seconds = time.perf_counter() - started
            return AgentRun(ending=ending, answer=answer, turns=tuple(turns), seconds=seconds, error=error)

        for number in range(1, self.max_turns + 1):
            start_s = time.perf_counter() - started
            try:
                reply = await self._reply()
            except TurnFailedError as error:
                return ended(Ending.FAILED, error=str(error))
            is_over = bool(reply.calls) and number == self.max_turns
            results, gap_s = ((), 0.0) if is_over else await self._run_calls(reply.calls)
            turns.append(AgentTurn(number=number, start_s=start_s, reply=reply, results=results, gap_s=gap_s))
            if not reply.calls:
                return ended(Ending.ANSWERED, answer=reply.text)
        return ended(Ending.OVER_LIMIT)

    async def _reply(self) -> ModelReply:
        """Requests the model's next message and appends it to the conversation."""
        reply = await self.model.reply(
            self.messages, self.tools.schemas, self.job_id, lambda text: self.watch(TextCame(text))
        )
        self.messages.append(reply.message())
        self.watch(ReplyCame(reply))
        return reply

    async def _run_calls(self, calls: Sequence[Call]) -> tuple[tuple[CallResult, ...], float]:
        """Runs all calls of a response at once; reports and keeps results in the order of the calls."""
        started = time.perf_counter()
        results: list[CallResult] = []
        async with asyncio.TaskGroup() as group:
            for task in [group.create_task(self._run_call(call)) for call in calls]:
                result = await task
                self.messages.append(
                    {"role": "tool", "tool_call_id": result.call.call_id, "content": result.result}
                )
                self.watch(ResultCame(result))
                results.append(result)
        return tuple(results), time.perf_counter() - started

    async def _run_call(self, call: Call) -> CallResult:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(self.delay_of(call)))
            running = group.create_task(asyncio.to_thread(self.tools.run, call.name, call.arguments))
        return CallResult(call, running.result(), time.perf_counter() - started)
