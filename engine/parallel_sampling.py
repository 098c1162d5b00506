"""A request for n answers: to the core n requests that share a prompt, to the caller one."""

from __future__ import annotations

import msgspec

from engine.messages import EngineCoreRequest
from engine.request_output import CompletionOutput
from engine.sampling_params import RequestOutputKind


class ParentRequest:
    """Fans a request out and gathers its answers."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.n = request.sampling_params.n
        self._request = request
        self._final_only = request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        self._unfinished = set(range(self.n))
        self._answers: list[CompletionOutput] = []

    def children(self) -> list[EngineCoreRequest]:
        """One request per answer. Seeds differ, else all answers would be the same."""
        params = self._request.sampling_params
        return [
            msgspec.structs.replace(
                self._request,
                request_id=f"{index}_{self.request_id}",
                sampling_params=msgspec.structs.replace(
                    params, n=1, seed=None if params.seed is None else _wrapped(params.seed + index)
                ),
            )
            for index in range(self.n)
        ]

    def merge(self, answer: CompletionOutput) -> tuple[list[CompletionOutput], bool]:
        """Answers to give out now, and whether these are the last. FINAL_ONLY gives all at once."""
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
    """Into 64 signed bits."""
    return (seed + 2**63) % 2**64 - 2**63
