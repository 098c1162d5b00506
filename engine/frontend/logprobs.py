"""Converts the core's log probabilities for callers, and sums those of the chosen tokens."""

from __future__ import annotations

from engine.frontend.request_output import PositionLogprobs, TokenLogprob
from engine.records.messages import TokenLogprobs
from engine.tokenization.tokenizer import Tokenizer


class LogprobsProcessor:
    """Log probabilities of one request's output."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self.cumulative = 0.0
        self.positions: list[PositionLogprobs] = []

    def update(self, new: list[TokenLogprobs]) -> None:
        for position in new:
            told = position_logprobs(self._tokenizer, position, self._num_top)
            self.positions.append(told)
            self.cumulative += told.chosen.logprob


def position_logprobs(tokenizer: Tokenizer, position: TokenLogprobs, num_top: int) -> PositionLogprobs:
    """The log probabilities of a position, in the form for callers."""
    chosen = _token(tokenizer, position.token_ids[0], position.logprobs[0], position.rank)
    others = zip(position.token_ids[1:], position.logprobs[1:], strict=True)
    top = [
        _token(tokenizer, token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(others, start=1)
    ]
    return PositionLogprobs(chosen, top[:num_top])


def _token(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> TokenLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TokenLogprob(token_id, tokenizer.token_text(token_id), logprob, rank, raw)
