"""Turns jobs into exactly what will be sent: token ids to force, gaps to wait, cut to the server's context.

Done before the clock starts, with the server's own tokenizer, so that measuring is only sending.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from eval.client import Message, ServerClient
from eval.errors import WorkloadError
from eval.workloads.job import Job, Turn

MAX_PARALLEL_JOBS = 4
_FENCE = re.compile(r"```\w*\n.*?```", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far jobs are replayed; None means as recorded."""

    max_turns: int | None = None
    max_output_tokens: int | None = None
    max_context_tokens: int | None = None
    """Prompt plus output of a turn."""
    time_scale: float = 1.0
    gap_cap_s: float | None = None
    """Longest wait, after scaling."""

    def gap_s(self, recorded_s: float | None) -> float:
        scaled_s = (recorded_s or 0.0) * self.time_scale
        return scaled_s if self.gap_cap_s is None else min(scaled_s, self.gap_cap_s)


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn as it will be sent."""

    recorded: Turn
    output_text: str
    """The recorded one, or what a limit left of it."""
    replay_token_ids: list[int]
    gap_s: float
    """The recorded one, scaled and capped."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job as it will be sent; ``num_recorded_turns`` tells whether it was cut."""

    job_id: str
    system_text: str
    turns: list[PlannedTurn]
    num_recorded_turns: int


@dataclass(frozen=True, slots=True)
class _Template:
    """What the server's chat template adds around texts."""

    tokens_per_turn: int
    """Tokens between an answer, the next input and the next answer that belong to neither text."""
    end_of_turn: int | None
    """The token after an answer, which a model emits to end it."""


class Planner:
    """Plans jobs against one server."""

    def __init__(self, client: ServerClient, limits: Limits) -> None:
        self._client = client
        self._limits = limits

    async def plan(self, jobs: list[Job]) -> list[PlannedJob]:
        """All jobs, in order. A job of which not even one turn fits is an error."""
        template = await self._probe_template()
        gate = asyncio.Semaphore(MAX_PARALLEL_JOBS)

        async def plan_one(job: Job) -> PlannedJob:
            async with gate:
                return await self._plan_job(job, template)

        return list(await asyncio.gather(*(plan_one(job) for job in jobs)))

    async def _probe_template(self) -> _Template:
        """Learn the template from a conversation of known texts."""
        answer = await self._client.tokenize("yes")
        question = await self._client.tokenize("no")
        opening: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "no"}]
        answered: list[Message] = [*opening, {"role": "assistant", "content": "yes"}]
        asked_again: list[Message] = [*answered, {"role": "user", "content": "no"}]
        first = await self._client.tokenize_messages(opening, add_generation_prompt=True)
        closed = await self._client.tokenize_messages(answered, add_generation_prompt=False)
        second = await self._client.tokenize_messages(asked_again, add_generation_prompt=True)
        end = len(first) + len(answer)
        follows = closed[len(first) : end] == answer and len(closed) > end
        return _Template(
            tokens_per_turn=len(second) - len(first) - len(answer) - len(question),
            end_of_turn=closed[end] if follows else None,
        )

    async def _plan_job(self, job: Job, template: _Template) -> PlannedJob:
        turns: list[PlannedTurn] = []
        context = 0
        for turn in job.turns[: self._limits.max_turns]:
            planned = await self._plan_turn(turn, template)
            context += await self._added_tokens(job, turn, len(turns), template)
            if not self._fits(context + len(planned.replay_token_ids)):
                break
            context += len(planned.replay_token_ids)
            turns.append(planned)
        while turns and not self._fits(await self._exact_context(job, turns)):
            turns.pop()
        if not turns:
            raise WorkloadError(
                f"Job {job.job_id}: its first turn does not fit in {self._limits.max_context_tokens} tokens."
            )
        return PlannedJob(job.job_id, job.system_text, turns, len(job.turns))

    async def _plan_turn(self, turn: Turn, template: _Template) -> PlannedTurn:
        assert turn.output_text is not None
        text, ids = await self._shortened(turn.output_text)
        if template.end_of_turn is not None:
            ids = [*ids, template.end_of_turn]
        gap_s = self._limits.gap_s(turn.gap_s)
        return PlannedTurn(turn, text, ids, gap_s)

    async def _added_tokens(self, job: Job, turn: Turn, index: int, template: _Template) -> int:
        """Prompt tokens this turn adds to those of the turn before."""
        if index == 0:
            messages = conversation(job.system_text, [], turn.input_text or "")
            return len(await self._client.tokenize_messages(messages, add_generation_prompt=True))
        return len(await self._client.tokenize(turn.input_text or "")) + template.tokens_per_turn

    async def _exact_context(self, job: Job, turns: list[PlannedTurn]) -> int:
        """Prompt and output of the last turn, by the server's own template."""
        messages = conversation(job.system_text, turns[:-1], turns[-1].recorded.input_text or "")
        prompt = await self._client.tokenize_messages(messages, add_generation_prompt=True)
        return len(prompt) + len(turns[-1].replay_token_ids)

    def _fits(self, context: int) -> bool:
        limit = self._limits.max_context_tokens
        return limit is None or context <= limit

    async def _shortened(self, text: str) -> tuple[str, list[int]]:
        """The output and its tokens, cut to the limit: first the reasoning goes, then the command's tail."""
        ids = await self._client.tokenize(text)
        limit = self._limits.max_output_tokens
        if limit is None or len(ids) <= limit:
            return text, ids
        fence = next(iter(_FENCE.findall(text)[-1:]), "")
        fence_ids = await self._client.tokenize(fence)
        if len(fence_ids) > limit:
            closing = "\n```"
            keep = max(1, limit - len(await self._client.tokenize(closing)))
            short = await self._client.detokenize(fence_ids[:keep]) + closing
        else:
            thought = await self._client.detokenize(ids[: limit - len(fence_ids)])
            # Wherever the thought was cut, the fence has to begin a line to be one.
            short = f"{thought.rstrip()}\n\n{fence}" if thought.strip() else fence
        # A cut inside a character gives replacement characters, which would not survive the round trip.
        short = short.replace("\ufffd", "")
        return short, await self._client.tokenize(short)


def conversation(system_text: str, answered: list[PlannedTurn], input_text: str) -> list[Message]:
    """The messages of a turn: everything said so far, then what is new."""
    messages: list[Message] = [{"role": "system", "content": system_text}] if system_text else []
    for turn in answered:
        messages.append({"role": "user", "content": turn.recorded.input_text or ""})
        messages.append({"role": "assistant", "content": turn.output_text})
    messages.append({"role": "user", "content": input_text})
    return messages
