"""Requests that read KV which others compute in the same step: each answer is that of its prompt alone, and
so are answers of later requests that hit the KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.generation import random_tokens
from tests.worker.random_loads import MAX_TOKENS, Oracle

BLOCK_SIZE = 16
WAYS: dict[str, dict[str, Any]] = {
    "compiled decodes, torch's prompts": {"dtype": "float32"},
    "torch": {"dtype": "float32", "attention_backend": "torch"},
    "a model of transformers": {"dtype": "bfloat16", "model_impl": "transformers"},
    "steps in one call": {"dtype": "bfloat16"},
    "8 bits": {"dtype": "bfloat16", "quantization": "int8"},
    "4 bits": {"dtype": "bfloat16", "quantization": "int4"},
}


class Engine:
    """An LLM, and the right answers."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.llm = LLM(
            str(folder),
            multiprocess=False,
            num_gpu_blocks_override=300,
            max_model_len=2048,
            max_num_batched_tokens=4096,
            **options,
        )
        self._engine = self.llm.engine
        self._oracle = Oracle(folder, **options)
        self._asked: list[list[int]] = []

    def add(self, *prompts: list[int], n: int = 1) -> None:
        params = SamplingParams(n=n, temperature=1.0, top_k=1, max_tokens=MAX_TOKENS, ignore_eos=True)
        for prompt in prompts:
            self._asked.append(prompt)
            self._engine.add_request(str(len(self._asked) - 1), prompt, params)

    def step(self) -> None:
        for output in self._engine.step():
            for answer in output.outputs if output.finished else ():
                prompt = self._asked[int(output.request_id)]
                alone = self._oracle.answer(prompt)
                assert alone.agrees(answer.token_ids), (len(prompt), answer.token_ids, alone)

    def finish(self) -> None:
        """Runs all requests; asserts that each answer is right."""
        while self._engine.has_unfinished_requests():
            self.step()

    def first_token(self, prompt: list[int]) -> int:
        return self._oracle.answer(prompt).token_ids[0]

    def close(self) -> None:
        self.llm.close()
        self._oracle.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(
        tmp_path_factory.mktemp("model"), "qwen3", dtype="bfloat16", hidden_size=128, num_heads=4
    )


@pytest.fixture(scope="module", params=WAYS)
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    engine = Engine(folder, WAYS[request.param])
    yield engine
    engine.close()


@pytest.mark.parametrize("length", [2 * BLOCK_SIZE - 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_twins(engine: Engine, length: int) -> None:
    """Equal prompts, and answers to one prompt, end at a block boundary or next to it; later ones hit."""
    first, second = random_tokens(length, seed=length), random_tokens(length, seed=100 + length)
    engine.add(first, first, first)
    engine.add(second, n=3)
    engine.finish()
    engine.add(first + random_tokens(9, seed=1), second + random_tokens(9, seed=1))
    engine.finish()


def test_who_reads_may_be_shorter_than_who_computes(engine: Engine) -> None:
    """Prompts leave a long one early, by one token and by several, with more tokens in between than pass
    through a layer at once; others read what those compute."""
    long = random_tokens(1200, seed=3)
    early, late = long[: 38 * BLOCK_SIZE], long[: 70 * BLOCK_SIZE]
    branch = late + random_tokens(BLOCK_SIZE, seed=4)
    prompts = [long, [*early, 7], early + [8] * 40, branch, [*branch, 9], [*late, 10], [*branch, 11, 12]]
    engine.add(*prompts)
    engine.finish()
    engine.add(*(prompt + random_tokens(20, seed=5) for prompt in prompts))
    engine.finish()


def test_a_prompt_reads_what_a_decode_computes(engine: Engine) -> None:
    """The next token of a running request fills a block, and new prompts continue it, by one token and by
    several, while another prompt is computed."""
    prompt = random_tokens(2 * BLOCK_SIZE - 1, seed=6)
    token = engine.first_token(prompt)
    engine.add(prompt)
    engine.step()
    engine.add([*prompt, token, 5], random_tokens(50, seed=7), [*prompt, token, *random_tokens(9, seed=8)])
    engine.finish()
    engine.add([*prompt, token, *random_tokens(20, seed=9)])
    engine.finish()
