"""A baseline decides behind the real server too."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server

pytestmark = pytest.mark.slow


def test_a_server_runs_a_baseline(tmp_path: Path) -> None:
    """Under fixed-ttl a job's turn stays pinned, and the turn that comes back finds it although other
    requests have filled the rest of the pool meanwhile."""
    model = make_model_folder(tmp_path / "model", max_position_embeddings=512)
    flags = ("--scheduling-policy", "fixed-ttl:600", "--num-gpu-blocks-override", "33")
    with running_server(model, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:

        def cached_tokens(prompt: list[int], **fields: str) -> int:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            cached: int = usage["prompt_tokens_details"]["cached_tokens"]
            return cached

        history = [7, *range(100, 259)]
        assert cached_tokens(history, job_id="a") == 0
        for other in range(8, 12):
            assert cached_tokens([other] * 320) == 0
        assert cached_tokens([*history, 5, 6, 7], job_id="a") == 160
