"""Promises of requests that are sent in part: the core gets all tokens, or requests the rest."""

from __future__ import annotations

import msgspec

from engine.core_process.continued_prompts import ContinuedPrompts
from engine.records.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TurnPrefix
from engine.records.sampling_params import SamplingParams
from engine.tokenization.prompt_encoder import ContinuedTokens


def request(name: str, tokens: list[int], n: int = 1) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=5, n=n)
    return EngineCoreRequest(f"{name}-1", tokens, params, 0.0, external_req_id=name, keeps_tokens=True)


def continued(name: str, turn_id: str) -> EngineCoreRequest:
    return request(name, ContinuedTokens([1, 2, 3], [4, 5], 3, turn_id))


def test_only_new_tokens_are_sent() -> None:
    """Only new tokens are sent if the prompt continues a turn that went to this core; otherwise all are."""
    prompts = ContinuedPrompts()
    first = request("a", [1, 2])
    assert prompts.to_send(first) is first
    sent = prompts.to_send(continued("b", "a"))
    assert (sent.prompt_token_ids, sent.continues) == ([4, 5], TurnPrefix("a-1", 3, [1, 2, 3]))
    elsewhere = prompts.to_send(continued("c", "not sent here"))
    assert (list(elsewhere.prompt_token_ids), elsewhere.continues) == ([1, 2, 3, 4, 5], None)
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(elsewhere), type=EngineCoreRequest)
    assert encoded.prompt_token_ids == [1, 2, 3, 4, 5]


def test_a_turn_with_several_answers_is_not_continued() -> None:
    """None of several answers is known to be the one that the next prompt continues."""
    prompts = ContinuedPrompts()
    prompts.to_send(request("a", [1, 2], n=2))
    assert prompts.to_send(continued("b", "a")).continues is None


def test_what_the_core_wants_is_sent_once() -> None:
    """The whole request is sent once if the core wants it, and not after the core has answered it."""
    prompts = ContinuedPrompts()
    prompts.to_send(request("a", [1, 2]))
    whole, other = continued("b", "a"), continued("c", "a")
    prompts.to_send(whole)
    prompts.to_send(other)
    assert prompts.take_wanted(["b-1", "unknown"]) == ([whole], [])
    assert prompts.take_wanted(["b-1"]) == ([], [])
    prompts.answered([EngineCoreOutput("c-1", [7], finish_reason=FinishReason.LENGTH)])
    assert prompts.take_wanted(["c-1"]) == ([], [])


def test_an_abort_meanwhile_holds() -> None:
    """The core gets the request and its abort, so that it reports the request's end as always."""
    prompts = ContinuedPrompts()
    prompts.to_send(request("a", [1, 2]))
    whole = continued("b", "a")
    prompts.to_send(whole)
    prompts.aborted(["b-1", "a-1"])
    assert prompts.take_wanted(["b-1"]) == ([whole], ["b-1"])
