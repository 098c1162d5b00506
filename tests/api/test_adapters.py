"""Adapters over HTTP: requests select them by name; they are loaded and unloaded while the server runs."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, posting, running_server
from tests.worker.lora.made_adapters import AdaptedReference, save_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

FLAGS = ("--num-gpu-blocks-override", "400", "--enable-lora", "--max-loras", "2")
MESSAGES: Any = [
    {"role": "user", "content": "Name the files of this project, one by one, and say what each is."}
]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(model, folder / name, seed) for seed, name in enumerate(("sql", "law", "art"))}


@pytest.fixture(scope="module")
def adapted(model: Path, adapters: dict[str, Path]) -> Iterator[Server]:
    with running_server(
        model,
        *FLAGS,
        *("--lora-modules", f"sql={adapters['sql']}", f"law={adapters['law']}"),
        *("--api-server-count", "2"),
    ) as server:
        yield server


@pytest.fixture
def client(adapted: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def post(adapted: Server) -> Iterator[Callable[..., httpx.Response]]:
    with posting(adapted) as made:
        yield made


def complete(client: openai.OpenAI, model: str, prompt: list[int]) -> list[int]:
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer: Any = client.completions.create(
        model=model, prompt=prompt, max_tokens=6, temperature=0, extra_body=extra
    )
    assert answer.model == model
    tokens: list[int] = answer.choices[0].token_ids
    return tokens


def test_the_name_chooses(client: openai.OpenAI, model: Path, adapters: dict[str, Path]) -> None:
    """The model name selects the adapter, also in a concurrent batch when only two adapters may run."""
    prompt = list(range(10, 40))
    answers: dict[str, list[int]] = {}

    def ask(name: str) -> None:
        answers[name] = complete(client, name, prompt)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("tiny", "sql", "law")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    paths = {"tiny": None, "sql": adapters["sql"], "law": adapters["law"]}
    assert answers == {name: AdaptedReference(model, path).greedy(prompt, 6) for name, path in paths.items()}


def test_models_are_listed_with_their_base(client: openai.OpenAI) -> None:
    cards: dict[str, Any] = {card.id: card for card in client.models.list()}
    assert {name: card.parent for name, card in cards.items()} == {"tiny": None, "sql": "tiny", "law": "tiny"}
    assert client.models.retrieve("sql").id == "sql"


def test_turns_of_an_adapter_find_their_own_prefix(client: openai.OpenAI) -> None:
    """A turn of an adapter finds its own prefix and job's pin; other adapters and the base do not."""

    def cached(name: str) -> int:
        chat = client.chat.completions.create(
            model=name, messages=MESSAGES, max_tokens=4, extra_body={"job_id": f"job of {name}"}
        )
        assert chat.model == name
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        return chat.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached("sql"), cached("law"), cached("tiny")] == [0, 0, 0]
    assert all(cached(name) >= BLOCK_SIZE for name in ("sql", "law", "tiny"))


def test_an_adapter_comes_and_goes_while_it_serves(
    client: openai.OpenAI, post: Callable[..., httpx.Response], model: Path, adapters: dict[str, Path]
) -> None:
    """Loading and unloading an adapter takes effect in both API server processes."""
    prompt = list(range(50, 70))
    with pytest.raises(openai.NotFoundError, match="The model `art` does not exist"):
        complete(client, "art", prompt)
    loaded = post("/v1/load_lora_adapter", lora_name="art", lora_path=str(adapters["art"]))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'art' added successfully.")
    expected = AdaptedReference(model, adapters["art"]).greedy(prompt, 6)
    for _ in range(6):
        with openai.OpenAI(base_url=client.base_url, api_key="none", max_retries=0) as another:
            assert complete(another, "art", prompt) == expected
    other = post("/v1/load_lora_adapter", lora_name="art", lora_path=str(adapters["law"]))
    assert (other.status_code, other.json()["error"]["param"]) == (400, "lora_name")
    replaced = post(
        "/v1/load_lora_adapter", lora_name="art", lora_path=str(adapters["law"]), load_inplace=True
    )
    assert replaced.status_code == 200
    assert complete(client, "art", prompt) == AdaptedReference(model, adapters["law"]).greedy(prompt, 6)
    assert post("/v1/unload_lora_adapter", lora_name="art").status_code == 200
    with pytest.raises(openai.NotFoundError):
        complete(client, "art", prompt)
    assert post("/v1/unload_lora_adapter", lora_name="art").status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("", "/", "lora_name"),
        ("tiny", "/", "'tiny' is the base model's name"),
        ("a@b", "/", "printable characters other than @"),
        ("nowhere", "/nowhere", "lora_path must be a folder with adapter_config.json"),
        ("model", None, "adapter_config.json of adapter 'model' cannot be read"),
    ],
)
def test_what_cannot_be_loaded_is_said(
    post: Callable[..., httpx.Response], model: Path, name: str, path: str | None, message: str
) -> None:
    refused = post("/v1/load_lora_adapter", lora_name=name, lora_path=path or str(model))
    assert refused.status_code == 400
    assert message in refused.text


def test_a_server_without_adapters_says_so(server: Server, adapters: dict[str, Path]) -> None:
    body = {"lora_name": "sql", "lora_path": str(adapters["sql"])}
    refused = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body)
    assert refused.status_code == 400
    assert "start it with --enable-lora" in refused.text


def test_what_is_too_many_for_memory_is_read_again(model: Path, adapters: dict[str, Path]) -> None:
    """With one adapter in memory and three in turn, each answers correctly: evicted ones are read again."""
    modules = [f"{name}={path}" for name, path in adapters.items()]
    expected = {name: AdaptedReference(model, path).greedy([5, 6, 7], 6) for name, path in adapters.items()}
    with (
        running_server(
            model,
            *("--num-gpu-blocks-override", "400", "--enable-lora", "--max-cpu-loras", "1"),
            *("--lora-modules", *modules),
        ) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        for _ in range(2):
            assert {name: complete(made, name, [5, 6, 7]) for name in adapters} == expected


@pytest.mark.slow
def test_a_core_that_is_started_again_reads_what_was_loaded(model: Path, adapters: dict[str, Path]) -> None:
    """When one of two engine cores dies and restarts, the loaded adapter is available on both."""
    expected = AdaptedReference(model, adapters["art"]).greedy([5, 6, 7], 6)
    flags = (*FLAGS, "--data-parallel-size", "2")
    with (
        running_server(model, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as made,
    ):
        body = {"lora_name": "art", "lora_path": str(adapters["art"])}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        os.kill(server.core_pids()[1], signal.SIGKILL)
        while True:
            states = http.get("/engines").json()["data"]
            assert complete(made, "art", [5, 6, 7]) == expected
            if all(state["state"] == "up" for state in states) and states[1]["num_blocks"]:
                break
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: complete(made, "art", [5, 6, 7]), range(16)))
    assert answers == [expected] * 16


@pytest.mark.slow
def test_a_gateway_reads_which_adapters_run_and_which_wait(tmp_path: Path) -> None:
    """The labels of one series name running and waiting adapters, as in V1, for gateways that route by
    them."""
    model = make_model_folder(tmp_path / "long", max_position_embeddings=32768)
    flags = ("--num-gpu-blocks-override", "2100", "--enable-lora", "--max-loras", "1", "--lora-modules")
    loaded = [f"{name}={save_adapter(model, tmp_path / name, 1)}" for name in ("sql", "law")]
    endless = {"prompt": [5] * 8, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with (
        running_server(model, *flags, *loaded) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        assert lora_requests(http) == []
        with http.stream("POST", "/v1/completions", json={**endless, "model": "sql"}) as running:
            lines = running.iter_lines()
            while [labels for labels, _ in lora_requests(http)] != [LORA.format("sql", "")]:
                next(lines)
            waits = pool.submit(
                httpx.post,
                f"{server.url}/v1/completions",
                json={"prompt": [6] * 8, "max_tokens": 2, "model": "law"},
                timeout=60,
            )
            while [labels for labels, _ in lora_requests(http)] != [LORA.format("sql", "law")]:
                next(lines)
        assert waits.result().status_code == 200
        while [labels for labels, _ in lora_requests(http)] != [LORA.format("", "")]:
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        [(_, told_at)] = lora_requests(http)
        assert abs(time.time() - told_at) < 60


LORA = 'engine="0",max_lora="1",running_lora_adapters="{}",waiting_lora_adapters="{}"'


def lora_requests(http: httpx.Client) -> list[tuple[str, float]]:
    """Returns the labels and the value of each series."""
    page = http.get("/metrics").text
    found = re.findall(r"^vllm:lora_requests_info\{(.*)\} (\S+)$", page, re.MULTILINE)
    return [(labels, float(value)) for labels, value in found]


def test_a_server_without_adapters_tells_of_none(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert "lora_requests_info" not in http.get("/metrics").text
