"""A model with chunked local attention: a turn's pin holds its current chunk, and the next turn finds
everything."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.api.test_chat import TOOL
from tests.api.test_jobs_endpoints import Body, call, job, receipt

BLOCK = 16
CHUNK_BLOCKS = 7
FIELDS = {
    "attention_chunk_size": CHUNK_BLOCKS * BLOCK,
    "intermediate_size_mlp": 96,
    "no_rope_layer_interval": 2,
    "num_local_experts": 4,
}
"""Every other layer has full attention."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(
        tmp_path_factory.mktemp("chunks"),
        "llama4_text",
        num_layers=4,
        intermediate_size=48,
        extra_config=FIELDS,
        max_position_embeddings=2048,
    )


@pytest.mark.slow
def test_a_pin_holds_the_chunk_that_goes_on_and_a_return_finds_all(model: Path) -> None:
    """The receipt reports the tokens pinned for the next turn, the job the pinned blocks of both groups."""
    with (
        running_server(model, "--num-gpu-blocks-override", "400") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        messages, first = call(http, "a job of many words " * 40, job_id="one")
        told = receipt(first)
        num_blocks = told["pinned_tokens"] // BLOCK
        (branch,) = job(http, "one")["branches"]
        assert num_blocks > 2 * CHUNK_BLOCKS
        assert branch["pinned_blocks"] == num_blocks + num_blocks % CHUNK_BLOCKS
        again: Body = {"messages": messages, "max_tokens": 4, "job_id": "one", "tools": [TOOL]}
        answer = http.post("/v1/chat/completions", json=again).json()
        back = receipt(answer)
        assert back["previous_pin"] == "handed_over"
        assert back["cached_tokens"] == told["pinned_tokens"]
