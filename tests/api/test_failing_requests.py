"""Requests that fail in the engine, in every API: the client gets the reason, and the next request is
served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config.engine_config import ModelConfig
from engine.records.row_failures import NOT_NUMBERS, NOTHING_ALLOWED
from engine.tokenization.tokenizer import Tokenizer
from tests.api.server import running_server
from tests.broken_models import with_poisoned_token

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
POISONED = [{"role": "user", "content": "hello ~"}]


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(ModelConfig(model=str(model)))


@pytest.fixture(scope="module")
def broken(
    model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A server whose model has no valid logits for a prompt with a tilde."""
    [token] = tokenizer.encode("~")
    folder = with_poisoned_token(model, tmp_path_factory.mktemp("poisoned") / "model", token)
    with (
        running_server(folder, "--num-gpu-blocks-override", "400", "--served-model-name", "tiny") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def served(client: httpx.Client) -> bool:
    answer = client.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
    return answer.status_code == 200 and bool(answer.json()["usage"]["completion_tokens"] == 3)


def told(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Returns the error of a response with this status, or of the last event of a stream that had begun."""
    error: dict[str, Any]
    if answer.status_code == 200:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line[:5] == "data:"]
        error = json.loads([event for event in events if event != "[DONE]"][-1])["error"]
    else:
        assert answer.status_code == status
        error = answer.json()["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": POISONED}),
        (CHAT, {"messages": POISONED, "n": 3, "temperature": 1.0, "max_tokens": 9}),
        (COMPLETIONS, {"prompt": "hello ~"}),
        (COMPLETIONS, {"prompt": ["hello", "~"]}),
        ("/v1/responses", {"input": "hello ~"}),
        ("/v1/messages", {"messages": POISONED, "max_tokens": 9}),
    ],
)
def test_logits_that_are_no_numbers_are_told(
    broken: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Before any output the whole answer is an error in its API; after output of another prompt of the
    request, the stream's last event is."""
    answer = broken.post(path, json={"model": "tiny", "stream": stream, **body})
    assert told(answer, 500)["message"] == NOT_NUMBERS
    assert served(broken)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_fails_says_so(broken: httpx.Client, tokenizer: Tokenizer, path: str) -> None:
    """The last event of a stream that fails midway is the error. If nothing was sent yet, the whole answer is
    an error."""
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    said = tokenizer.encode("abc~def")
    answer = broken.post(path, json={**prompt, "stream": True, "max_tokens": 20, "replay_token_ids": said})
    assert told(answer, 500)["message"] == NOT_NUMBERS
    assert served(broken)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_limits_that_leave_no_token_are_the_clients_mistake(
    broken: httpx.Client, tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    """Limits that allow no token, at once or after one, give a 400 that names a field, or end the stream with
    it."""
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    letter = tokenizer.token_text(70)
    for word in (letter, letter * 2):
        limits = {"allowed_token_ids": [70], "bad_words": [word], "max_tokens": 9}
        answer = broken.post(path, json={**prompt, **limits, "stream": stream})
        error = told(answer, 400)
        assert (error["message"], error["param"]) == (NOTHING_ALLOWED, "allowed_token_ids")
    assert served(broken)
