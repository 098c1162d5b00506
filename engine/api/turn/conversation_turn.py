"""Runs one turn of a conversation in the engine: renders, generates, parses and closes it.

This module is independent of the API that the client uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from engine.api.prompt.left_out import MAX_NOTES
from engine.api.service.identity import with_history
from engine.api.service.model import Model
from engine.api.turn.answer_reader import AnswerOutput, AnswerReader
from engine.api.turn.conversation import Conversation, NamedTool
from engine.api.turn.usage import TurnUsage
from engine.errors import EngineGenerateError
from engine.frontend.request_output import RequestOutput
from engine.media.store import MediaLease
from engine.records.messages import MediaSpan, RequestContext, TurnReceipt
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.structured_output.reply_grammar import (
    ReplyGrammar,
    ReplyStart,
    forced_calls,
    forced_input,
    free_calls,
    free_texts,
    reasoning_before,
    requested_format,
    text_before_stops,
)

MAX_NAMES = 8
"""Maximum number of tool names listed in one note."""
TAIL_TOKENS = 16
"""Number of tokens at the prompt's end that a reply parser gets, since they may already open a section of the
reply."""


@dataclass(slots=True)
class TurnOutput:
    """The new part of a turn. The last one has ``finished`` set, and the receipt if there is one."""

    answers: list[AnswerOutput]
    output: RequestOutput
    usage: TurnUsage
    finished: bool = False
    receipt: TurnReceipt | None = None


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A prompt as the engine gets it, and the parameters of its generation."""

    token_ids: list[int]
    media: tuple[MediaSpan, ...]
    params: SamplingParams


class ConversationTurn:
    """Runs one turn. An instance is used once, by ``stream`` or by ``whole``."""

    def __init__(
        self,
        model: Model,
        conversation: Conversation,
        on_accepted: Callable[[], None] | None = None,
    ) -> None:
        """``on_accepted`` is called when the engine has accepted the request: few errors occur after that."""
        self._server = model.server
        self._conversation = conversation
        self._on_accepted = on_accepted
        self.num_prompt_tokens = 0
        """The prompt's length, known once the prompt is rendered."""
        self._readers: list[AnswerReader] = []
        self._not_enforced: list[str] = []
        """Notes for the receipt about constraints of the request that are not enforced."""

    async def whole(self) -> TurnOutput:
        """Runs the turn and returns it complete, with the whole of each answer in its ``reply``."""
        last: TurnOutput | None = None
        async for turn in self.stream(RequestOutputKind.FINAL_ONLY):
            last = turn
        if last is None:
            raise EngineGenerateError("The engine ended the request without an output.")
        return last

    async def stream(
        self, kind: RequestOutputKind = RequestOutputKind.DELTA
    ) -> AsyncGenerator[TurnOutput, None]:
        """Yields outputs as they arrive, the first with the engine's first output. Only the last one waits
        for the receipt."""
        conversation = self._conversation
        self._server.check_params(conversation.params)
        with (
            self._server.admission.admit(conversation.params.n, conversation.context) as permit,
            self._server.media_lease() as lease,
        ):
            owner = conversation.context.owner
            prompt, counted = await self._prompt(owner, lease)
            self.num_prompt_tokens = len(prompt)
            prompt_tail = self._server.engine.tokenizer.decode(prompt[-TAIL_TOKENS:])
            grammar = self._grammar(prompt_tail)
            await self._tell_of_texts(grammar, owner)
            outputs = self._server.generation.generate(
                prompt,
                self._params(kind, len(prompt), prompt_tail, grammar),
                conversation.request_id,
                counted,
                permit=permit,
                on_accepted=self._on_accepted,
            )
            self._readers = self._make_readers(prompt_tail, grammar)
            async with aclosing(outputs):
                async for output in outputs:
                    turn = self._read(output)
                    if output.finished:
                        if kind is RequestOutputKind.DELTA:
                            yield _before_the_end(turn)
                            turn.answers = [_end_of(answer) for answer in turn.answers]
                        await self._close(turn)
                    yield turn

    async def render(self) -> RenderedTurn:
        """Returns the prompt and the parameters of the turn's generation, without running it. RequestError as
        if it ran."""
        conversation = self._conversation
        self._server.check_params(conversation.params)
        with self._server.media_lease() as lease:
            token_ids, context = await self._prompt(conversation.context.owner, lease)
        tail = self._server.engine.tokenizer.decode(token_ids[-TAIL_TOKENS:])
        params = self._params(RequestOutputKind.FINAL_ONLY, len(token_ids), tail, self._grammar(tail))
        await self._server.engine.checked_request(token_ids, params, conversation.request_id, context)
        return RenderedTurn(token_ids, context.media, params)

    async def _prompt(self, owner: str | None, lease: MediaLease | None) -> tuple[list[int], RequestContext]:
        """Returns the prompt's tokens, and the context with the counts of its messages and its media."""
        conversation = self._conversation
        continued = self._conversation.continued
        context = conversation.context
        messages = conversation.messages
        if continued is not None:
            before = (continued.num_replies, continued.num_results)
            return continued.token_ids, with_history(context, messages, before=before)
        prompt = await self._server.prompts.encode_chat(conversation, owner=owner, lease=lease)
        context = with_history(context, messages, continues_last=conversation.continue_final_message)
        if prompt.media:
            context = msgspec.structs.replace(context, media=prompt.media)
        return prompt.token_ids, context

    async def count(self) -> int:
        """Counts the tokens of the prompt without keeping them all."""
        chat = self._conversation
        return await self._server.prompts.count_chat(chat, owner=chat.context.owner)

    def _grammar(self, prompt_tail: str) -> ReplyGrammar | None:
        """Returns the grammar that the reply must follow, for forced calls or for the requested output
        format."""
        conversation = self._conversation
        params = self._conversation.params
        choice = conversation.tool_choice
        asked = params.structured_outputs
        forced = choice == "required" or isinstance(choice, NamedTool)
        if params.replay_token_ids is not None:
            return None
        start = self._start(prompt_tail)
        if not forced and asked is None:
            return self._strict_calls(start)
        if isinstance(choice, NamedTool) and choice.free_input is not None:
            return forced_input(choice.free_input.grammar, choice.free_input.asked_in, start)
        tools = conversation.tools or []
        several = conversation.max_calls is None
        if asked is None or forced:
            name = choice.name if isinstance(choice, NamedTool) else None
            return forced_calls(tools, name, several, start)
        return requested_format(asked, tools if conversation.reads_calls else [], several, start)

    def _strict_calls(self, start: ReplyStart) -> ReplyGrammar | None:
        """Returns the grammar that enforces the texts of tools, or the schemas of strict ones, if the model
        may also call no tool."""
        tools = (self._conversation.tools or []) if self._conversation.reads_calls else []
        several = self._conversation.max_calls is None
        shown = {tool["function"]["name"] for tool in tools}
        texts = {name: text for name, text in self._conversation.free_inputs.items() if name in shown}
        of_texts = free_texts(tools, texts, several, start) if texts else None
        kept = texts if of_texts else {}
        strict = [
            name
            for tool in tools
            if tool["function"].get("strict") and (name := tool["function"]["name"]) not in kept
        ]
        if not strict:
            return of_texts
        grammar = of_texts or free_calls(tools, several, start)
        if grammar is of_texts:
            names = ", ".join(strict[:MAX_NAMES])
            self._not_enforced = [
                f"tools: strict ({names}) is not enforced in this model's format unless a call is required"
            ]
        return grammar

    async def _tell_of_texts(self, grammar: ReplyGrammar | None, owner: str | None) -> None:
        """Notes for the receipt which texts of tools cannot follow their grammar between the tags."""
        if grammar is None or grammar.params.texts is None:
            return
        kept = await asyncio.wrap_future(self._server.engine.check_grammar(grammar.params, owner))
        self._not_enforced += [
            f"{where}: the model sees it; it is not enforced, as it also matches the text that ends a call"
            for where, text in zip(grammar.texts_asked_in, kept.texts or (), strict=True)
            if text is None
        ]

    def _start(self, prompt_tail: str) -> ReplyStart:
        return ReplyStart(self._server.reply_format, self._server.engine.tokenizer.added_tokens, prompt_tail)

    def _params(
        self,
        kind: RequestOutputKind,
        num_prompt_tokens: int,
        prompt_tail: str,
        grammar: ReplyGrammar | None,
    ) -> SamplingParams:
        params = msgspec.structs.replace(self._conversation.params, output_kind=kind)
        start = self._start(prompt_tail)
        if params.stop:
            params.reasoning = text_before_stops(start)
        if grammar is not None:
            params.structured_outputs = grammar.params
        if self._server.reply_format.needs_special_tokens:
            params.skip_special_tokens = False
        if self._conversation.holds_calls_back and params.replay_token_ids is None:
            params.bad_words = [*params.bad_words, *self._server.reply_format.signs_of_calls]
        if params.max_tokens is None and params.replay_token_ids is None:
            params.max_tokens = self._server.default_max_tokens(num_prompt_tokens)
        self._limit_thinking(params, start)
        remaining = self._server.max_model_len - num_prompt_tokens
        if self._conversation.fits_context and params.max_tokens is not None and remaining > 0:
            params.max_tokens = min(params.max_tokens, remaining)
        return params

    def _limit_thinking(self, params: SamplingParams, start: ReplyStart) -> None:
        """Limits reasoning to the requested budget; a budget derived from an effort only if the format
        supports it."""
        span = reasoning_before(start)
        can = span is not None and {span.end, span.start} - {None} <= start.added_tokens.keys()
        budget = params.thinking_token_budget
        if budget is None and can:
            budget = self._conversation.thinking_budget
        if budget is not None and params.replay_token_ids is None and (can or not self._has_answered(start)):
            params.thinking_token_budget = budget
            params.reasoning = span
        else:
            params.thinking_token_budget = None

    @staticmethod
    def _has_answered(start: ReplyStart) -> bool:
        """Whether the prompt has closed the reasoning, so that none can follow."""
        tags = start.reply_format.think_tags
        return tags is not None and tags.open_in(start.prompt_tail) is False

    def _make_readers(self, prompt_tail: str, grammar: ReplyGrammar | None) -> list[AnswerReader]:
        conversation = self._conversation
        tools = conversation.tools if conversation.reads_calls else None
        calls_as_json = grammar is not None and grammar.calls_as_json
        choice = conversation.tool_choice
        input_of = None
        if grammar is not None and isinstance(choice, NamedTool) and choice.free_input is not None:
            input_of = (choice.name, choice.free_input.parameter)
        return [
            AnswerReader(
                self._server.reply_format.parser(
                    tools, prompt_tail, calls_as_json=calls_as_json, input_of=input_of
                ),
                conversation.max_calls,
                conversation.include_reasoning,
                named=isinstance(conversation.tool_choice, NamedTool),
            )
            for _ in range(conversation.params.n)
        ]

    def _read(self, output: RequestOutput) -> TurnOutput:
        answers = [self._readers[answer.index].read(answer) for answer in output.outputs]
        usage = TurnUsage(
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=sum(reader.num_tokens for reader in self._readers),
            cached_tokens=output.num_cached_tokens,
        )
        return TurnOutput(answers, output, usage, output.finished)

    async def _close(self, turn: TurnOutput) -> None:
        """Reports the tool calls to the engine, and stores the returned receipt."""
        for reader in self._readers:
            if reasoning := reader.reply.reasoning:
                owner = self._conversation.context.owner
                tokens = await self._server.prompts.encode(reasoning, add_special_tokens=False, owner=owner)
                turn.usage.reasoning_tokens += len(tokens)
        calls = [call for reader in self._readers for call in reader.announced_calls()]
        if self._server.config.receipts:
            media = self._conversation.media
            not_shown = [] if media is None else media.notes[:MAX_NOTES]
            turn.usage.left_out = [*self._conversation.left_out, *not_shown, *self._not_enforced]
        turn.receipt = await self._server.close_turn(self._conversation.context, turn.output, calls)


def _before_the_end(turn: TurnOutput) -> TurnOutput:
    """Returns the output without its end, which follows with the receipt."""
    return replace(
        turn,
        answers=[replace(answer, finish_reason=None) for answer in turn.answers],
        finished=False,
    )


def _end_of(answer: AnswerOutput) -> AnswerOutput:
    """Returns only the end of the answer, whose text has already been sent."""
    raw = replace(answer.raw, text="", token_ids=[], logprobs=None)
    return replace(answer, deltas=[], raw=raw)
