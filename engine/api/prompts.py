"""Prompts of one model: a text or a chat becomes tokens, beside the event loop where that takes long.

It must not know HTTP, nor what becomes of a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.api.chat_messages import Message, normalise
from engine.api.config import ServerConfig
from engine.api.prefix_killers import BILLING_HEADER, without_billing_header
from engine.api.strict_templates import in_some_shape
from engine.api.system_messages import with_one_system
from engine.content_format import ContentFormat
from engine.errors import ContextLengthError, RequestError
from engine.input_processor import may_fit, prompt_too_long
from engine.tokenizer import INLINE_CHARS, Tokenizer

MAX_COUNTED_CHARS = 2**20
"""A prompt that cannot fit is tokenised up to this length to say how long it is, in less than a second."""
INLINE_MESSAGES = 32
"""Longer chats are rendered on another thread."""
INLINE_CHAT_CHARS = 16 * INLINE_CHARS
"""So are chats of longer texts; a template is much faster than a tokenizer."""
MAX_LISTED_TOKENS = 4 * 2**20
"""Most tokens of one text that are listed; a body of the default limit may hold eight times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What a chat template is given; messages and tools have OpenAI's chat shape."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """They stay in the prompt where none may be called: to leave them out would change all of its tokens."""
    chat_template: str | None = None
    """None: the server's, else the tokenizer's."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Prompts:
    """Makes tokens of texts and of chats, as one server's options say."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        config: ServerConfig,
        on_prefix_killer: Callable[[str], None],
    ) -> None:
        """``on_prefix_killer`` is told the name of what was taken out of a prompt."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._chat_template = config.chat_template
        self._content_format = ContentFormat(config.chat_template_content_format)
        self._trusts_templates = config.trust_request_chat_template
        self._parts_prefixes = config.access.parts_prefixes
        self._on_prefix_killer = on_prefix_killer

    async def encode(
        self, text: str, *, add_special_tokens: bool, owner: str | None, is_prompt: bool = False
    ) -> list[int]:
        """The text's tokens. ``is_prompt``: ContextLengthError if they are certainly too many to serve."""
        owner = owner if self._parts_prefixes else None

        def encode() -> list[int] | None:
            if is_prompt and not may_fit(self._tokenizer, text, self._max_model_len):
                return None
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, owner=owner)

        tokens = encode() if len(text) <= INLINE_CHARS else await asyncio.to_thread(encode)
        if tokens is None:
            raise await self._too_long(text, add_special_tokens, owner)
        return tokens

    async def encode_chat(self, chat: ChatPrompt, *, owner: str | None, is_prompt: bool = False) -> list[int]:
        """The chat's tokens; ``is_prompt``: they are to be served, as in ``encode``."""
        text = await self.chat_text(chat)
        return await self.encode(text, add_special_tokens=False, owner=owner, is_prompt=is_prompt)

    async def chat_text(self, chat: ChatPrompt) -> str:
        """The chat as text; RequestError if there is no template or it refuses the messages."""
        if chat.chat_template is not None and not self._trusts_templates:
            raise RequestError(
                "chat_template is taken from requests only by a server with --trust-request-chat-template.",
                "chat_template",
            )
        normal = with_one_system(self._without_prefix_killers(normalise(chat.messages)))

        def render(shape: list[Message]) -> str:
            return self._tokenizer.chat_text(
                shape,
                chat.tools,
                chat.chat_template or self._chat_template,
                chat.add_generation_prompt,
                chat.continue_final_message,
                chat.chat_template_kwargs,
                self._content_format,
            )

        if chat.chat_template is not None or _is_long(chat.messages):  # others' templates may run for ever
            return await asyncio.to_thread(in_some_shape, normal, render)
        return in_some_shape(normal, render)

    def _without_prefix_killers(self, messages: list[Message]) -> list[Message]:
        without = without_billing_header(messages)
        if without is None:
            return messages
        self._on_prefix_killer(BILLING_HEADER)
        return without

    # ---- counted and listed, at any length ----

    async def count(self, text: str, *, add_special_tokens: bool, owner: str | None) -> int:
        """How many tokens the text has, whatever its length."""
        num_tokens = 0
        async for tokens in self._steps(text, add_special_tokens, owner):
            num_tokens += len(tokens)
        return num_tokens

    async def count_chat(self, chat: ChatPrompt, *, owner: str | None) -> int:
        """How many tokens ``encode_chat`` would give, in little memory."""
        return await self.count(await self.chat_text(chat), add_special_tokens=False, owner=owner)

    async def listed(self, text: str, *, add_special_tokens: bool, owner: str | None) -> list[int]:
        """All of the text's tokens, to be shown; RequestError if they are too many for that."""
        listed: list[int] = []
        async for tokens in self._steps(text, add_special_tokens, owner):
            listed += tokens
            if len(listed) > MAX_LISTED_TOKENS:
                raise RequestError(
                    f"The text has more than {MAX_LISTED_TOKENS} tokens, the most that are listed; the "
                    "endpoints that count tokens take more.",
                    "prompt",
                )
        return listed

    async def _too_long(self, text: str, add_special_tokens: bool, owner: str | None) -> ContextLengthError:
        """With how many tokens the prompt has, unless they would take long to count."""
        if len(text) > MAX_COUNTED_CHARS:
            return prompt_too_long(None, self._max_model_len, len(text))
        num_tokens = await self.count(text, add_special_tokens=add_special_tokens, owner=owner)
        return prompt_too_long(num_tokens, self._max_model_len)

    async def _steps(
        self, text: str, add_special_tokens: bool, owner: str | None
    ) -> AsyncGenerator[list[int], None]:
        """Tokens as they are made: on another thread if the text is long, which others have between steps."""
        if len(text) <= INLINE_CHARS:
            yield self._tokenizer.encode(text, add_special_tokens=add_special_tokens, owner=owner)
            return
        steps = self._tokenizer.steps(text, add_special_tokens, owner)
        while (tokens := await asyncio.to_thread(next, steps, None)) is not None:
            yield tokens


def _is_long(messages: Sequence[Message]) -> bool:
    """Whether to render the chat takes so long that others should go on meanwhile."""
    if len(messages) > INLINE_MESSAGES:
        return True
    num_characters = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else (content,)
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            num_characters += len(text) if isinstance(text, str) else 0
    return num_characters > INLINE_CHAT_CHARS
