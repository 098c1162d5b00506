"""Log probabilities in the two formats of OpenAI's endpoints."""

from __future__ import annotations

from engine.api.openai.bodies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from engine.frontend.detokenizer import TokenDecoder
from engine.frontend.request_output import PositionLogprobs, TokenLogprob

LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot hold."""


def chat_logprobs(positions: list[PositionLogprobs] | None, as_token_ids: bool | None) -> ChatLogprobs | None:
    if positions is None:
        return None
    return ChatLogprobs([_chat_position(position, bool(as_token_ids)) for position in positions])


def _chat_position(position: PositionLogprobs, as_token_ids: bool) -> ChatTokenLogprob:
    chosen = position.chosen
    top = [
        TopLogprob(label(token, as_token_ids), _finite(token.logprob), list(token.raw))
        for token in position.top
    ]
    return ChatTokenLogprob(label(chosen, as_token_ids), _finite(chosen.logprob), list(chosen.raw), top)


def completion_logprobs(
    positions: list[PositionLogprobs] | None, as_token_ids: bool | None, offsets: TextOffsets | None
) -> CompletionLogprobs | None:
    """Converts the logprobs of new tokens; ``offsets`` locate these tokens in the text."""
    if positions is None or offsets is None:
        return None
    result = CompletionLogprobs([], [], [], [])
    _append(result, positions, as_token_ids, offsets)
    return result


def echoed_logprobs(
    first: TokenLogprob,
    positions: list[PositionLogprobs],
    as_token_ids: bool | None,
    offsets: TextOffsets,
) -> CompletionLogprobs:
    """The logprobs of a prompt that is repeated before its answer. ``first``: its first token."""
    label_of_first = label(first, bool(as_token_ids))
    result = CompletionLogprobs([offsets.next(first.token_id)], [None], [label_of_first], [None])
    _append(result, positions, as_token_ids, offsets)
    return result


def joined(first: CompletionLogprobs, then: CompletionLogprobs | None) -> CompletionLogprobs:
    """Concatenates two lists of logprobs."""
    if then is None:
        return first
    return CompletionLogprobs(
        first.text_offset + then.text_offset,
        first.token_logprobs + then.token_logprobs,
        first.tokens + then.tokens,
        first.top_logprobs + then.top_logprobs,
    )


def prompt_logprobs(positions: list[PositionLogprobs | None]) -> PromptLogprobs:
    """Converts a prompt's logprobs to vLLM's format."""
    return [None if position is None else _by_token(position) for position in positions]


def _by_token(position: PositionLogprobs) -> dict[str, PromptLogprob]:
    return {
        str(token.token_id): PromptLogprob(_finite(token.logprob), token.rank, token.token)
        for token in (position.chosen, *position.top)
    }


def _append(
    result: CompletionLogprobs,
    positions: list[PositionLogprobs],
    as_token_ids: bool | None,
    offsets: TextOffsets,
) -> None:
    for position in positions:
        token = label(position.chosen, bool(as_token_ids))
        result.text_offset.append(offsets.next(position.chosen.token_id))
        result.token_logprobs.append(_finite(position.chosen.logprob))
        result.tokens.append(token)
        result.top_logprobs.append(
            {label(top, bool(as_token_ids)): _finite(top.logprob) for top in (*position.top, position.chosen)}
        )


class TextOffsets:
    """The text offset of each token, in characters. Tokens that share a character share its
    offset; a hidden token adds no length."""

    def __init__(self, decoder: TokenDecoder, start: int = 0) -> None:
        """``decoder`` decodes the tokens like the text itself, which begins at ``start``."""
        self._decoder = decoder
        self._num_chars = start

    def next(self, token_id: int) -> int:
        """Returns the offset of the next token."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.step(token_id))
        return offset


def label(token: TokenLogprob, as_token_id: bool) -> str:
    return f"token_id:{token.token_id}" if as_token_id else token.token


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
