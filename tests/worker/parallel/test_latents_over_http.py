"""DeepSeek over HTTP on two ranks: a turn whose latents are loaded from host memory, and its usage."""

from __future__ import annotations

import httpx
import pytest

from tests.api.server import running_server
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens

BYTES_PER_BLOCK = 4 * 64 * 4 * 16
"""Bytes of a block of deepseek-v3 at each rank: layers x numbers of a latent x bytes x tokens."""
FLAGS = (
    *("--tensor-parallel-size", "2", "--enable-expert-parallel", "--device", "cpu"),
    *("--kv-cache-memory-bytes", str(33 * BYTES_PER_BLOCK), "--max-model-len", "512"),
    *("--kv-offloading-size", f"{200 * BYTES_PER_BLOCK / 2**30}", "--scheduling-policy", "fcfs"),
)


@pytest.mark.slow
def test_a_returning_turn_has_its_latents(model_folders: ModelFolders) -> None:
    """After other requests took its blocks, a turn hits its latents and has transformers' tokens."""
    folder = model_folders("deepseek-v3")
    reference = Reference(folder)
    with (
        running_server(folder, *FLAGS) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def ask(prompt: list[int]) -> tuple[list[int], int]:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            reply = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
            cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            return reply["choices"][0]["token_ids"], cached

        history = random_tokens(320, seed=1)
        answer, cached = ask(history)
        assert (answer, cached) == (reference.greedy(history, 8), 0)
        ask(random_tokens(500, seed=2))
        turn = [*history, *answer, 5, 6, 7]
        assert ask(turn) == (reference.greedy(turn, 8), 320)
        loaded = [
            line
            for line in http.get("/metrics").text.splitlines()
            if line.startswith("continuum:host_kv_loaded_tokens_total")
        ]
        assert [float(line.split()[-1]) for line in loaded] == [320.0]
