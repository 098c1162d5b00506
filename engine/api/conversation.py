"""One turn of a conversation, whichever API it was asked through: rendered, generated, read and closed.

It must not know how any dialect spells its requests or its answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from engine.api.chat_messages import Message
from engine.api.identity import with_history
from engine.api.served_model import ServedModel
from engine.api.usage import TurnUsage
from engine.errors import EngineGenerateError
from engine.messages import NO_CONTEXT, RequestContext, ToolCall, TurnReceipt
from engine.request_output import CompletionOutput, RequestOutput
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.structured_output.reply_grammar import (
    ReplyGrammar,
    ReplyStart,
    asked_form,
    before_stops,
    forced_calls,
    forced_input,
    free_calls,
)
from engine.tool_parsers import (
    ParsedReply,
    ReasoningDelta,
    ReplyDelta,
    ReplyParser,
    ToolCallDelta,
    read_fenced_command,
)
from engine.tool_parsers.sound_calls import SoundCalls

MAX_NAMES = 8
"""Of tools, in a sentence."""
TAIL_TOKENS = 16
"""Of the prompt's end, that a reply parser is shown: it may already have opened a section of the reply."""


@dataclass(frozen=True, slots=True)
class FreeInput:
    """The text that a tool takes as its one argument."""

    parameter: str
    grammar: str
    """In Lark."""
    asked_in: str
    """The field that has it, for errors."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that the reply must call."""

    name: str
    free_input: FreeInput | None = None
    """Set if its one argument is a text that follows a grammar: the reply is that text alone."""


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a client asks for, in no dialect: messages and tools have OpenAI's chat shape."""

    request_id: str
    messages: list[Message]
    params: SamplingParams
    """``max_tokens`` None is the model's own limit, else what is left of the context."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    context: RequestContext = NO_CONTEXT
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    fits_context: bool = False
    """Whether ``max_tokens`` beyond the room that the prompt leaves means that room; else it is an error."""
    include_reasoning: bool = True
    """Whether what the model thinks is given out; it is read as such in any case."""
    left_out: list[str] = field(default_factory=list)
    """What of the request is not in it, as there is nothing that a text model could be shown."""

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def holds_calls_back(self) -> bool:
        """Whether the model sees tools of which it may call none."""
        return bool(self.tools) and self.tool_choice == "none"

    @property
    def max_calls(self) -> int | None:
        """Most tool calls of one answer; None is no limit."""
        return None if self.parallel_tool_calls else 1


@dataclass(slots=True)
class AnswerOutput:
    """What is new of one answer, and the sum so far."""

    index: int
    deltas: list[ReplyDelta]
    reply: ParsedReply
    raw: CompletionOutput
    """Tokens and logprobs of what is new."""
    finish_reason: str | None = None
    """``stop`` | ``length`` | ``tool_calls``; None while the answer goes on."""
    is_cut_in_call: bool = False
    """Whether it ended in the middle of its last call: that one is not to be run."""

    @property
    def stop_reason(self) -> int | str | None:
        return self.raw.stop_reason


@dataclass(slots=True)
class TurnOutput:
    """What is new of a turn. The last one has ``finished`` set, and the receipt where there is one."""

    answers: list[AnswerOutput]
    output: RequestOutput
    usage: TurnUsage
    finished: bool = False
    receipt: TurnReceipt | None = None


class ConversationTurn:
    """A conversation on its way through the engine. Used once: by ``stream`` or by ``whole``."""

    def __init__(
        self,
        model: ServedModel,
        conversation: Conversation,
        on_taken: Callable[[], None] | None = None,
    ) -> None:
        """``on_taken`` is called when the engine has it: few things are refused after that."""
        self._model = model
        self._conversation = conversation
        self._on_taken = on_taken
        self.num_prompt_tokens = 0
        """Once it is rendered."""
        self._readers: list[_AnswerReader] = []
        self._not_enforced: list[str] = []
        """What of the request the reply is not kept to, in sentences for the receipt."""

    async def whole(self) -> TurnOutput:
        """The complete turn: all of each answer is in its ``reply``."""
        last: TurnOutput | None = None
        async for turn in self.stream(RequestOutputKind.FINAL_ONLY):
            last = turn
        if last is None:
            raise EngineGenerateError("The engine ended the request without an output.")
        return last

    async def stream(
        self, kind: RequestOutputKind = RequestOutputKind.DELTA
    ) -> AsyncGenerator[TurnOutput, None]:
        """Outputs as they come; the first with the engine's first output, not before.

        The last one waits for the receipt, text never does.
        """
        conversation = self._conversation
        self._model.check_params(conversation.params)
        with self._model.seat(conversation.params.n, conversation.context) as seat:
            prompt = await self.render(is_prompt=True)
            self.num_prompt_tokens = len(prompt)
            prompt_tail = self._model.engine.tokenizer.decode(prompt[-TAIL_TOKENS:])
            grammar = self._grammar(prompt_tail)
            outputs = self._model.generate(
                prompt,
                self._params(kind, len(prompt), prompt_tail, grammar),
                conversation.request_id,
                with_history(
                    conversation.context,
                    conversation.messages,
                    continues_last=conversation.continue_final_message,
                ),
                seat=seat,
                on_taken=self._on_taken,
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

    async def render(self, *, is_prompt: bool = False) -> list[int]:
        """The prompt's tokens; ``is_prompt``: they are to be served."""
        return await self._model.render_chat(**self._chat(), is_prompt=is_prompt)

    async def count(self) -> int:
        """How many tokens the prompt has, in little memory."""
        return await self._model.count_chat(**self._chat())

    def _chat(self) -> dict[str, Any]:
        conversation = self._conversation
        # Tools stay in the prompt where none may be called: leaving them out would change all of its tokens.
        return {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "chat_template": conversation.chat_template,
            "chat_template_kwargs": conversation.chat_template_kwargs,
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
            "owner": conversation.context.owner,
        }

    def _grammar(self, prompt_tail: str) -> ReplyGrammar | None:
        """What the reply must follow: calls that are wanted, or the form that was asked for."""
        conversation, params = self._conversation, self._conversation.params
        choice, asked = conversation.tool_choice, params.structured_outputs
        forced = choice == "required" or isinstance(choice, NamedTool)
        if params.replay_token_ids is not None:
            return None
        start = self._start(prompt_tail)
        if not forced and asked is None:
            return self._strict_calls(start)
        if isinstance(choice, NamedTool) and choice.free_input is not None:
            return forced_input(choice.free_input.grammar, choice.free_input.asked_in, start)
        tools, several = conversation.tools or [], conversation.max_calls is None
        if asked is None or forced:
            name = choice.name if isinstance(choice, NamedTool) else None
            return forced_calls(tools, name, several, start)
        return asked_form(asked, tools if conversation.reads_calls else [], several, start)

    def _strict_calls(self, start: ReplyStart) -> ReplyGrammar | None:
        """What keeps calls to their schemas where the model need not call, if a tool is strict."""
        tools = (self._conversation.tools or []) if self._conversation.reads_calls else []
        strict = [str(tool["function"]["name"]) for tool in tools if tool["function"].get("strict")]
        if not strict:
            return None
        grammar = free_calls(tools, self._conversation.max_calls is None, start)
        if grammar is None:
            names = ", ".join(strict[:MAX_NAMES])
            self._not_enforced = [
                f"tools: strict ({names}) is not enforced in this model's format unless a call is required"
            ]
        return grammar

    def _start(self, prompt_tail: str) -> ReplyStart:
        return ReplyStart(self._model.reply_format, self._model.engine.tokenizer.added_tokens, prompt_tail)

    def _params(
        self,
        kind: RequestOutputKind,
        num_prompt_tokens: int,
        prompt_tail: str,
        grammar: ReplyGrammar | None,
    ) -> SamplingParams:
        params = msgspec.structs.replace(self._conversation.params, output_kind=kind)
        if params.stop:
            params.thought = before_stops(self._start(prompt_tail))
        if grammar is not None:
            params.structured_outputs = grammar.params
        if self._model.reply_format.needs_special_tokens:
            params.skip_special_tokens = False
        if self._conversation.holds_calls_back and params.replay_token_ids is None:
            params.bad_words = [*params.bad_words, *self._model.reply_format.signs_of_calls]
        if params.max_tokens is None and params.replay_token_ids is None:
            params.max_tokens = self._model.default_max_tokens(num_prompt_tokens)
        room = self._model.max_model_len - num_prompt_tokens
        if self._conversation.fits_context and params.max_tokens is not None and room > 0:
            params.max_tokens = min(params.max_tokens, room)
        return params

    def _make_readers(self, prompt_tail: str, grammar: ReplyGrammar | None) -> list[_AnswerReader]:
        conversation = self._conversation
        tools = conversation.tools if conversation.reads_calls else None
        calls_as_json = grammar is not None and grammar.calls_as_json
        choice, input_of = conversation.tool_choice, None
        if grammar is not None and isinstance(choice, NamedTool) and choice.free_input is not None:
            input_of = (choice.name, choice.free_input.parameter)
        return [
            _AnswerReader(
                self._model.reply_format.parser(
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
        """Tell the engine which tools run now; what it did about the job's KV comes back."""
        for reader in self._readers:
            if reasoning := reader.reply.reasoning:
                owner = self._conversation.context.owner
                tokens = await self._model.encode(reasoning, add_special_tokens=False, owner=owner)
                turn.usage.reasoning_tokens += len(tokens)
        calls = [call for reader in self._readers for call in reader.announced_calls()]
        if self._model.gives_receipts:
            turn.usage.left_out = [*self._conversation.left_out, *self._not_enforced]
        turn.receipt = await self._model.close_turn(self._conversation.context, turn.output, calls)


def _before_the_end(turn: TurnOutput) -> TurnOutput:
    """The same news without saying that it is the last; of several answers, the earlier ends stay."""
    return replace(
        turn,
        answers=[replace(answer, finish_reason=None) for answer in turn.answers],
        finished=False,
    )


def _end_of(answer: AnswerOutput) -> AnswerOutput:
    """The answer's end alone: its text has been given out."""
    raw = replace(answer.raw, text="", token_ids=[], logprobs=None)
    return replace(answer, deltas=[], raw=raw)


@dataclass(slots=True)
class _AnswerReader:
    """One of the ``n`` answers as it is read."""

    _parser: ReplyParser
    _max_calls: int | None
    _include_reasoning: bool
    named: bool
    """The one tool to call was given by name: its call is then an ordinary stop, as in V1."""
    reply: ParsedReply = field(default_factory=ParsedReply)
    num_tokens: int = 0
    _is_cut_in_call: bool = False
    """Nobody is to run half of its arguments."""

    def read(self, answer: CompletionOutput) -> AnswerOutput:
        self.num_tokens += len(answer.token_ids)
        deltas = self._take(self._parser.feed(answer.text))
        if answer.finished:
            deltas += self._take(self._end_parser(answer))
            self._is_cut_in_call = bool(self.reply.calls) and not _is_json(self.reply.calls[-1].arguments)
        if not self._include_reasoning:
            deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
        finish_reason = self._finish_reason(answer)
        return AnswerOutput(
            answer.index, deltas, self.reply, answer, finish_reason, is_cut_in_call=self._is_cut_in_call
        )

    def _take(self, read: list[ReplyDelta]) -> list[ReplyDelta]:
        """What the client wants of it, which is the reply's from now on."""
        deltas = [delta for delta in read if not self._beyond_limit(delta)]
        self.reply.add(deltas)
        return deltas

    def _end_parser(self, answer: CompletionOutput) -> list[ReplyDelta]:
        if isinstance(self._parser, SoundCalls):
            by_itself = answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str)
            return self._parser.finish(is_whole=by_itself)
        return self._parser.finish()

    def _beyond_limit(self, delta: ReplyDelta) -> bool:
        """Whether this is of a call that the client did not want beside the first."""
        return (
            self._max_calls is not None
            and isinstance(delta, ToolCallDelta)
            and delta.index >= self._max_calls
        )

    def _finish_reason(self, answer: CompletionOutput) -> str | None:
        """A reply cut off by its length, or in a call, says so, even if there was a call before the cut.

        A model that ends its turn in the middle of a call has been cut off too: there is more to be said.
        """
        if answer.finish_reason != "stop":
            return answer.finish_reason
        if self._is_cut_in_call:
            return "stop" if isinstance(answer.stop_reason, str) else "length"
        return "tool_calls" if self.reply.calls and not self.named else "stop"

    def announced_calls(self) -> list[ToolCall]:
        """What runs next: the tool calls, or the command of a text agent."""
        if self.reply.calls:
            return self.reply.tool_calls[:-1] if self._is_cut_in_call else self.reply.tool_calls
        command = read_fenced_command(self.reply.content)
        return [command] if command is not None else []


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
