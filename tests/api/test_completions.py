"""Promises of /v1/completions, with the openai client and on the wire."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.api.test_chat import token_ids


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_all_forms_of_a_prompt(
    client: openai.OpenAI, http: httpx.Client, as_tokens: bool, several: bool
) -> None:
    """A text, several texts, token ids and lists of token ids all mean the same prompts."""
    texts = ["one two three", "def main"]
    expected = [
        client.completions.create(model="tiny", prompt=text, max_tokens=4, temperature=0).choices[0].text
        for text in texts
    ]
    prompts = [token_ids(http, text) if as_tokens else text for text in texts]
    body = {"prompt": prompts if several else prompts[0], "max_tokens": 4, "temperature": 0}
    answer = http.post("/v1/completions", json=body).json()
    got = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert got == dict(enumerate(expected if several else expected[:1]))
    assert answer["usage"]["completion_tokens"] == 4 * len(got)


def test_the_default_limit_is_short_and_fits(http: httpx.Client) -> None:
    """Without max_tokens a completion has 16 tokens, or fewer if the context ends before."""
    body = {"temperature": 0, "ignore_eos": True}
    short = http.post("/v1/completions", json={**body, "prompt": "a"}).json()
    assert short["usage"]["completion_tokens"] == 16
    full = http.post("/v1/completions", json={**body, "prompt": [7] * 1019}).json()
    assert full["usage"]["completion_tokens"] == 5


def test_streamed_prompts_add_up(client: openai.OpenAI) -> None:
    """The chunks of each choice add up to the answer that is not streamed, with one finish reason each."""
    prompts = ["one", "two", "three"]
    whole = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, n=2, seed=3)
    texts = {choice.index: "" for choice in whole.choices}
    finishes: list[int] = []
    for chunk in client.completions.create(
        model="tiny", prompt=prompts, max_tokens=6, n=2, seed=3, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                finishes.append(choice.index)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert sorted(finishes) == list(range(6))


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    """echo puts the prompt before the completion, once, in a stream too."""
    plain = client.completions.create(model="tiny", prompt="def main", max_tokens=4, temperature=0)
    expected = "def main" + plain.choices[0].text
    whole = client.completions.create(model="tiny", prompt="def main", max_tokens=4, temperature=0, echo=True)
    assert whole.choices[0].text == expected
    stream = client.completions.create(
        model="tiny", prompt="def main", max_tokens=4, temperature=0, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_log_probabilities(client: openai.OpenAI) -> None:
    """Log probabilities are parallel lists with one entry per token; offsets are positions in the text."""
    answer = client.completions.create(
        model="tiny", prompt="def main", max_tokens=5, temperature=0, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 5
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())


def test_tokens_as_ids(http: httpx.Client) -> None:
    """With return_tokens_as_token_ids every token is named by its id."""
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 0, "return_tokens_as_token_ids": True}
    answer = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    [choice] = answer["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_replay_is_exact(http: httpx.Client) -> None:
    """Forced tokens are returned exactly, whatever the model would have generated."""
    forced = token_ids(http, "exactly this text")
    body = {"prompt": "a", "replay_token_ids": forced, "return_token_ids": True}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["token_ids"] == forced
    assert choice["text"] == "exactly this text"


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters(http: httpx.Client, stream: bool) -> None:
    """``text_offset`` is where a token begins in the text; tokens of one character share its offset."""
    said = "\u00e9\u65e5\U0001f600 ok"
    tokens = http.post("/tokenize", json={"prompt": said, "add_special_tokens": False}).json()["tokens"]
    body = {"prompt": "a", "logprobs": 0, "replay_token_ids": tokens, "stream": stream}
    answer = http.post("/v1/completions", json=body)
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    else:
        choices = answer.json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    offsets = [at for choice in choices if choice["logprobs"] for at in choice["logprobs"]["text_offset"]]
    assert text == said
    assert len(offsets) == len(tokens) > len(said)
    assert offsets == sorted(offsets)
    assert set(offsets) <= set(range(len(said)))
    assert offsets[-1] == len(said) - len("k") or said[offsets[-1] :] in (" ok", "ok", "k")


def test_an_output_that_goes_round_in_circles_ends(client: openai.OpenAI, http: httpx.Client) -> None:
    """Repetition detection ends an answer on request, streamed or not; unusable settings are refused."""
    detection = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    body = {"allowed_token_ids": [7], "ignore_eos": True, "repetition_detection": detection}
    whole = client.completions.create(model="tiny", prompt="a", max_tokens=64, extra_body=body)
    assert str(whole.choices[0].finish_reason) == "repetition"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6
    *_, last = client.completions.create(
        model="tiny", prompt="a", max_tokens=64, stream=True, extra_body=body
    )
    assert str(last.choices[0].finish_reason) == "repetition"
    off = {**body, "repetition_detection": {"max_pattern_size": 0, "min_count": 0}}
    whole = client.completions.create(model="tiny", prompt="a", max_tokens=9, extra_body=off)
    assert whole.choices[0].finish_reason == "length"
    for wrong, named in (({"max_pattern_size": 9}, "min_count"), ({"pattern": 9}, "pattern")):
        answer = http.post("/v1/completions", json={"prompt": "a", "repetition_detection": wrong})
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]


def test_a_prompt_is_repeated_with_its_tokens_logprobs(client: openai.OpenAI, http: httpx.Client) -> None:
    """With echo and logprobs one list covers prompt and answer, as evaluation harnesses read it."""
    prompts = ["one two three", "def main(self):"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=2, temperature=0, logprobs=1, echo=True
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        ids = token_ids(http, prompt)
        told = choice.logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert len(told.tokens) == len(ids) + 2
        assert [*told.token_logprobs[:1], *told.top_logprobs[:1]] == [None, None]
        assert all(logprob <= 0 for logprob in told.token_logprobs[1:])
        assert all(1 <= len(top) <= 2 for top in told.top_logprobs[1:])
        assert told.text_offset is not None
        assert told.text_offset[len(ids)] == len(prompt)
        assert "".join(told.tokens) == choice.text


def test_a_prompts_logprobs_are_told_as_vllm_tells_them(http: httpx.Client) -> None:
    """Logprobs of prompts are listed by position and token id, in completions and chats; streams have
    none."""
    body = {"max_tokens": 1, "prompt_logprobs": 1, "return_token_ids": True}
    choice = http.post("/v1/completions", json={**body, "prompt": "one two three"}).json()["choices"][0]
    chat = http.post(
        "/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "a"}]}
    ).json()
    for answer in (choice, chat):
        first, *others = answer["prompt_logprobs"]
        assert first is None
        for token_id, position in zip(answer["prompt_token_ids"][1:], others, strict=True):
            assert position[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}
            assert any(token["rank"] == 1 for token in position.values())
    for path, extra in (
        ("completions", {"prompt": "a", "prompt_logprobs": 1}),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 1}),
    ):
        refused = http.post(f"/v1/{path}", json={"stream": True, **extra})
        assert refused.status_code == 400
        assert "cannot be streamed" in refused.json()["error"]["message"]


def test_logprobs_of_prompts_are_bounded(http: httpx.Client) -> None:
    """The prompt logprobs of a request are bounded over all its prompts and answers, before computing."""
    body = {"prompt": [[5] * 100] * 60, "max_tokens": 1, "prompt_logprobs": 20, "n": 16}
    refused = http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert "2016000 numbers" in refused.json()["error"]["message"]
