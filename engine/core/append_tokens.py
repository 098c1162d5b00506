"""Appends sampled tokens to a request, up to the one that ends it: V1's ``check_stop``."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.repetition import ends_in_repetition
from engine.core.request import Request, RequestStatus
from engine.core.token_grammar import TokenGrammar
from engine.records.row_failures import GRAMMAR_LEFT, processing_failed
from engine.records.sampling_params import RepetitionDetection

REPETITION_DETECTED = "repetition_detected"
"""The ``stop_reason`` that V1 gives a repetition."""


def append_tokens(
    request: Request, token_ids: Sequence[int], max_model_len: int, failure: str | None = None
) -> int:
    """Append tokens and set the status if one of them ends the request; returns how many were taken.

    ``failure``: why the worker could choose no token. Then none is taken, and the request ends with an error.
    """
    if failure is not None:
        return fail_request(request, failure)
    status = request.status
    for count, token_id in enumerate(token_ids, start=1):
        request.append_output_token(token_id)
        num_tokens = request.num_tokens
        num_output = num_tokens - request.num_prompt_tokens
        if request.repetition_detection is not None and num_output >= request.sampling_params.min_tokens:
            _look_for_repetition(request, num_output, request.repetition_detection)
        if num_output >= request.max_tokens or num_tokens >= max_model_len:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        if token_id in request.ending_token_ids and num_output >= request.sampling_params.min_tokens:
            request.status = RequestStatus.FINISHED_STOPPED
            if token_id != request.sampling_params.eos_token_id:
                request.stop_reason = token_id
        if request.grammar is not None:
            _follow_grammar(request, request.grammar, token_id)
        if request.status is not status:
            if request.status is RequestStatus.FINISHED_REPETITION:
                request.stop_reason = REPETITION_DETECTED
            return count
    return len(token_ids)


def fail_request(request: Request, reason: str) -> int:
    """End the request with an error; returns 0, the number of tokens taken."""
    request.status = RequestStatus.FINISHED_ERROR
    request.stop_reason = reason
    return 0


def _look_for_repetition(request: Request, num_output: int, detection: RepetitionDetection) -> None:
    if ends_in_repetition(request.all_token_ids, num_output, detection):
        request.status = RequestStatus.FINISHED_REPETITION


def _follow_grammar(request: Request, grammar: TokenGrammar, token_id: int) -> None:
    """End the request where its grammar ends, even if its length limit has been reached, too."""
    try:
        accepted = grammar.accept(token_id)
        complete = grammar.complete
    except Exception as error:  # the library failed on this request alone: the others go on
        fail_request(request, processing_failed("The grammar", error))
        return
    if not accepted:
        fail_request(request, GRAMMAR_LEFT)
    elif complete:
        request.status = RequestStatus.FINISHED_STOPPED
