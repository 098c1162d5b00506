"""The file of a model folder's digests, and when they are recomputed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig, ModelConfig
from engine.worker.loading import identity
from engine.worker.loading.tiny_models import make_model_folder


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    folder = make_model_folder(tmp_path / "model", "llama")
    return EngineConfig(model=ModelConfig(model=str(folder)))


def found(config: EngineConfig) -> str:
    return identity.identity_of(config, config.model, identity.stamps_of(config))


def test_a_small_folder_is_left_as_it_is(config: EngineConfig) -> None:
    """The folder may be under version control, or part of an installed package."""
    folder = Path(config.model.model)
    before = sorted(path.name for path in folder.iterdir())
    found(config)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_digests_of_large_files_are_kept_until_they_change(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_LARGE_BYTES", 10_000)
    monkeypatch.setattr(identity, "_RACY_S", 0.0)
    folder = Path(config.model.model)
    first = found(config)
    kept = json.loads((folder / identity.KEPT).read_text())
    assert "model.safetensors" in kept
    assert "config.json" not in kept
    read: list[str] = []
    digest = identity._digest

    def counted(path: Path) -> str:
        read.append(path.name)
        return digest(path)

    monkeypatch.setattr(identity, "_digest", counted)
    assert found(config) == first
    assert "model.safetensors" not in read
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert found(config) != first
    assert "model.safetensors" in read
