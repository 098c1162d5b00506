"""Promises of the pooling endpoints, kept by real servers: OpenAI's and LangChain's clients get embeddings,
and bad input is named and affects no other request."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from sentence_transformers import CrossEncoder, SentenceTransformer

from tests.api.malformed_bodies import POOLING_BODIES, malformed_bodies
from tests.api.server import Server, running_server
from tests.api.test_fuzz import _ask, faults
from tests.pooling.pooling_folders import TEXTS, make_decoder, make_encoder, save_embedder

ROUNDING = 5e-6
QUERY = "Which blocks are evicted?"
SHORT = [text[:300] for text in TEXTS]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embedder")
    source = make_decoder(root / "plain", "qwen3", max_position_embeddings=512)
    return save_embedder(root / "whole", source, "lasttoken", prompts={"query": "Find: "})


@pytest.fixture(scope="module")
def server(embedder: Path) -> Iterator[Server]:
    flags = ("--num-gpu-blocks-override", "400", "--max-num-batched-tokens", "128", "--api-server-count", "2")
    with running_server(embedder, *flags) as running:
        yield running
        assert running.interrupt() == 0


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("ranker") / "model", "bert", num_labels=1)


@pytest.fixture(scope="module")
def ranker(cross_encoder: Path) -> Iterator[Server]:
    with running_server(cross_encoder) as running:
        yield running
        assert running.interrupt() == 0


@pytest.fixture(scope="module")
def expected(embedder: Path) -> Any:
    return SentenceTransformer(str(embedder), device="cpu").encode(SHORT)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_openais_client_gets_embeddings(client: openai.OpenAI, expected: Any) -> None:
    """Embeddings come in base64, the client's default, and as numbers, for texts and for tokens."""
    packed = client.embeddings.create(model="tiny", input=SHORT)
    plain = client.embeddings.create(model="tiny", input=SHORT, encoding_format="float")
    for response in (packed, plain):
        assert [one.index for one in response.data] == list(range(len(SHORT)))
        found = np.array([one.embedding for one in response.data])
        assert found == pytest.approx(expected, abs=ROUNDING)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > len(SHORT)
    cut = client.embeddings.create(model="tiny", input=SHORT[0], dimensions=8)
    assert np.linalg.norm(cut.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
    tokens = client.embeddings.create(model="tiny", input=[[5, 6, 7], [8]])
    assert len(tokens.data) == 2
    assert tokens.usage.prompt_tokens == 4


def test_langchain_gets_embeddings(server: Server, expected: Any) -> None:
    client = OpenAIEmbeddings(
        model="tiny",
        base_url=f"{server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,  # else it sends tokens of OpenAI's vocabulary
    )
    assert np.array(client.embed_documents(SHORT)) == pytest.approx(expected, abs=ROUNDING)
    assert client.embed_query(SHORT[0]) == pytest.approx(expected[0].tolist(), abs=ROUNDING)


def test_many_clients_at_once(server: Server, expected: Any) -> None:
    def ask(number: int) -> bool:
        place = number % len(SHORT)
        response = httpx.post(f"{server.url}/v1/embeddings", json={"input": SHORT[place]}, timeout=60)
        return bool(
            response.json()["data"][0]["embedding"] == pytest.approx(expected[place].tolist(), abs=ROUNDING)
        )

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(64)))


def test_pooling_has_the_other_tasks(server: Server, expected: Any) -> None:
    body: dict[str, Any] = {"input": SHORT[:2], "encoding_format": "base64"}
    found = httpx.post(f"{server.url}/pooling", json=body, timeout=60).json()
    numbers = np.frombuffer(base64.b64decode(found["data"][0]["data"]), "<f4")
    assert numbers == pytest.approx(expected[0], abs=ROUNDING)
    each = httpx.post(
        f"{server.url}/pooling", json={"input": SHORT[0], "task": "token_embed"}, timeout=60
    ).json()
    assert each["data"][0]["data"][-1] == pytest.approx(expected[0].tolist(), abs=ROUNDING)
    assert len(each["data"][0]["data"]) == each["usage"]["prompt_tokens"]


def test_documents_are_ranked_by_cosine(server: Server, embedder: Path) -> None:
    model = SentenceTransformer(str(embedder), device="cpu")
    scores: Any = model.similarity(model.encode([QUERY]), model.encode(SHORT))[0]
    body = {"query": QUERY, "documents": SHORT, "top_n": 3}
    found = httpx.post(f"{server.url}/v1/rerank", json=body, timeout=60).json()
    best = sorted(range(len(SHORT)), key=lambda number: -scores[number])[:3]
    assert [one["index"] for one in found["results"]] == best
    assert [one["document"]["text"] for one in found["results"]] == [SHORT[number] for number in best]
    assert found["results"][0]["relevance_score"] == pytest.approx(float(scores[best[0]]), abs=ROUNDING)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "prompt"),
        ("/v1/embeddings", {"input": {"text": "a"}}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["a"] * 4097}, "input"),
        ("/v1/embeddings", {"input": [[999_999]]}, "prompt"),
        ("/v1/embeddings", {"input": "word " * 2000}, "input"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "title"}, "prompt_name"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/classify", {"input": "a"}, "task"),
        ("/score", {"text_1": "a"}, "documents"),
        ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}, "model"),
        ("/v1/completions", {"prompt": "Hello"}, "model"),
    ],
)
def test_bad_input_is_named(server: Server, path: str, body: dict[str, Any], field: str) -> None:
    """One bad input of several refuses the request before any of it runs."""
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == field, response.text


def test_a_server_that_generates_says_what_it_does_not(tmp_path: Path, model_folder: Path) -> None:
    with running_server(model_folder, "--num-gpu-blocks-override", "300") as server:
        response = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=60)
        assert response.status_code == 400
        assert "--runner pooling" in response.json()["error"]["message"]


def test_scores_and_ranks_of_a_cross_encoder(ranker: Server, cross_encoder: Path) -> None:
    model = CrossEncoder(str(cross_encoder), device="cpu")
    scores = model.predict([(QUERY, text) for text in SHORT], batch_size=1).tolist()
    for names in (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")):
        body = {names[0]: QUERY, names[1]: SHORT}
        found = httpx.post(f"{ranker.url}/score", json=body, timeout=60).json()
        assert [one["score"] for one in found["data"]] == pytest.approx(scores, abs=ROUNDING)
    documents = [{"text": text, "title": "none"} for text in SHORT]
    asked: dict[str, Any] = {"query": QUERY, "documents": documents, "return_documents": False}
    ranked = httpx.post(f"{ranker.url}/v2/rerank", json=asked, timeout=60).json()
    best = sorted(range(len(SHORT)), key=lambda number: -scores[number])
    assert [one["index"] for one in ranked["results"]] == best
    assert "document" not in ranked["results"][0]


def test_classes_have_names(ranker: Server) -> None:
    found = httpx.post(f"{ranker.url}/classify", json={"input": SHORT}, timeout=60).json()
    assert [one["label"] for one in found["data"]] == ["LABEL_0"] * len(SHORT)
    assert all(one["num_classes"] == 1 and 0 < one["probs"][0] < 1 for one in found["data"])


def test_metrics_count_what_was_pooled(ranker: Server) -> None:
    def prompt_tokens() -> float:
        text = httpx.get(f"{ranker.url}/metrics", timeout=60).text
        [line] = [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total")]
        return float(line.rpartition(" ")[2])

    before = prompt_tokens()
    found = httpx.post(f"{ranker.url}/classify", json={"input": SHORT[0]}, timeout=60).json()
    assert prompt_tokens() - before == found["usage"]["prompt_tokens"]


def test_malformed_bodies_are_refused_and_leave_nothing_behind(server: Server) -> None:
    """Malformed bodies are refused as on other endpoints; most errors name the field."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for path, bodies in POOLING_BODIES.items():
            for body in bodies:
                assert http.post(path, json=body).status_code == (400 if path == "/classify" else 200), body
        answers = [_ask(http, body) for body in malformed_bodies(600, 20261, POOLING_BODIES)]
        assert [answer.where for answer in answers if answer.status >= 500] == []
        refused = [answer for answer in answers if answer.status >= 400]
        assert [fault for answer in refused for fault in faults(answer)] == []
        assert http.get("/load").json()["server_load"] == 0


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hm?"}]},
]


def test_a_chat_is_one_input_by_the_models_template(server: Server) -> None:
    """A chat becomes one input by the model's template, as from vLLM's clients; the template adds a
    generation prompt on request."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for adds in (False, True):
            chat = {"messages": CHAT, "add_generation_prompt": adds}
            tokens = http.post("/tokenize", json=chat).json()["tokens"]
            asked = {"input": tokens, "encoding_format": "float"}
            [wanted] = http.post("/v1/embeddings", json=asked).json()["data"]
            answer = http.post("/v1/embeddings", json={**chat, "truncate_prompt_tokens": -1})
            assert answer.status_code == 200, answer.text
            [found] = answer.json()["data"]
            assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
            assert found["embedding"] == pytest.approx(wanted["embedding"], abs=ROUNDING)
        [pooled] = http.post("/pooling", json={"messages": CHAT}).json()["data"]
        assert len(pooled["data"]) == len(found["embedding"])


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({}, "input", "Give input, or messages"),
        ({"messages": CHAT, "input": "a"}, "messages", "either input or messages"),
        ({"messages": CHAT, "prompt_name": "query"}, "prompt_name", "is for input"),
        ({"messages": CHAT, "truncate_prompt_tokens": 3}, "messages", "a chat is not truncated"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, "messages", "maximum context length"),
    ],
)
def test_what_is_wrong_with_a_chat_is_said(
    server: Server, body: dict[str, Any], field: str, said: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["param"] == field


def test_a_null_is_a_field_that_is_not_given(server: Server, expected: Any) -> None:
    """A null counts as a missing field: clients send null for what they do not set."""
    nulls = dict.fromkeys(("encoding_format", "dimensions", "add_special_tokens", "prompt_name", "user"))
    found = httpx.post(f"{server.url}/v1/embeddings", json={"input": SHORT[0], **nulls}, timeout=60)
    assert found.json()["data"][0]["embedding"] == pytest.approx(expected[0], abs=ROUNDING)
    nulls = dict.fromkeys(("return_documents", "top_n", "max_tokens_per_doc"))
    ranked = httpx.post(
        f"{server.url}/v2/rerank", json={"query": QUERY, "documents": SHORT, **nulls}, timeout=60
    )
    assert len(ranked.json()["results"]) == len(SHORT)


def test_documents_are_read_up_to_a_number_of_tokens(server: Server, embedder: Path) -> None:
    """With Cohere's ``max_tokens_per_doc``, later tokens of a document change no score, and the whole
    document is returned."""
    tokenizer = SentenceTransformer(str(embedder), device="cpu").tokenizer
    told = tokenizer(SHORT, add_special_tokens=False, return_offsets_mapping=True)
    cut = [text[: ends[:9][-1][1]] for text, ends in zip(SHORT, told.offset_mapping, strict=True)]

    def scores(documents: list[str], **more: int) -> dict[int, float]:
        body = {"query": QUERY, "documents": documents, **more}
        results = httpx.post(f"{server.url}/v2/rerank", json=body, timeout=60).json()["results"]
        assert all(each["document"]["text"] == documents[each["index"]] for each in results)
        return {each["index"]: each["relevance_score"] for each in results}

    assert scores(SHORT, max_tokens_per_doc=9) == pytest.approx(scores(cut), abs=ROUNDING)
