"""A model with sliding windows: a turn's pin holds one window, and the next turn finds everything."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.api.test_chat import TOOL
from tests.api.test_jobs_endpoints import Body, call, job, receipt

BLOCK = 16
WINDOW = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
"""Two layers of full attention and two that see 32 tokens: two blocks before a block's first token."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(
        tmp_path_factory.mktemp("windows"),
        "qwen2",
        num_layers=4,
        extra_config=WINDOW,
        max_position_embeddings=2048,
    )


@pytest.mark.slow
def test_a_pin_holds_one_window_and_a_return_finds_all(model: Path) -> None:
    """The receipt reports the tokens pinned for the next turn, the job the pinned blocks of both groups."""
    with (
        running_server(model, "--num-gpu-blocks-override", "400") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        messages, first = call(http, "a job of many words " * 40, job_id="one")
        told = receipt(first)
        num_blocks = told["pinned_tokens"] // BLOCK
        (branch,) = job(http, "one")["branches"]
        assert num_blocks > 20
        assert branch["pinned_blocks"] == num_blocks + 2
        again: Body = {"messages": messages, "max_tokens": 4, "job_id": "one", "tools": [TOOL]}
        answer = http.post("/v1/chat/completions", json=again).json()
        back = receipt(answer)
        assert back["previous_pin"] == "handed_over"
        assert back["cached_tokens"] == told["pinned_tokens"]


@pytest.mark.slow
def test_a_user_may_keep_all_layers_in_one_table(model: Path) -> None:
    """With one block table for all layers a pin holds one block per block of tokens; the answer is the
    same."""
    answers = []
    for flags in ([], ["--disable-hybrid-kv-cache-manager"]):
        with (
            running_server(model, "--num-gpu-blocks-override", "400", *flags) as server,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            messages, first = call(http, "a job of many words " * 40, job_id="one")
            (branch,) = job(http, "one")["branches"]
            window = 0 if flags else 2
            assert branch["pinned_blocks"] == receipt(first)["pinned_tokens"] // BLOCK + window
            answers.append((messages[-2]["content"], messages[-2]["tool_calls"][0]["function"]))
    assert answers[0] == answers[1]
