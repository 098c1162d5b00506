"""Promises of ``skip_tokenizer_init``: token ids in, the same token ids out as with a tokenizer; what needs
texts is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import ModelLoadError, RequestError
from engine.frontend.beam_search import BeamSearchParams
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.pooling.pooling_folders import make_decoder, save_embedder

PROMPT = list(range(20, 60))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
OPTIONS: dict[str, Any] = {"multiprocess": False, "num_gpu_blocks_override": 300}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture(scope="module")
def bare(whole: Path) -> Path:
    """The same folder without its tokenizer."""
    folder = whole.with_name("bare")
    shutil.copytree(whole, folder)
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def test_token_ids_in_are_token_ids_out(whole: Path, bare: Path) -> None:
    """A folder without a tokenizer gives the same tokens; log-probabilities name tokens by id, as in V1."""
    params = SamplingParams(**GREEDY, logprobs=2)
    with LLM(whole, **OPTIONS) as llm:
        [expected] = llm.generate([PROMPT], params, use_tqdm=False)
        beams = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        LLM(bare, **OPTIONS)
    with LLM(bare, skip_tokenizer_init=True, **OPTIONS) as llm:
        [found] = llm.generate([PROMPT], params, use_tqdm=False)
        same_beams = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4))
    answer, wanted = found.outputs[0], expected.outputs[0]
    assert (answer.token_ids, answer.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    assert answer.text == "" != wanted.text
    assert answer.logprobs is not None
    assert answer.logprobs[0].chosen.token == f"token_id:{answer.token_ids[0]}"
    for found_beams, expected_beams in zip(same_beams, beams, strict=True):
        assert [one.tokens for one in found_beams.sequences] == [
            one.tokens for one in expected_beams.sequences
        ]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("A text", {}, "prompt"),
        (PROMPT, {"stop": ["x"]}, "stop"),
        (PROMPT, {"bad_words": ["x"]}, "bad_words"),
        (PROMPT, {"structured_outputs": StructuredOutputsParams(regex="a")}, "structured_outputs"),
    ],
)
def test_what_needs_texts_is_refused(bare: Path, prompt: Any, options: dict[str, Any], field: str) -> None:
    with (
        LLM(bare, skip_tokenizer_init=True, **OPTIONS) as llm,
        pytest.raises(RequestError, match=rf"^{field} needs a tokenizer, and this engine has none"),
    ):
        llm.generate([prompt], SamplingParams(**GREEDY, **options), use_tqdm=False)


def test_a_model_that_pools_takes_token_ids(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "whole", make_decoder(tmp_path / "plain"), "lasttoken")
    with LLM(folder, **OPTIONS) as llm:
        [expected] = llm.embed([PROMPT], use_tqdm=False)
    with LLM(folder, skip_tokenizer_init=True, **OPTIONS) as llm:
        [found] = llm.embed([PROMPT], use_tqdm=False)
        with pytest.raises(RequestError, match="prompts needs a tokenizer"):
            llm.embed("A text", use_tqdm=False)
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.score("A text", "another", use_tqdm=False)
    assert found.outputs.embedding == expected.outputs.embedding


@pytest.fixture(scope="module")
def server(bare: Path) -> Iterator[str]:
    with running_server(bare, "--skip-tokenizer-init", "--num-gpu-blocks-override", "300") as running:
        yield running.url
        assert running.interrupt() == 0


@pytest.mark.slow
def test_a_server_takes_and_returns_token_ids(server: str, whole: Path) -> None:
    """Token ids work for whole and streamed answers; ``return_token_ids`` requests them."""
    with LLM(whole, **OPTIONS) as llm:
        [expected] = llm.generate([PROMPT], SamplingParams(**GREEDY), use_tqdm=False)
    body = {"prompt": PROMPT, "return_token_ids": True, "logprobs": 1, **GREEDY}
    [choice] = httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()["choices"]
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    streamed = httpx.post(f"{server}/v1/completions", json={**body, "stream": True}, timeout=60).text
    assert streamed.rstrip().endswith("data: [DONE]")
    tokens = {"token_ids": PROMPT, "sampling_params": GREEDY}
    [alone] = httpx.post(f"{server}/inference/v1/generate", json=tokens, timeout=60).json()["choices"]
    assert alone["token_ids"] == choice["token_ids"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "A text"}, "prompt"),
        ("/v1/completions", {"prompt": PROMPT, "stop": "x"}, "stop"),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}, "echo"),
        ("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}, "messages"),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "Hello"}]}, "messages"),
        ("/v1/responses", {"input": "Hello"}, "messages"),
        ("/tokenize", {"prompt": "A text"}, "prompt"),
        ("/detokenize", {"tokens": PROMPT}, "tokens"),
    ],
)
def test_a_server_refuses_texts(server: str, path: str, body: dict[str, Any], field: str) -> None:
    answer = httpx.post(f"{server}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "needs a tokenizer, and this engine has none" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == field
    messages = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert httpx.post(f"{server}/v1/messages", json=messages, timeout=60).status_code == 400
