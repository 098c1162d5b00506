"""``--enable-return-routed-experts`` over HTTP: vLLM's field, in vLLM's encoding."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.worker.generation import Reference, random_tokens

pytestmark = pytest.mark.slow

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
OPTIONS = {"max_tokens": 7, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    return make_model_folder(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", extra_config=fields)


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    flags = ("--enable-return-routed-experts", "--num-gpu-blocks-override", "300", "--device", "cpu")
    with running_server(folder, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def decoded(choice: dict[str, Any]) -> npt.NDArray[np.uint8]:
    """Decodes as vLLM's documentation says."""
    experts: npt.NDArray[np.uint8] = np.load(BytesIO(b64decode(choice["routed_experts"])))
    return experts


def check(choice: dict[str, Any], prompt: list[int], folder: Path) -> None:
    told = Reference(folder).routed_experts(prompt + choice["token_ids"])
    assert len(told) == len(prompt) + 6
    assert np.array_equal(decoded(choice), told)


def test_completions_have_the_experts_of_prompt_and_answer(http: httpx.Client, folder: Path) -> None:
    """Every choice has its own experts, including those of the cached part of the prompt."""
    prompt = random_tokens(40, seed=1)
    for num_cached in (0, 32):
        body = http.post("/v1/completions", json={"prompt": prompt, "n": 2, **OPTIONS}).json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= num_cached
        for choice in body["choices"]:
            check(choice, prompt, folder)


def test_chats_have_them_too(http: httpx.Client, folder: Path) -> None:
    """On request, the first tokens of the prompt are left out."""
    body = http.post("/v1/chat/completions", json={**CHAT, **OPTIONS}).json()
    check(body["choices"][0], body["prompt_token_ids"], folder)
    asked = {**CHAT, **OPTIONS, "routed_experts_prompt_start": 5}
    rest = http.post("/v1/chat/completions", json=asked).json()["choices"][0]
    assert np.array_equal(decoded(rest), decoded(body["choices"][0])[5:])
    refused = http.post("/v1/chat/completions", json=asked | {"routed_experts_prompt_start": 5000})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "routed_experts_prompt_start"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_do_not_carry_them(http: httpx.Client, path: str) -> None:
    """As in vLLM, streams do not carry the array."""
    body = {**(CHAT if "chat" in path else {"prompt": "hello"}), **OPTIONS, "stream": True}
    lines = http.post(path, json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events
    assert not any("routed_experts" in choice for event in events for choice in event["choices"])
