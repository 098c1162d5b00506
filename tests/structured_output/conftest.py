"""A small model with random weights: any sense in its output comes from the grammar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.frontend.llm import LLM
from engine.worker.loading.tiny_models import make_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(str(model_folder), multiprocess=False, num_gpu_blocks_override=600) as llm:
        yield llm
