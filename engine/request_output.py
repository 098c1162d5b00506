"""What a caller gets back for a request: text, tokens, why it ended, and how it was served."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import TurnReceipt
from engine.stats import RequestStats


@dataclass(slots=True)
class TokenLogprob:
    """One token at one position."""

    token_id: int
    token: str
    """The token's text; U+FFFD where it is only part of a character."""
    logprob: float
    rank: int
    """1 is the most probable token of the vocabulary."""
    raw: bytes
    """The token's own part of the text in UTF-8, whole characters or not."""


@dataclass(slots=True)
class PositionLogprobs:
    """One position of the output: the token that was chosen, and the most probable ones, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` answers to a request; text and tokens so far, or the new ones only (DELTA)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over the whole answer so far; None unless logprobs were asked for."""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """``stop`` | ``length`` | ``abort`` | ``error``; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it (None for EOS); for ``error``, what went wrong."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """State of one request, under the id its caller gave it."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the cache."""
    receipt: TurnReceipt | None = None
    """With the last output of a job's turn: what was done about the job's KV."""
    metrics: RequestStats | None = None

    def merge(self, later: RequestOutput, *, delta: bool) -> None:
        """Fold a later output of the same request into this one, for a consumer that lags."""
        for output in later.outputs:
            self._merge_completion(output, delta)
        self.finished = later.finished
        self.num_cached_tokens = later.num_cached_tokens
        self.receipt = later.receipt
        self.metrics = later.metrics

    def _merge_completion(self, later: CompletionOutput, delta: bool) -> None:
        for position, earlier in enumerate(self.outputs):
            if earlier.index == later.index:
                if delta:
                    _append(earlier, later)
                else:
                    self.outputs[position] = later
                return
        self.outputs.append(later)


def _append(earlier: CompletionOutput, later: CompletionOutput) -> None:
    earlier.text += later.text
    earlier.token_ids = earlier.token_ids + later.token_ids
    if later.logprobs is not None:
        earlier.logprobs = (earlier.logprobs or []) + later.logprobs
    earlier.cumulative_logprob = later.cumulative_logprob
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
