"""Checkpoints of mixtures of experts: as published, as in transformers 5, and by rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.worker.loading.loader import load_model
from engine.worker.models.decoder import Decoder
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from tests.worker.conftest import ModelFolders
from tests.worker.generation import SmallEngine, random_tokens
from tests.worker.parallel.ranks import LoneRank

SPARSE = ("qwen3-moe", "mixtral", "glm4-moe")


def parameters_of(
    folder: Path, group: TensorParallelGroup = ALONE, *, by_rank: bool = False
) -> dict[str, torch.Tensor]:
    """All loaded parameters, by the decoder's own names."""
    options = ModelConfig(model=str(folder), device="cpu", enable_expert_parallel=by_rank)
    model = load_model(options, group).model
    assert isinstance(model, Decoder)
    return dict(model.named_parameters())


@pytest.mark.parametrize("name", SPARSE)
def test_both_layouts_of_transformers_are_read(
    name: str, model_folders: ModelFolders, tmp_path: Path
) -> None:
    """With a tensor for each projection of each expert, or one for all experts of a layer, the whole model
    and each of two ranks get the same numbers."""
    folder = model_folders(name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any("experts.gate_up_proj" in name for name in load_file(tmp_path / "fused/model.safetensors"))
    for group in (ALONE, LoneRank(0, 2), LoneRank(1, 2)):
        wanted = parameters_of(folder, group)
        for layout in ("published", "fused"):
            found = parameters_of(tmp_path / layout, group)
            assert found.keys() == wanted.keys()
            for parameter, value in wanted.items():
                assert torch.equal(found[parameter], value), (layout, parameter)


@pytest.mark.parametrize("name", SPARSE)
def test_ranks_have_a_part_of_each_expert(name: str, model_folders: ModelFolders) -> None:
    """An expert's gates, ups and output's inputs are halved; routers are whole."""
    whole = parameters_of(model_folders(name))
    first, second = (parameters_of(model_folders(name), LoneRank(rank, 2)) for rank in range(2))
    layer = "layers.3.mlp." if "layers.3.mlp.router.weight" in whole else "layers.1.mlp."
    assert torch.equal(first[layer + "router.weight"], whole[layer + "router.weight"])
    down = layer + "experts.down"
    assert torch.equal(torch.cat((first[down], second[down]), dim=2), whole[down])
    gate_up = layer + "experts.gate_up"
    gates, ups = zip(*(each[gate_up].chunk(2, dim=1) for each in (first, second)), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), dim=1), whole[gate_up])


def test_corrections_of_a_router_stay_in_fp32(model_folders: ModelFolders) -> None:
    """Corrections stay in fp32, as in transformers: they are added to scores that are nearly equal."""
    folder = model_folders("glm4-moe")
    options = ModelConfig(model=str(folder), device="cpu", dtype="bfloat16", attention_backend="torch")
    model = load_model(options).model
    assert isinstance(model, Decoder)
    name = "mlp.gate.e_score_correction_bias"
    correction = model.get_parameter("layers.3.mlp.router.correction")
    assert torch.equal(correction, load_file(folder / "model.safetensors")[f"model.layers.3.{name}"])


def test_layers_for_predicting_further_tokens_are_left_out(
    model_folders: ModelFolders, tmp_path: Path
) -> None:
    """Published GLM checkpoints have one after the last layer; if the config omits it, it is refused."""
    folder = Path(shutil.copytree(model_folders("glm4-moe"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(8, 8)}, folder / "model.safetensors")
    prompt = random_tokens(20, seed=1)
    assert SmallEngine(folder).generate(prompt) == SmallEngine(model_folders("glm4-moe")).generate(prompt)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match=r"holds tensor model.layers.4.eh_proj.weight, which"):
        load_model(ModelConfig(model=str(folder), device="cpu"))


def test_an_expert_that_is_missing_is_named(model_folders: ModelFolders, tmp_path: Path) -> None:
    """No result comes from uninitialized memory."""
    folder = Path(shutil.copytree(model_folders("mixtral"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    victim = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del tensors[victim]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"Tensor {victim} of MixtralForCausalLM is missing"):
        load_model(ModelConfig(model=str(folder), device="cpu"))


def test_experts_that_cannot_be_cut_are_refused(model_folders: ModelFolders) -> None:
    """Indivisible experts are refused in one sentence with the option, its value and the model's number."""
    sentence = "tensor_parallel_size is 4, .* intermediate size of experts, 50"
    folder = model_folders("qwen3-moe")
    config = json.loads((folder / "config.json").read_text()) | {"moe_intermediate_size": 50}
    odd = folder.parent / "odd"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=sentence):
        load_model(ModelConfig(model=str(odd), device="cpu", load_format="dummy"), LoneRank(0, 4))


def test_experts_by_rank_are_whole(model_folders: ModelFolders, tmp_path: Path) -> None:
    """A rank reads some experts of either layout and all of the router; a shared expert is halved."""
    folder = model_folders("glm4-moe")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, save_original_format=False)
    whole = parameters_of(folder)
    for layout in (folder, tmp_path):
        halves = [parameters_of(layout, LoneRank(rank, 2), by_rank=True) for rank in range(2)]
        for name in ("layers.3.mlp.experts.gate_up", "layers.3.mlp.experts.down"):
            assert torch.equal(torch.cat([half[name] for half in halves]), whole[name])
        assert torch.equal(halves[1]["layers.3.mlp.router.weight"], whole["layers.3.mlp.router.weight"])
        assert halves[0]["layers.3.mlp.shared.down.weight"].shape == (64, 16)


@pytest.mark.parametrize(
    ("name", "num_ranks", "sentence"),
    [
        ("qwen3", 2, "enable_expert_parallel needs a mixture of experts .*; Qwen3ForCausalLM is not"),
        ("glm4-moe", 4, ""),
        ("qwen3-moe-every-other", 4, "tensor_parallel_size is 4, .* number of experts, 6"),
    ],
)
def test_what_has_no_experts_to_divide_is_refused(
    name: str, num_ranks: int, sentence: str, model_folders: ModelFolders
) -> None:
    """A model without divisible experts is refused in one sentence."""
    options = ModelConfig(model=str(model_folders(name)), device="cpu", enable_expert_parallel=True)
    if not sentence:
        load_model(options, LoneRank(0, num_ranks))
        return
    with pytest.raises(ConfigError, match=sentence):
        load_model(options, LoneRank(0, num_ranks))


def test_experts_are_not_quantized_without_kernels(model_folders: ModelFolders) -> None:
    """Without kernels, the option is refused by name before any weight is read."""
    options = ModelConfig(model=str(model_folders("mixtral")), device="cpu", quantization="int8")
    with pytest.raises(ConfigError, match="quantization of a mixture of experts needs the compiled"):
        load_model(options)


def test_hunyuan_s_layer_for_multi_token_prediction_is_left_out(
    model_folders: ModelFolders, tmp_path: Path
) -> None:
    """The published folder has one layer more, and no dtype in its config: that of the weights counts."""
    folder = shutil.copytree(model_folders("hy-v3"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors")
    loaded = load_model(ModelConfig(model=str(folder), device="cpu"))
    assert loaded.dtype == torch.bfloat16
