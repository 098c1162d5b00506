from __future__ import annotations

from pathlib import Path

import pytest

from engine.worker.loading.tiny_models import make_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3", max_position_embeddings=1024)
