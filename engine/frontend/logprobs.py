"""Converts the core's log probabilities for callers, and sums those of the chosen tokens."""

from __future__ import annotations

from engine.frontend.request_output import PositionLogprobs, TokenLogprob
from engine.messages import TokenLogprobs
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
            chosen = self._token(position.token_ids[0], position.logprobs[0], position.rank)
            top = [
                self._token(token_id, logprob, rank)
                for rank, (token_id, logprob) in enumerate(
                    zip(position.token_ids[1:], position.logprobs[1:], strict=True), start=1
                )
            ]
            self.positions.append(PositionLogprobs(chosen, top[: self._num_top]))
            self.cumulative += chosen.logprob

    def _token(self, token_id: int, logprob: float, rank: int) -> TokenLogprob:
        tokenizer = self._tokenizer
        raw = tokenizer.token_bytes(token_id)
        return TokenLogprob(token_id, tokenizer.token_text(token_id), logprob, rank, raw)
