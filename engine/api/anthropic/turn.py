"""Writes a turn's outputs as content blocks and events of the Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET

from engine.api.anthropic.bodies import (
    BlockDelta,
    BlockEvent,
    CacheCreation,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Event,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from engine.api.anthropic.cache_inquiry import CacheInquiry
from engine.api.anthropic.input import tool_use_id
from engine.api.anthropic.thinking import sign
from engine.api.http import sse
from engine.api.openai.bodies import receipt_fields
from engine.api.turn.conversation_turn import TurnOutput
from engine.api.turn.usage import TurnUsage
from engine.tool_parsers import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta
from engine.tool_parsers.arguments import CallArguments

SHORT_LIFETIME_S = 300.0
"""Anthropic's shorter lifetime of a breakpoint, which is the default."""


class OpenBlock(Protocol):
    """A content block that is still growing."""

    def start(self) -> ContentBlock:
        """Returns the empty block that announces it."""

    def takes(self, delta: ReplyDelta) -> bool:
        """Whether the delta belongs to this block; otherwise the block has ended."""

    def add(self, delta: ReplyDelta) -> BlockDelta | None:
        """Returns the event of the delta; None if nothing is sent for it (yet)."""

    def nothing(self) -> BlockDelta:
        """Returns an event that adds nothing."""

    def close(self) -> BlockDelta | None:
        """Returns the event that completes the block, if it needs one."""

    def block(self) -> ContentBlock:
        """The complete block, once it is closed."""


@dataclass(slots=True)
class _Text:
    _pieces: list[str] = field(default_factory=list)

    def start(self) -> ContentBlock:
        return TextBlock("")

    def takes(self, delta: ReplyDelta) -> bool:
        return isinstance(delta, ContentDelta)

    def add(self, delta: ReplyDelta) -> BlockDelta | None:
        assert isinstance(delta, ContentDelta)
        self._pieces.append(delta.text)
        return TextDelta(delta.text) if delta.text else None

    def nothing(self) -> BlockDelta:
        return TextDelta("")

    def close(self) -> BlockDelta | None:
        return None

    def block(self) -> ContentBlock:
        return TextBlock("".join(self._pieces))


@dataclass(slots=True)
class _Thinking:
    _omits_text: bool
    _pieces: list[str] = field(default_factory=list)

    def start(self) -> ContentBlock:
        return ThinkingBlock("", "")

    def takes(self, delta: ReplyDelta) -> bool:
        return isinstance(delta, ReasoningDelta)

    def add(self, delta: ReplyDelta) -> BlockDelta | None:
        assert isinstance(delta, ReasoningDelta)
        self._pieces.append(delta.text)
        return ThinkingDelta(delta.text) if delta.text and not self._omits_text else None

    def nothing(self) -> BlockDelta:
        return ThinkingDelta("")

    def close(self) -> BlockDelta | None:
        return SignatureDelta(self._signature())

    def block(self) -> ContentBlock:
        text = "" if self._omits_text else "".join(self._pieces)
        return ThinkingBlock(text, self._signature())

    def _signature(self) -> str:
        return sign("".join(self._pieces), with_text=self._omits_text)


@dataclass(slots=True)
class _ToolUse:
    _index: int
    _id: str
    _name: str
    _input: CallArguments = field(default_factory=CallArguments)

    def start(self) -> ContentBlock:
        return ToolUseBlock(self._id, self._name, msgspec.Raw(b"{}"))

    def takes(self, delta: ReplyDelta) -> bool:
        return isinstance(delta, ToolCallDelta) and delta.index == self._index

    def add(self, delta: ReplyDelta) -> BlockDelta | None:
        assert isinstance(delta, ToolCallDelta)
        piece = self._input.feed(delta.arguments)
        return InputJsonDelta(piece) if piece else None

    def nothing(self) -> BlockDelta:
        return InputJsonDelta("")

    def close(self) -> BlockDelta | None:
        rest = self._input.finish()
        return InputJsonDelta(rest) if rest else None

    def block(self) -> ContentBlock:
        return ToolUseBlock(self._id, self._name, msgspec.Raw(self._input.text.encode()))


class ReplyBlocks:
    """The blocks of one reply, in the order in which the model wrote them.

    Their content does not depend on how deltas were split: complete responses are built in the
    same steps.
    """

    def __init__(self, *, omits_thinking: bool) -> None:
        self.content: list[ContentBlock] = []
        """The completed blocks."""
        self._omits_thinking = omits_thinking
        self._open: OpenBlock | None = None

    @property
    def calls_tools(self) -> bool:
        return any(isinstance(block, ToolUseBlock) for block in self.content)

    def add(self, deltas: Sequence[ReplyDelta]) -> Iterator[BlockEvent]:
        for delta in deltas:
            if self._open is None or not self._open.takes(delta):
                yield from self.finish()
                self._open = self._opened_by(delta)
                yield ContentBlockStart(len(self.content), self._open.start())
            added = self._open.add(delta)
            if added is not None:
                yield ContentBlockDelta(len(self.content), added)

    def add_nothing(self) -> Iterator[BlockEvent]:
        """Yields an empty delta of the open block. If none is open, an empty text begins: other blocks have
        content that clients must send back unchanged."""
        if self._open is None:
            self._open = _Text()
            yield ContentBlockStart(len(self.content), self._open.start())
        yield ContentBlockDelta(len(self.content), self._open.nothing())

    def finish(self) -> Iterator[BlockEvent]:
        """Ends the open block, if any."""
        if self._open is None:
            return
        index = len(self.content)
        rest = self._open.close()
        if rest is not None:
            yield ContentBlockDelta(index, rest)
        self.content.append(self._open.block())
        self._open = None
        yield ContentBlockStop(index)

    def _opened_by(self, delta: ReplyDelta) -> OpenBlock:
        if isinstance(delta, ContentDelta):
            return _Text()
        if isinstance(delta, ReasoningDelta):
            return _Thinking(self._omits_thinking)
        assert delta.call_id is not None, "a call goes on after another has begun"
        assert delta.name is not None
        return _ToolUse(delta.index, tool_use_id(delta.call_id), delta.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTerms:
    """Parts of the request that determine the format of the response."""

    message_id: str
    model_name: str
    max_tokens: int
    """The client's limit; 0 only prefills the prompt."""
    max_model_len: int
    stop_sequences: list[str]
    cache_block_tokens: int | None
    """Tokens per cache block if the client asked to cache its prompt; otherwise None."""
    asked_lifetime_s: float | None = None
    omits_thinking: bool = False
    returns_token_ids: bool = False


class MessageAnswer:
    """Builds one response of the Messages API from a turn's outputs, complete or as events."""

    def __init__(self, terms: MessageTerms, inquiry: CacheInquiry) -> None:
        """``inquiry``: what the client asks about its earlier prompt."""
        self._terms = terms
        self._inquiry = inquiry
        self._blocks = ReplyBlocks(omits_thinking=terms.omits_thinking)
        self._may_have_content = terms.max_tokens > 0
        self._has_begun = False
        """Whether it has begun."""

    async def whole(self, turn: TurnOutput) -> Message:
        """The response body of a turn that is complete."""
        for _ in self._content(turn):
            pass
        stop = self._stop(turn)
        message = self._message(turn, self._blocks.content, stop.stop_reason, stop.stop_sequence)
        await self._inquiry.keep(self._terms.message_id, turn)
        if self._terms.returns_token_ids:
            message.prompt_token_ids = turn.output.prompt_token_ids
            message.token_ids = turn.answers[0].raw.token_ids
        return message

    async def events(
        self, turns: AsyncGenerator[TurnOutput, None], num_prompt_tokens: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yields the response as server-sent events.

        ``num_prompt_tokens``: set if the message must begin before the first output. It then starts with this
        count, and the last event's usage has the cached tokens.
        """
        is_first = num_prompt_tokens is None
        async with aclosing(turns):
            if num_prompt_tokens is not None:
                yield _sent(MessageStart(self._begun(num_prompt_tokens)))
                yield _sent(Ping())
                self._has_begun = True
            async for turn in turns:
                if is_first:
                    yield _sent(MessageStart(self._message(turn, [], None, None)))
                    yield _sent(Ping())
                    is_first = False
                    self._has_begun = True
                for event in self._content(turn):
                    yield _sent(event)
                if turn.finished:
                    await self._inquiry.keep(self._terms.message_id, turn)
                    yield _sent(MessageDelta(self._stop(turn), self._usage(turn)))
                    yield _sent(MessageStop())

    def sign_of_life(self) -> bytes:
        """Events that change nothing. Unlike a ping, a client's program receives them.

        A ``message_delta`` is not possible: a second one ends the answer for some clients.
        """
        if not (self._has_begun and self._may_have_content):
            return sse.KEEP_ALIVE
        return b"".join(map(_sent, self._blocks.add_nothing()))

    def _content(self, turn: TurnOutput) -> Iterator[BlockEvent]:
        if not self._may_have_content:
            return
        yield from self._blocks.add(turn.answers[0].deltas)
        if turn.finished:
            yield from self._blocks.finish()

    def _message(
        self,
        turn: TurnOutput,
        content: list[ContentBlock],
        stop_reason: str | None,
        stop_sequence: str | None,
    ) -> Message:
        return Message(
            id=self._terms.message_id,
            model=self._terms.model_name,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self._usage(turn),
            diagnostics=self._inquiry.answer(turn),
        )

    def _begun(self, num_prompt_tokens: int) -> Message:
        usage = Usage(
            input_tokens=num_prompt_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=0,
            output_tokens=0,
        )
        return Message(
            id=self._terms.message_id,
            model=self._terms.model_name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage,
            diagnostics=self._inquiry.pending,
        )

    def _stop(self, turn: TurnOutput) -> StopDelta:
        answer = turn.answers[0]
        if answer.finish_reason == "length":
            return StopDelta(self._limit(turn.usage), None)
        if self._blocks.calls_tools and not answer.is_cut_in_call:
            return StopDelta("tool_use", None)
        if isinstance(answer.stop_reason, str) and answer.stop_reason in self._terms.stop_sequences:
            return StopDelta("stop_sequence", answer.stop_reason)
        return StopDelta("end_turn", None)

    def _limit(self, usage: TurnUsage) -> str:
        """The limit that was reached: the client's, or the model's context."""
        remaining = self._terms.max_model_len - usage.prompt_tokens
        is_full = usage.completion_tokens >= remaining and self._terms.max_tokens > remaining
        return "model_context_window_exceeded" if is_full else "max_tokens"

    def _usage(self, turn: TurnOutput) -> Usage:
        usage = turn.usage
        uncached = usage.prompt_tokens - usage.cached_tokens
        created = 0
        if self._terms.cache_block_tokens is not None:  # only full blocks are cached
            created = max(0, uncached - usage.prompt_tokens % self._terms.cache_block_tokens)
        thinking = OutputTokensDetails(usage.reasoning_tokens) if usage.reasoning_tokens else UNSET
        lasts_long = (self._terms.asked_lifetime_s or 0.0) > SHORT_LIFETIME_S
        return Usage(
            input_tokens=uncached - created,
            cache_creation=CacheCreation(0, created) if lasts_long else CacheCreation(created, 0),
            cache_creation_input_tokens=created,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=thinking,
            receipt=receipt_fields(turn.receipt, usage.left_out),
        )


def _sent(event: Event) -> bytes:
    """Encodes an event; its name is sent both in its line and in its body."""
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return sse.event(event, name)
