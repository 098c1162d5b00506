"""Gemma 4's layers that leave something to later ones: what is kept of a step, and who runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.engine_config import ModelConfig
from engine.frontend.llm import LLM
from engine.records.kv_cache_groups import one_group
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.backend import AttentionBatch
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.mixed_heads import over_pool
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.loading.loader import load_model
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from engine.worker.models.hidden_tap import HiddenTap
from tests.worker.conftest import VARIANTS, ModelFolders
from tests.worker.generation import Reference, random_tokens


def loaded(folder: Path) -> Decoder:
    model = load_model(ModelConfig(model=str(folder), device="cpu", max_model_len=128)).model
    assert isinstance(model, Decoder)
    return model


def batch_of(num_tokens: int) -> AttentionBatch:
    """A prompt alone, in block 1."""
    lengths = np.array([num_tokens])
    offsets = np.arange(num_tokens)
    return AttentionBatch(
        0, lengths, lengths, np.ones((1, 1), dtype=np.int64), np.ones_like(offsets), offsets
    )


def first_step(model: Decoder, runs: Decoder | HiddenTap, tokens: list[int]) -> torch.Tensor:
    """The logits of a prompt's last token."""
    heads = model.all_heads or ((model.num_kv_heads, model.head_dim),) * len(model.windows)
    sizes = [number * size for number, size in heads]
    slots = max(sizes) // min(sizes)
    spec = KvCacheSpec(
        one_group(len(heads), slots), *min(heads), torch.float32, len(tokens), layer_heads=model.all_heads
    )
    attention = over_pool(spec.allocate(2, torch.device("cpu")), spec.places, TorchPagedAttention)
    attention.begin_step(batch_of(len(tokens)))
    with torch.inference_mode():
        positions = torch.arange(len(tokens))
        return runs.forward(torch.tensor(tokens), positions, positions[-1:], attention)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-small"])
def test_nothing_of_a_step_stays(name: str, model_folders: ModelFolders) -> None:
    """Keys and values are kept only for layers that attend to another's, until the last of them has."""
    model = loaded(model_folders(name))
    first_step(model, model, random_tokens(9, seed=1))
    assert not model.values.keys_and_values


def test_layers_have_their_own_inputs_under_a_tap(model_folders: ModelFolders) -> None:
    """A drafter that reads hidden states runs the layers by itself."""
    folder = model_folders("gemma4-small")
    model = loaded(folder)
    tokens = random_tokens(9, seed=1)
    (wanted,) = Reference(folder).greedy(tokens, 1)
    assert int(first_step(model, HiddenTap(model, [1]), tokens).argmax()) == wanted


def test_experts_beside_an_mlp_are_returned(model_folders: ModelFolders) -> None:
    """Those of each token and layer, none of them twice."""
    options: dict[str, Any] = {"multiprocess": False, "device": "cpu", "enable_return_routed_experts": True}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with LLM(str(model_folders("gemma4")), max_model_len=128, **options) as llm:
        (output,) = llm.generate([random_tokens(9, seed=1)], params, use_tqdm=False)
    experts = output.outputs[0].routed_experts
    assert experts is not None
    assert experts.shape == (9 + 3 - 1, 3, 3)
    assert all(len(set(chosen)) == 3 for chosen in experts.reshape(-1, 3).tolist())


def test_layers_for_prediction_are_left_out(tmp_path: Path) -> None:
    """ERNIE's experts are published with some, under names of their own."""
    folder = make_model_folder(tmp_path / "model", **VARIANTS["ernie4.5-moe"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.mtp_block.0.mlp.gate_proj.weight"] = torch.zeros(4, 4)
    tensors["model.mtp_emb_norm.0.weight"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert loaded(folder).num_layers == 4


def test_views_of_one_table_do_not_overlap() -> None:
    """Layers whose sizes do not divide each other have places of the least common multiple."""
    heads = ((1, 8), (1, 16), (1, 24))
    spec = KvCacheSpec(one_group(3, 6), 1, 8, torch.float32, 4, layer_heads=heads)
    pool = spec.allocate(2, torch.device("cpu"))
    attention = over_pool(pool, spec.places, TorchPagedAttention)
    attention.begin_step(batch_of(4))
    for layer, (_, size) in enumerate(heads):
        new = torch.full((4, 1, size), float(layer + 1))
        attention.attend(layer, new, new, new, scale=1.0, window=None)
    counts = {number: int((pool == number).sum()) for number in (1.0, 2.0, 3.0)}
    assert counts == {1.0: 2 * 4 * 8, 2.0: 2 * 4 * 16, 3.0: 2 * 4 * 24}
