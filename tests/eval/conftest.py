"""The real server, started once for all tests that measure it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.worker.loading.tiny_models import make_model_folder
from eval.load.server_process import ServerProcess

MAX_MODEL_LEN = 4096
NUM_BLOCKS = 300
"""Blocks of 16 tokens: fewer than the tests' jobs need together."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the continuum policy."""
    folder = tmp_path_factory.mktemp("server")
    model = make_model_folder(folder / "model", vocab_size=1024, max_position_embeddings=MAX_MODEL_LEN)
    arguments = [
        *(str(model), "--port", "0", "--host", "127.0.0.1", "--served-model-name", "tiny"),
        *("--scheduling-policy", "continuum", "--num-gpu-blocks-override", str(NUM_BLOCKS)),
    ]
    with ServerProcess(arguments, folder / "server.log") as process:
        yield process.base_url
