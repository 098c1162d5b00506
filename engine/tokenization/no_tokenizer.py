"""Replaces the tokenizer of an engine that has none, which takes and returns token ids only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from engine.config.engine_config import ModelConfig
from engine.errors import RequestError
from engine.tokenization.content_format import ContentFormat
from engine.tokenization.tokenizer import Message, Tokenizer


class _Nothing:
    """The properties of a missing tokenizer."""

    chat_template = None
    eos_token_id = None
    added_tokens_decoder: Mapping[int, Any] = {}
    model_input_names: Sequence[str] = ()


class NoTokenizer(Tokenizer):
    """A tokenizer whose operations on text raise RequestError."""

    has_texts = False

    def __init__(self) -> None:
        self.hf = cast(Any, _Nothing())
        self.backend = None

    def encode(self, text: str, *, add_special_tokens: bool = True, owner: str | None = None) -> list[int]:
        raise needs_tokenizer("prompt", "give prompts as token ids")

    def encode_behind(self, token_id: int, text: str, *, owner: str | None = None) -> list[int] | None:
        return None

    def steps(self, text: str, add_special_tokens: bool, owner: str | None = None) -> Iterator[list[int]]:
        raise needs_tokenizer("prompt", "give prompts as token ids")

    def fewest_tokens_beyond(self, text: str, num_tokens: int) -> int | None:
        return None

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        raise needs_tokenizer("tokens", "answers are token ids")

    def token_text(self, token_id: int) -> str:
        """The token's id, as V1 writes it where a text names a token."""
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def bad_word_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        raise needs_tokenizer("bad_words", "use logit_bias or allowed_token_ids")

    def reads_parts(
        self,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        content_format: ContentFormat = ContentFormat.AUTO,
    ) -> bool:
        return False

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: ContentFormat = ContentFormat.AUTO,
    ) -> str:
        raise needs_tokenizer("messages", "give prompts as token ids")


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """Loads the tokenizer that the config names, or none. Raises ModelLoadError if it cannot be loaded."""
    return NoTokenizer() if config.skip_tokenizer_init else Tokenizer.load(config)


def needs_tokenizer(field: str, instead: str) -> RequestError:
    return RequestError(
        f"{field} needs a tokenizer, and this engine has none (skip_tokenizer_init): {instead}.", field
    )
