"""Builds what a client receives about a request with its first token and at its end."""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.outputs import ModelRunnerOutput
from engine.core.request import Request
from engine.records.messages import EngineCoreOutput, FinishReason


def last_output(request: Request, token_ids: list[int]) -> EngineCoreOutput:
    """The last output of a request that has ended."""
    output = EngineCoreOutput(
        request.request_id,
        token_ids,
        finish_reason=request.status.finish_reason,
        stop_reason=request.stop_reason,
    )
    describe_start(request, output)
    return output


def with_pooled(outputs: list[EngineCoreOutput], result: ModelRunnerOutput) -> list[EngineCoreOutput]:
    """Replace the placeholder tokens in the outputs of a pooling model by its answers."""
    if result.pooled:
        for output in outputs:
            output.pooled = result.pooled.get(output.request_id)
            output.new_token_ids = []
    return outputs


def describe_start(request: Request, output: EngineCoreOutput) -> None:
    """Add the prompt's logprobs, cached tokens, preemptions and queue time to an output."""
    is_asked = request.sampling_params.prompt_logprobs is not None
    if is_asked and (request.prompt_logprobs or request.num_prompt_tokens == 1):
        output.prompt_logprobs = request.prompt_logprobs  # a prompt of one token has no logprobs
    output.num_cached_tokens = request.num_cached_tokens or 0
    output.num_preemptions = request.num_preemptions
    if request.first_scheduled_time is not None:
        output.queued_s = request.first_scheduled_time - request.arrival_time


def note_prompt_logprobs(result: ModelRunnerOutput, requests: Mapping[str, Request]) -> None:
    """Keep a step's prompt logprobs until the first token is sent; skip those known before a preemption."""
    for request_id, told in result.prompt_logprobs.items():
        request = requests.get(request_id)
        if request is not None:
            num_known = len(request.prompt_logprobs) - (told.first - 1)
            if num_known >= 0:  # after a preemption the chunks may differ
                request.prompt_logprobs += told.entries[num_known:]


def failed_output(request_id: str, reason: str) -> EngineCoreOutput:
    """The last output of a request that failed before or while it ran."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
