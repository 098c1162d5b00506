"""One small model and one server for all tests of the HTTP surface: starting takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, is_alive, running_server


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3", max_position_embeddings=1024)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    flags = ("--num-gpu-blocks-override", "400", "--trust-request-chat-template")
    with running_server(model, *flags) as running:
        yield running
        core = running.core_pid()
        assert running.interrupt() == 0
        assert not is_alive(core)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
