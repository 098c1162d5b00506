"""Quantized model folders, and helpers of the tests that load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config.engine_config import ModelConfig
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.loader import load_model
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from tests.worker.loading.quantized_folders import (
    WRITERS,
    QuantizedFolder,
    write_quantized,
)
from tests.worker.parallel.ranks import LoneRank

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


Folders = Callable[[str], QuantizedFolder]
"""Returns a folder in the format of that name, made once."""


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Quantized folders of a native model."""
    return _folders(tmp_path_factory, "qwen2")


@pytest.fixture(scope="session")
def other_family(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Quantized folders of a model that runs through transformers."""
    return _folders(tmp_path_factory, "olmo2")


def _folders(tmp_path_factory: pytest.TempPathFactory, family: str) -> Folders:
    base = tmp_path_factory.mktemp(family)
    source = make_model_folder(base / "source", family, **SIZES)  # type: ignore[arg-type]
    made: dict[str, QuantizedFolder] = {}

    def folder_of(name: str) -> QuantizedFolder:
        if name not in made:
            made[name] = write_quantized(source, base / name, WRITERS[name])
        return made[name]

    return folder_of


def generated(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    with LLM(str(folder), multiprocess=False, **options) as llm:
        (output,) = llm.generate([prompt], GREEDY)
    return list(output.outputs[0].token_ids)


def rank_of(folder: Path, rank: int) -> Decoder:
    model = load_model(ModelConfig(model=str(folder), device="cpu"), LoneRank(rank, 2)).model
    assert isinstance(model, Decoder)
    return model
