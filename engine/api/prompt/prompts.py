"""Renders chats and tokenizes texts for one model, off the event loop if that takes long.

This module does not know HTTP or the use of a prompt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.api.config import ServerConfig
from engine.api.prompt.appended_chat import STAND_IN_TOOL, HistoryShape, appended_text
from engine.api.prompt.chat_messages import Message, normalize
from engine.api.prompt.open_end import without_end
from engine.api.prompt.prompt_media import PromptMedia
from engine.api.prompt.strict_templates import in_some_shape
from engine.api.prompt.system_messages import with_one_system
from engine.api.prompt.volatile_prefix import BILLING_HEADER, without_billing_header
from engine.errors import ContextLengthError, RequestError
from engine.frontend.input_processor import may_fit, prompt_too_long
from engine.media.placeholders import Placeholders
from engine.media.store import MediaLease, StoredMedia
from engine.records.media import MediaKind
from engine.records.messages import MediaSpan
from engine.tokenization.content_format import ContentFormat
from engine.tokenization.prompt_encoder import ContinuedTokens
from engine.tokenization.tokenizer import INLINE_CHARS, Tokenizer
from engine.tool_parsers.call_ids import CallIds, with_native_ids

MAX_COUNTED_CHARS = 2**20
"""A prompt that cannot fit is tokenized up to this length, to report its token count within a second."""
INLINE_MESSAGES = 32
"""Longer chats are rendered on another thread."""
INLINE_CHAT_CHARS = 16 * INLINE_CHARS
"""Chats with more text are rendered on another thread. Templates are much faster than tokenizers."""
MAX_LISTED_TOKENS = 4 * 2**20
"""Maximum number of tokens of one text that are listed; a body of the default size limit may contain eight
times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Arguments of a chat template; messages and tools have OpenAI's chat format."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """Tools stay in the prompt even if none may be called: removing them would change all of its tokens."""
    chat_template: str | None = None
    """None means the server's template, else the tokenizer's."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    is_open: bool = False
    """Whether the last message may still grow: the prompt ends with its text."""
    media: PromptMedia | None = None
    """The media that marks in the messages represent; None if the model reads text only."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt, and the positions of its pictures and clips."""

    token_ids: list[int]
    media: tuple[MediaSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptSoFar:
    """All tokens of a turn that ended, prompt and reply, for the prompt that continues it."""

    turn_id: str
    """The request id with which the turn was generated."""
    token_ids: list[int]
    highest: int
    """An upper bound of the token ids."""
    shape: HistoryShape
    """Properties of the turn's prompt, without its reply."""


class Prompts:
    """Tokenizes texts and chats with one server's options."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        config: ServerConfig,
        on_volatile_text: Callable[[str], None],
        placeholders: Placeholders | None = None,
        call_ids: CallIds | None = None,
    ) -> None:
        """``on_volatile_text`` is called with the name of each text removed from a prompt. ``placeholders``:
        those of pictures and clips; None if the model reads only text. ``call_ids``: the ids of calls that
        the chat template accepts; None if it accepts any."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._chat_template = config.chat_template
        self._content_format = ContentFormat(config.chat_template_content_format)
        self._trusts_templates = config.trust_request_chat_template
        self._separates_owners = config.access.separates_owners
        self._on_volatile_text = on_volatile_text
        self._placeholders = placeholders
        self._call_ids = call_ids

    async def encode(
        self, text: str, *, add_special_tokens: bool, owner: str | None, is_prompt: bool = False
    ) -> list[int]:
        """Tokenizes a text. ``is_prompt``: ContextLengthError if it certainly exceeds the context."""
        owner = owner if self._separates_owners else None

        def encode() -> list[int] | None:
            if is_prompt and not may_fit(self._tokenizer, text, self._max_model_len):
                return None
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, owner=owner)

        tokens = encode() if len(text) <= INLINE_CHARS else await asyncio.to_thread(encode)
        if tokens is None:
            raise await self._too_long(text, add_special_tokens, owner)
        return tokens

    async def encode_chat(
        self, chat: ChatPrompt, *, owner: str | None, lease: MediaLease | None = None
    ) -> Prompt:
        """Renders and tokenizes a chat; ``lease`` holds its media. ContextLengthError if it certainly
        exceeds the context."""
        text, media = await self._rendered(chat, owner, lease)
        tokens = await self.encode(text, add_special_tokens=False, owner=owner, is_prompt=True)
        if self._placeholders is None or not media:
            return Prompt(tokens)
        num_tokens = len(tokens) + self._placeholders.num_more(media)
        if num_tokens >= self._max_model_len:
            raise prompt_too_long(num_tokens, self._max_model_len)
        return Prompt(*self._placeholders.expanded(tokens, media))

    async def continue_chat(
        self, known: PromptSoFar, chat: ChatPrompt, *, owner: str | None
    ) -> ContinuedTokens | None:
        """Returns the prompt of a chat of which only the last reply and what follows it are given.

        None if the chat must be rendered as a whole: the template does not only append to a prompt, or the
        tokenizer does not know where a text may be split.
        """
        end = self._tokenizer.token_text(known.token_ids[-1])
        tools = [STAND_IN_TOOL] if chat.tools else None
        normal = self._normalized(chat.messages)
        if self._placeholders is not None:
            normal = self._placeholders.blind(normal)

        def render(messages: list[Message], with_reply: bool) -> str:
            return self._tokenizer.chat_text(
                messages,
                tools,
                self._chat_template,
                with_reply,
                chat_template_kwargs=chat.chat_template_kwargs,
                content_format=self._content_format,
            )

        def tokens() -> list[int] | None:
            text = appended_text(normal[0], normal[1:], end, known.shape, render)
            if text is None or not may_fit(self._tokenizer, text, self._max_model_len):
                return None
            if chat.is_open:
                text = without_end(text, normal)
            separated = owner if self._separates_owners else None
            return self._tokenizer.encode_behind(known.token_ids[-1], text, owner=separated)

        is_short = not _is_long(chat.messages, INLINE_CHARS)
        new = tokens() if is_short else await asyncio.to_thread(tokens)
        if new is None:
            return None
        return ContinuedTokens(known.token_ids, new, known.highest, known.turn_id)

    async def _rendered(
        self, chat: ChatPrompt, owner: str | None, lease: MediaLease | None
    ) -> tuple[str, list[StoredMedia]]:
        """Renders a chat, with a placeholder for each picture and clip. RequestError without a template, or
        if the template refuses the messages."""
        if chat.chat_template is not None and not self._trusts_templates:
            raise RequestError(
                "chat_template in requests needs a server with --trust-request-chat-template.",
                "chat_template",
            )
        normal = with_one_system(self._without_volatile_text(self._normalized(chat.messages)))
        media: list[StoredMedia] = []
        if chat.media is not None:
            media = await chat.media.read(normal, owner if self._separates_owners else None, lease)
        render = partial(self._render, chat, Counter(each.kind for each in media))
        if chat.chat_template is not None or _is_long(chat.messages):  # a client's template may run forever
            text = await asyncio.to_thread(in_some_shape, normal, render)
        else:
            text = in_some_shape(normal, render)
        return without_end(text, normal) if chat.is_open else text, media

    def _normalized(self, messages: list[Message]) -> list[Message]:
        normal = normalize(messages)
        return normal if self._call_ids is None else with_native_ids(normal, self._call_ids)

    def _render(self, chat: ChatPrompt, counts: Mapping[MediaKind, int], messages: list[Message]) -> str:
        template = chat.chat_template or self._chat_template
        tools = chat.tools

        def render(shown: list[Message]) -> str:
            return self._tokenizer.chat_text(
                shown,
                tools,
                template,
                chat.add_generation_prompt,
                chat.continue_final_message,
                chat.chat_template_kwargs,
                self._content_format,
            )

        placeholders = self._placeholders
        if placeholders is None:
            return render(messages)
        if chat.media is not None:
            messages = chat.media.resolved(messages)
        messages = placeholders.blind(messages)
        tools = placeholders.blind(tools)
        in_parts = self._tokenizer.reads_parts(template, tools, self._content_format)
        return placeholders.rendered(messages, counts, render, in_parts=in_parts)

    def _without_volatile_text(self, messages: list[Message]) -> list[Message]:
        without = without_billing_header(messages)
        if without is None:
            return messages
        self._on_volatile_text(BILLING_HEADER)
        return without

    # ---- texts of any length ----

    async def count(self, text: str, *, add_special_tokens: bool, owner: str | None) -> int:
        """The number of tokens of a text of any length."""
        num_tokens = 0
        async for tokens in self._steps(text, add_special_tokens, owner):
            num_tokens += len(tokens)
        return num_tokens

    async def count_chat(self, chat: ChatPrompt, *, owner: str | None) -> int:
        """The number of tokens that ``encode_chat`` would return, counted without keeping them all."""
        text, media = await self._rendered(chat, owner, None)
        num_more = 0 if self._placeholders is None else self._placeholders.num_more(media)
        return await self.count(text, add_special_tokens=False, owner=owner) + num_more

    async def list_chat(self, chat: ChatPrompt, *, owner: str | None) -> list[int]:
        """Returns all tokens of ``encode_chat``, for display; RequestError if there are too many."""
        text, media = await self._rendered(chat, owner, None)
        tokens = await self.encode_all(text, add_special_tokens=False, owner=owner)
        if self._placeholders is None or not media:
            return tokens
        if len(tokens) + self._placeholders.num_more(media) > MAX_LISTED_TOKENS:
            raise _too_many_listed()
        return self._placeholders.expanded(tokens, media)[0]

    async def encode_all(self, text: str, *, add_special_tokens: bool, owner: str | None) -> list[int]:
        """Returns all tokens of a text, for display; RequestError if there are too many."""
        listed: list[int] = []
        async for tokens in self._steps(text, add_special_tokens, owner):
            listed += tokens
            if len(listed) > MAX_LISTED_TOKENS:
                raise _too_many_listed()
        return listed

    async def _too_long(self, text: str, add_special_tokens: bool, owner: str | None) -> ContextLengthError:
        """Returns the error with the prompt's token count, unless counting would take long."""
        if len(text) > MAX_COUNTED_CHARS:
            return prompt_too_long(None, self._max_model_len, len(text))
        num_tokens = await self.count(text, add_special_tokens=add_special_tokens, owner=owner)
        return prompt_too_long(num_tokens, self._max_model_len)

    async def _steps(
        self, text: str, add_special_tokens: bool, owner: str | None
    ) -> AsyncGenerator[list[int], None]:
        """Yields tokens in chunks. A long text is tokenized on another thread, which does other work between
        chunks."""
        if len(text) <= INLINE_CHARS:
            yield self._tokenizer.encode(text, add_special_tokens=add_special_tokens, owner=owner)
            return
        steps = self._tokenizer.steps(text, add_special_tokens, owner)
        while (tokens := await asyncio.to_thread(next, steps, None)) is not None:
            yield tokens


def _too_many_listed() -> RequestError:
    return RequestError(
        f"The text has more than {MAX_LISTED_TOKENS} tokens, the limit; the endpoints that only count tokens "
        "accept more.",
        "prompt",
    )


def _is_long(messages: Sequence[Message], max_chars: int = INLINE_CHAT_CHARS) -> bool:
    """Whether rendering the chat would block the event loop for long."""
    if len(messages) > INLINE_MESSAGES:
        return True
    num_characters = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else (content,)
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            num_characters += len(text) if isinstance(text, str) else 0
    return num_characters > max_chars
