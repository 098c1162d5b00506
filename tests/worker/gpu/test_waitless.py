"""Which models' steps a CUDA graph may hold, and that grouped experts do not change their results."""

from __future__ import annotations

import pytest
import torch

from engine.config.engine_config import ModelConfig
from engine.worker.gpu.torch_ops import TorchOps
from engine.worker.gpu.triton_ops import TritonOps
from engine.worker.gpu.waitless import GroupedExperts, group_experts, never_waits
from engine.worker.loading.loader import load_model
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.moe import MixtureOfExperts
from tests.worker.conftest import MODEL_NAMES, WITH_INDEXER, WITH_STATES, ModelFolders

THROUGH_TRANSFORMERS = ("gpt_neox", "phi", "olmo2")


def loaded(name: str, model_folders: ModelFolders) -> CausalModel:
    return load_model(ModelConfig(model=str(model_folders(name)), max_model_len=64)).model


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_native_steps_make_no_host_wait(name: str, model_folders: ModelFolders) -> None:
    """All native models' steps make none, except those with states or an indexer."""
    model = loaded(name, model_folders)
    group_experts(model, TritonOps())
    assert never_waits(model) == (name not in (*WITH_STATES, *WITH_INDEXER, *THROUGH_TRANSFORMERS))


def test_without_a_grouped_gemm_experts_are_asked_for(model_folders: ModelFolders) -> None:
    """Plain torch has no grouped GEMM: the host must know which experts are chosen."""
    model = loaded("deepseek-v3", model_folders)
    group_experts(model, TorchOps())
    assert not never_waits(model)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe", "gpt-oss", "llama4", "gemma4"])
def test_grouped_experts_are_those_experts(name: str, model_folders: ModelFolders) -> None:
    """In a model that runs layer by layer, each mixture gives the same sums."""
    before, after = loaded(name, model_folders), loaded(name, model_folders)
    group_experts(after, TritonOps())
    assert isinstance(before, Decoder)
    assert isinstance(after, Decoder)
    mixtures = [
        [each for each in model.modules() if isinstance(each, MixtureOfExperts)] for model in (before, after)
    ]
    assert mixtures[1]
    for plain, grouped in zip(*mixtures, strict=True):
        assert isinstance(grouped.experts, GroupedExperts)
        x = torch.randn(11, before.shape.hidden_size, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(grouped(x), plain(x))
