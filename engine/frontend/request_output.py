"""A request's output for its caller: text, tokens, finish reason, and how it was served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.frontend.stats import RequestStats
from engine.records.messages import TurnReceipt
from engine.records.pooling import Pooled
from engine.records.routed_experts import ExpertArray


@dataclass(slots=True)
class TokenLogprob:
    """One token at one position."""

    token_id: int
    token: str
    """The token's text; U+FFFD if it is only part of a character."""
    logprob: float
    rank: int
    """The token's rank; 1 is the most probable token."""
    raw: bytes
    """The token's bytes in the UTF-8 text, whether whole characters or not."""


@dataclass(slots=True)
class PositionLogprobs:
    """One position of the output: the chosen token and the most probable ones, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` answers: all text and tokens until now, or only the new ones (DELTA)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """The sum over the answer until now; None unless logprobs were requested."""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """``stop`` | ``length`` | ``abort`` | ``error`` | ``repetition``; None until the answer ends."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it (None for EOS); for ``error``, the error."""
    routed_experts: ExpertArray | None = None
    """The experts of the tokens of prompt and answer except the last one, at the end of the answer, if
    ``enable_return_routed_experts`` is set; see ``docs/api.md``."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The output of one request, under its caller's id."""

    request_id: str
    prompt: str | None
    """The prompt's text; None if it was passed as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """The log-probabilities of the prompt's tokens, if requested; the first one has none."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    receipt: TurnReceipt | None = None
    """The receipt of the job's KV, with the last output of a job's turn."""
    metrics: RequestStats | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """Where another server can fetch the prompt's KV; in the last output of a request that ordered a
    lease."""
    pooled: Pooled | None = None
    """The output of a pooling model."""
    late_by_s: float | None = None
    """The request was refused: it is expected to start this many seconds too late."""

    def merge(self, later: RequestOutput, *, delta: bool) -> None:
        """Merges a later output of the same request, for a slow consumer."""
        for output in later.outputs:
            self._merge_completion(output, delta)
        self.finished = later.finished
        self.num_cached_tokens = later.num_cached_tokens
        self.receipt = later.receipt
        self.metrics = later.metrics
        self.kv_transfer_params = later.kv_transfer_params
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.pooled = later.pooled
        self.late_by_s = later.late_by_s or self.late_by_s

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
    earlier.routed_experts = later.routed_experts
