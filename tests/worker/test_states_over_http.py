"""``continuum serve`` with a model that has layers with states."""

from __future__ import annotations

import httpx
import pytest

from engine.config.engine_config import ModelConfig
from engine.tokenization.tokenizer import Tokenizer
from tests.api.server import running_server
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens

FLAGS = (
    *("--device", "cpu", "--scheduling-policy", "fcfs", "--num-gpu-blocks-override", "40"),
    *("--num-state-slots", "12", "--max-model-len", "160", "--max-num-batched-tokens", "32"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next", "granite4"])
def test_a_turn_continues_from_a_state(name: str, model_folders: ModelFolders) -> None:
    """The second request begins where a state of the first was kept, and both give transformers' tokens."""
    folder = model_folders(name)
    reference, tokenizer = Reference(folder), Tokenizer.load(ModelConfig(model=str(folder)))
    prompt = random_tokens(60, seed=1)
    with (
        running_server(folder, *FLAGS) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for turn, num_cached in enumerate((0, 64)):
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body).json()
            expected = reference.greedy(prompt, 12)
            assert answer["choices"][0]["text"] == tokenizer.decode(expected)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
            prompt += expected + random_tokens(9, seed=2 + turn)
