"""Fixtures: one small model and one server, shared by all tests of the HTTP surface since starting takes
seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, is_alive, running_server

SERVER_FLAGS = "CONTINUUM_TEST_SERVER_FLAGS"
"""Environment variable with more flags for the server of all tests, such as ``--data-parallel-size 2``."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3", max_position_embeddings=1024)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    more = os.environ.get(SERVER_FLAGS, "").split()
    flags = ("--num-gpu-blocks-override", "400", "--trust-request-chat-template", *more)
    with running_server(model, *flags) as running:
        yield running
        cores = running.core_pids()
        assert running.interrupt() == 0
        assert not any(map(is_alive, cores))


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
