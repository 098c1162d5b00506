"""Parallel sampling: one request for n answers becomes n core requests that share a prompt."""

from __future__ import annotations

import msgspec

from engine.frontend.request_output import CompletionOutput, PositionLogprobs
from engine.records.messages import EngineCoreRequest, TurnReceipt
from engine.records.sampling_params import RequestOutputKind


class ParentRequest:
    """Splits a request and merges its answers."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.n = request.sampling_params.n
        self._request = request
        self._final_only = request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        self._unfinished = set(range(self.n))
        self._answers: list[CompletionOutput] = []
        self._receipt: TurnReceipt | None = None
        self.late_by_s: float | None = None
        """Seconds by which one of the requests would start too late: then all end."""
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        """Log-probabilities of the prompt, which all answers share."""

    def children(self) -> list[EngineCoreRequest]:
        """Returns one request per answer. Seeds differ, since equal ones would give equal answers."""
        return [self._child(index) for index in range(self.n)]

    def _child(self, index: int) -> EngineCoreRequest:
        """Returns one of the requests. The first one returns the prompt's log-probabilities, and computes the
        whole prompt itself, since cached tokens have none."""
        params = self._request.sampling_params
        tells = params.prompt_logprobs is not None
        salt = self._request.cache_salt
        return msgspec.structs.replace(
            self._request,
            request_id=f"{index}_{self.request_id}",
            cache_salt=f"{salt} others" if tells and index else salt,
            sampling_params=msgspec.structs.replace(
                params,
                n=1,
                seed=None if params.seed is None else _wrapped(params.seed + index),
                prompt_logprobs=None if index else params.prompt_logprobs,
            ),
        )

    def unfinished_ids(self) -> list[str]:
        """Ids of its requests that have not ended."""
        return [f"{index}_{self.request_id}" for index in sorted(self._unfinished)]

    def receipt_of_ended(self, receipt: TurnReceipt) -> TurnReceipt:
        """Returns the receipt of the answer that ends now, with the summed steps and drafts of all ended
        answers."""
        before = self._receipt
        if before is not None:
            receipt = msgspec.structs.replace(
                receipt,
                output_steps=before.output_steps + receipt.output_steps,
                drafted_tokens=before.drafted_tokens + receipt.drafted_tokens,
                accepted_tokens=before.accepted_tokens + receipt.accepted_tokens,
            )
        self._receipt = receipt
        return receipt

    def merge(self, answer: CompletionOutput) -> tuple[list[CompletionOutput], bool]:
        """Returns the answers to output now, and whether they are the last. FINAL_ONLY outputs all at
        once."""
        if answer.finished:
            self._unfinished.discard(answer.index)
        finished = not self._unfinished
        if not self._final_only:
            return [answer], finished
        self._answers.append(answer)
        if not finished:
            return [], False
        return sorted(self._answers, key=lambda each: each.index), True


def _wrapped(seed: int) -> int:
    """Wraps a seed to 64 signed bits."""
    return (seed + 2**63) % 2**64 - 2**63
