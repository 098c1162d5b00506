"""Plans the exact requests of jobs: responses to force, gaps to wait, cuts to the server's context.

Planning ends before the clock starts and uses the server's own tokenizer if it has one, so that the measured
part only sends.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from eval.errors import ServerError, WorkloadError
from eval.load.client import ServerClient
from eval.load.conversation import ChatConversation, ChatTurn, Conversation, TokenConversation, chat_messages
from eval.load.job_tokens import Hashes, JobTokens, Tokens, blocks_of_several
from eval.load.synthetic_chat import SyntheticChat, TurnTexts
from eval.load.tool_call_text import CallStyle, tool_call_text
from eval.load.vocabulary import COMMON_WORDS, learn_token_ids, learn_words
from eval.workloads.job import Job, Turn

MAX_PARALLEL_JOBS = 4
CHARACTERS_PER_TOKEN = 4
"""Estimate used if there is no tokenizer."""
GUESSED_TOKENS_PER_TURN = 8
"""Tokens that an unknown chat template is assumed to add per turn."""
_NO_BLOCKS: Hashes = np.empty(0, dtype=np.uint64)
_FENCE = re.compile(r"```\w*\n.*?```", re.DOTALL)


class Api(StrEnum):
    """The API for the turns."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class Replies(StrEnum):
    """The source of responses."""

    FORCED = "forced"
    """The recorded responses, which the model still computes."""
    LIVE = "live"
    """The model generates as many tokens as were recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a replay; None means as recorded."""

    max_turns: int | None = None
    max_output_tokens: int | None = None
    max_context_tokens: int | None = None
    """Maximum prompt plus output of a turn."""
    time_scale: float = 1.0
    gap_cap_s: float | None = None
    """Longest wait, after scaling."""

    def gap_s(self, recorded_s: float | None) -> float:
        scaled_s = (recorded_s or 0.0) * self.time_scale
        return scaled_s if self.gap_cap_s is None else min(scaled_s, self.gap_cap_s)

    def output_tokens(self, recorded: int) -> int:
        return max(1, recorded if self.max_output_tokens is None else min(recorded, self.max_output_tokens))

    def fits(self, context: int) -> bool:
        return self.max_context_tokens is None or context <= self.max_context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How jobs become requests."""

    limits: Limits = field(default_factory=Limits)
    api: Api | None = None
    """API; None: chat where all turns have text, else completions."""
    replies: Replies = Replies.FORCED
    calls: CallStyle = CallStyle.FENCED
    """Format of the calls in synthetic texts."""
    seed: int = 0
    """Random seed of synthetic prompts."""
    token_ids: range | None = None
    """Ordinary token ids, for a server that does not tokenize."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job as it will be sent. It can be replayed once."""

    job: Job
    num_turns: int
    """Number of turns to send; fewer than recorded if the job was cut."""
    gaps_s: list[float]
    """Seconds to wait after each turn: the recorded time, scaled and capped."""
    conversation: Conversation
    tools: tuple[str, ...] = ()
    """Tools to declare with each turn."""

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def spawns(self) -> set[str]:
        """Ids of the jobs that its replayed turns start."""
        return {child for turn in self.job.turns[: self.num_turns] for child in turn.spawns}


@dataclass(frozen=True, slots=True)
class Plan:
    """All jobs as they will be sent, in order, and notes on what was changed."""

    jobs: list[PlannedJob]
    api: Api
    notes: list[str]

    @property
    def roots(self) -> list[PlannedJob]:
        """Returns the jobs that no other job starts."""
        return [job for job in self.jobs if job.job.parent_job is None]

    @property
    def sub_agents(self) -> list[PlannedJob]:
        """Returns the jobs that a turn of another job starts."""
        return [job for job in self.jobs if job.job.parent_job is not None]


@dataclass(frozen=True, slots=True)
class _Template:
    """The tokens that the server's chat template adds around texts."""

    tokens_per_turn: int
    """Tokens between an answer, the next input and the next answer that belong to neither text."""
    end_of_turn: int | None
    """The end-of-turn token, which the model emits after a response."""


class Planner:
    """Plans jobs against one server."""

    def __init__(self, client: ServerClient, options: PlanOptions) -> None:
        self._client = client
        self._options = options

    async def plan(self, jobs: Sequence[Job]) -> Plan:
        """Plans all jobs of which at least one turn fits, and their sub-agents.

        Raises WorkloadError if no job is left, ServerError if the server lacks what the options need.
        """
        texts = all(job.has_text for job in jobs)
        api = self._options.api or (Api.CHAT if texts else Api.COMPLETIONS)
        planner: _ChatPlanner | _TokenPlanner
        if api is Api.CHAT:
            planner = await _ChatPlanner.make(self._client, self._options, texts)
        else:
            planner = await _TokenPlanner.make(self._client, self._options, jobs)
        gate = asyncio.Semaphore(MAX_PARALLEL_JOBS)

        async def plan_one(job: Job) -> PlannedJob | None:
            async with gate:
                return await planner.plan_job(job)

        planned = await asyncio.gather(*(plan_one(job) for job in jobs))
        fitting = [job for job in planned if job is not None]
        reached = _reached(fitting)
        if not reached:
            limit = self._options.limits.max_context_tokens
            raise WorkloadError(f"No job can be replayed: not even one first turn fits in {limit} tokens.")
        return Plan(reached, api, [*planner.notes, *_left_out(len(jobs), fitting, reached)])


class _ChatPlanner:
    """Plans chat messages with recorded or synthetic texts."""

    def __init__(
        self,
        client: ServerClient,
        options: PlanOptions,
        template: _Template | None,
        synthetic: SyntheticChat | None,
        notes: list[str],
    ) -> None:
        self._client = client
        self._options = options
        self._limits = options.limits
        self._template = template
        self._synthetic = synthetic
        self._call_tokens: dict[str, int] = {}
        self.notes = notes

    @classmethod
    async def make(cls, client: ServerClient, options: PlanOptions, texts: bool) -> _ChatPlanner:
        """Creates a planner; first probes the server's template and tokenizer, if it has /tokenize."""
        notes: list[str] = []
        template: _Template | None = None
        if await client.can_tokenize(chat=True):
            template = await _probe_template(client)
        elif options.replies is Replies.FORCED:
            raise ServerError(f"The server at {client.base_url} has no /tokenize, which forced replies need.")
        else:
            notes.append("token counts of texts: ASSUMED as recorded, the server has no /tokenize for chats")
        if texts:
            return cls(client, options, template, None, notes)
        words, exact = await learn_words(client) if template else (list(COMMON_WORDS), False)
        about = "about" if exact else "very roughly"
        notes.append(f"texts are synthetic, with {about} the recorded number of tokens")
        per_turn = template.tokens_per_turn if template else GUESSED_TOKENS_PER_TURN
        return cls(client, options, template, SyntheticChat(words, per_turn, options.seed), notes)

    async def plan_job(self, job: Job) -> PlannedJob | None:
        """Plans the turns of a job that fit; None if not even the first one does."""
        system_text, said = await self._texts_of(job)
        turns: list[ChatTurn] = []
        contexts: list[int] = []
        for recorded, texts in zip(job.turns[: self._limits.max_turns], said, strict=False):
            turn = await self._plan_turn(recorded, texts)
            context = await self._context(job, system_text, recorded, turn, contexts)
            if not self._limits.fits(context):
                break
            turns.append(turn)
            contexts.append(context)
        while turns and not await self._fits_exactly(system_text, turns, contexts):
            turns.pop()
            contexts.pop()
        if not turns:
            return None
        forced = self._options.replies is Replies.FORCED
        tools: set[str] = set()
        if self._synthetic is not None and self._options.calls is CallStyle.HERMES:
            tools = {call.tool for turn in job.turns for call in turn.calls}
        return PlannedJob(
            job,
            len(turns),
            [self._limits.gap_s(turn.gap_s) for turn in job.turns[: len(turns)]],
            ChatConversation(system_text, turns, forced=forced),
            tuple(sorted(tools)),
        )

    async def _texts_of(self, job: Job) -> tuple[str, list[TurnTexts]]:
        """Returns the recorded or synthetic texts of a job."""
        if self._synthetic is None:
            return job.system_text, [
                TurnTexts(turn.input_text or "", turn.output_text or "", index)
                for index, turn in enumerate(job.turns)
            ]
        _check_counts(job)
        calls = [tool_call_text(turn, self._options.calls) for turn in job.turns]
        return self._synthetic.write(job, calls, [await self._num_call_tokens(call) for call in calls])

    async def _num_call_tokens(self, call: str) -> int:
        if call not in self._call_tokens:
            self._call_tokens[call] = len(await self._tokens(call)) if call else 0
        return self._call_tokens[call]

    async def _tokens(self, text: str) -> list[int]:
        """Returns the text's tokens; without a tokenizer, a list of the estimated length."""
        if self._template is None:
            return [0] * -(-len(text) // CHARACTERS_PER_TOKEN)
        return await self._client.tokenize(text)

    async def _plan_turn(self, recorded: Turn, said: TurnTexts) -> ChatTurn:
        if self._template is None:
            guessed = recorded.output_tokens or len(await self._tokens(said.output_text))
            return ChatTurn(
                input_text=said.input_text,
                output_text=said.output_text,
                output_token_ids=None,
                max_tokens=self._limits.output_tokens(guessed),
                num_kept=said.num_kept,
            )
        text, ids = await self._shortened(said.output_text)
        if self._options.replies is Replies.FORCED and self._template.end_of_turn is not None:
            ids = [*ids, self._template.end_of_turn]
        return ChatTurn(
            input_text=said.input_text,
            output_text=text,
            output_token_ids=ids,
            max_tokens=max(1, len(ids)),
            num_kept=said.num_kept,
        )

    async def _context(
        self, job: Job, system_text: str, recorded: Turn, turn: ChatTurn, contexts: list[int]
    ) -> int:
        """Returns the approximate tokens of a turn's prompt and output."""
        if self._synthetic is not None or (self._template is None and recorded.input_tokens):
            return recorded.input_tokens + turn.max_tokens
        added = len(await self._tokens(turn.input_text)) + turn.max_tokens
        if contexts:
            return contexts[-1] + added + self._tokens_per_turn
        return len(await self._tokens(system_text)) + added + self._tokens_per_turn

    @property
    def _tokens_per_turn(self) -> int:
        return self._template.tokens_per_turn if self._template else GUESSED_TOKENS_PER_TURN

    async def _fits_exactly(self, system_text: str, turns: list[ChatTurn], contexts: list[int]) -> bool:
        """Whether the longest turn fits, counted with the server's own template if possible."""
        if self._template is None or self._limits.max_context_tokens is None:
            return True
        longest = max(range(len(turns)), key=contexts.__getitem__)
        history: list[tuple[str, str]] = []
        for turn in turns[:longest]:
            del history[turn.num_kept :]
            history.append((turn.input_text, turn.output_text))
        last = turns[longest]
        messages = chat_messages(system_text, history[: last.num_kept], last.input_text)
        prompt = await self._client.tokenize_messages(messages, add_generation_prompt=True)
        return self._limits.fits(len(prompt) + last.max_tokens)

    async def _shortened(self, text: str) -> tuple[str, list[int]]:
        """The output and its tokens, cut to the limit: first the reasoning, then the command's tail."""
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
            reasoning = await self._client.detokenize(ids[: limit - len(fence_ids)])
            # The code fence must begin a line wherever the reasoning was cut.
            short = f"{reasoning.rstrip()}\n\n{fence}" if reasoning.strip() else fence
        # A cut inside a character gives replacement characters, which would not survive the round trip.
        short = short.replace("\ufffd", "")
        return short, await self._client.tokenize(short)


async def _probe_template(client: ServerClient) -> _Template:
    """Probes the template with a conversation of known texts."""
    answer = await client.tokenize("yes")
    question = await client.tokenize("no")
    opening = chat_messages("s", [], "no")
    answered = [*opening, {"role": "assistant", "content": "yes"}]
    asked_again = chat_messages("s", [("no", "yes")], "no")
    first = await client.tokenize_messages(opening, add_generation_prompt=True)
    closed = await client.tokenize_messages(answered, add_generation_prompt=False)
    second = await client.tokenize_messages(asked_again, add_generation_prompt=True)
    end = len(first) + len(answer)
    follows = closed[len(first) : end] == answer and len(closed) > end
    return _Template(
        tokens_per_turn=len(second) - len(first) - len(answer) - len(question),
        end_of_turn=closed[end] if follows else None,
    )


class _TokenPlanner:
    """Plans prompts of synthetic token ids, with exactly the recorded counts."""

    def __init__(
        self,
        client: ServerClient,
        options: PlanOptions,
        alphabet: Tokens,
        can_tokenize: bool,
        shared_blocks: dict[str, Hashes],
    ) -> None:
        self._client = client
        self._options = options
        self._alphabet = alphabet
        self._can_tokenize = can_tokenize
        self._shared_blocks = shared_blocks
        self._call_ids: dict[str, list[int]] = {}
        self._num_hidden_calls = 0
        """Number of calls left out: the recorded output is too short, or a shared block would change."""

    @classmethod
    async def make(cls, client: ServerClient, options: PlanOptions, jobs: Sequence[Job]) -> _TokenPlanner:
        """Creates a planner; first learns ordinary token ids unless the options give them."""
        can_tokenize = await client.can_tokenize()
        if options.token_ids is not None:
            ids = list(options.token_ids)
        elif can_tokenize:
            ids = await learn_token_ids(client)
        else:
            raise ServerError(
                f"The server at {client.base_url} has no /tokenize to learn ordinary token ids from: "
                "name some with --token-ids LOW:HIGH, or use --api chat."
            )
        return cls(client, options, np.array(ids, dtype=np.int64), can_tokenize, blocks_of_several(jobs))

    @property
    def notes(self) -> list[str]:
        notes = ["prompts are synthetic tokens, with the recorded lengths and shared prefixes"]
        if self._num_hidden_calls:
            notes.append(
                f"{self._num_hidden_calls} tool calls are invisible to the server: "
                "the recorded output has no space for them"
            )
        return notes

    async def plan_job(self, job: Job) -> PlannedJob | None:
        """Plans the turns of a job that fit; None if not even the first one does."""
        _check_counts(job)
        limits = self._options.limits
        tokens = JobTokens(job, self._alphabet, self._options.seed)
        outputs: list[Tokens] = []
        for index, turn in enumerate(job.turns[: limits.max_turns]):
            num_output = limits.output_tokens(turn.output_tokens)
            if not limits.fits(turn.input_tokens + num_output):
                break
            outputs.append(await self._output(job, tokens, index, num_output))
        if not outputs:
            return None
        return PlannedJob(
            job,
            len(outputs),
            [limits.gap_s(turn.gap_s) for turn in job.turns[: len(outputs)]],
            TokenConversation(
                job,
                tokens,
                outputs,
                forced=self._options.replies is Replies.FORCED,
                tokenize=self._client.tokenize if self._can_tokenize else None,
            ),
        )

    async def _output(self, job: Job, tokens: JobTokens, index: int, num_output: int) -> Tokens:
        """Returns the tokens to force: the call last, so that the server knows which tool runs."""
        call = await self._call(job.turns[index])
        num_words = num_output - len(call)
        end = job.turns[index].input_tokens + num_output
        # If another job has the same block, a call would make it differ.
        shared = self._shared_blocks.get(job.block_scope or "", _NO_BLOCKS)
        if num_words < 0 or np.isin(tokens.block_ids(index, end - len(call), end), shared).any():
            self._num_hidden_calls += self._options.replies is Replies.FORCED
            return tokens.output(index, num_output)
        return np.concatenate((tokens.output(index, num_words), np.array(call, dtype=np.int64)))

    async def _call(self, turn: Turn) -> list[int]:
        text = tool_call_text(turn, self._options.calls)
        if not text or not self._can_tokenize:
            return []
        if text not in self._call_ids:
            self._call_ids[text] = await self._client.tokenize(text)
        return self._call_ids[text]


def _check_counts(job: Job) -> None:
    if any(turn.input_tokens < 1 for turn in job.turns):
        raise WorkloadError(f"Job {job.job_id}: a turn has neither a text nor a count of input tokens.")


def _reached(planned: list[PlannedJob]) -> list[PlannedJob]:
    """Returns the jobs that will start: all but sub-agents whose parent is cut before it starts them."""
    by_id = {plan.job_id: plan for plan in planned}
    waiting = [plan.job_id for plan in planned if plan.job.parent_job is None]
    reached: set[str] = set()
    while waiting:
        job_id = waiting.pop()
        if job_id in by_id and job_id not in reached:
            reached.add(job_id)
            waiting.extend(by_id[job_id].spawns)
    return [plan for plan in planned if plan.job_id in reached]


def _left_out(num_jobs: int, fitting: list[PlannedJob], reached: list[PlannedJob]) -> list[str]:
    """Returns notes on jobs that are left out; jobs that are cut show in the records."""
    notes = []
    if too_long := num_jobs - len(fitting):
        notes.append(f"{too_long} of {num_jobs} jobs left out: not even the first turn fits")
    if parentless := len(fitting) - len(reached):
        notes.append(f"{parentless} sub-agents left out: the turn that starts them is not replayed")
    return notes
