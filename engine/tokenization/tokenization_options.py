"""V1's ``tokenization_kwargs``: how the prompts of one call of ``LLM`` are tokenized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import RequestError
from engine.tokenization.tokenizer import Tokenizer

_OPTION = "tokenization_kwargs"
SIDES = ("left", "right")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationOptions:
    """The options that have a meaning without padding."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Maximum number of tokens to keep of a longer prompt; -1: as many as fit."""
    truncation_side: str = "left"
    """The side on which a longer prompt is cut; by default the left, since generation continues from its
    end."""

    def __post_init__(self) -> None:
        if not isinstance(self.add_special_tokens, bool):
            raise _wrong("add_special_tokens must be true or false", self.add_special_tokens)
        if self.truncation_side not in SIDES:
            raise _wrong(f"truncation_side must be one of {', '.join(SIDES)}", self.truncation_side)
        limit = self.truncate_prompt_tokens
        if limit is not None and (type(limit) is not int or limit < -1 or not limit):
            raise _wrong("truncate_prompt_tokens must be -1 or a number from 1", limit)

    def tokens(self, tokenizer: Tokenizer, prompt: str | list[int], most: int) -> list[int]:
        """The tokens of a prompt; at most ``most`` fit. RequestError if more are requested."""
        ids = prompt
        if isinstance(ids, str):
            ids = tokenizer.encode(ids, add_special_tokens=self.add_special_tokens)
        limit = most if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        if limit is None or len(ids) <= limit:
            return ids
        if limit > most:
            raise _wrong(f"truncate_prompt_tokens must be at most {most}, the most that fit", limit)
        return ids[-limit:] if self.truncation_side == "left" else ids[:limit]


def read_tokenization_kwargs(given: Mapping[str, Any] | None, side: str = "left") -> TokenizationOptions:
    """Reads the options. ``side``: the default side for cutting. RequestError for an unknown or wrong
    field."""
    known = [field.name for field in fields(TokenizationOptions)]
    for name in given or {}:
        if name not in known:
            raise RequestError(f"{_OPTION} must not have {name!r}; it takes {', '.join(known)}.", _OPTION)
    return TokenizationOptions(**{"truncation_side": side, **(given or {})})


def _wrong(what: str, value: object) -> RequestError:
    return RequestError(f"{_OPTION}.{what}, got {value!r}.", _OPTION)
