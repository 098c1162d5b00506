"""DeepSeek's and Kimi's folders in their published form, and what of them is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.cpu.packed_weights import compiled_gemm
from engine.worker.loading.loader import load_model
from engine.worker.loading.model_folder import read_config
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from engine.worker.models.families.table import decoder_shape, is_native
from engine.worker.models.shape import SparseShape
from tests.worker.conftest import VARIANTS, ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.loading.quantized_folders import WRITERS, write_quantized
from tests.worker.parallel.ranks import LoneRank

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""The config on the hub."""


def edited(folder: Path, to: Path, **fields: object) -> Path:
    """Copies a folder and changes fields of its config."""
    copy = Path(shutil.copytree(folder, to))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | fields))
    return copy


def test_kimis_config_is_read_without_its_code(tmp_path: Path) -> None:
    """All fields of the published config are read."""
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2))
    config = read_config(tmp_path, trust_remote_code=False)
    assert is_native(config)
    shape = decoder_shape(config)
    assert shape.latent is not None
    assert (shape.num_layers, shape.num_heads, shape.vocab_size) == (61, 64, 163840)
    assert (shape.num_kv_heads, shape.head_dim, shape.rotary_dim) == (1, 576, 64)
    stretch = (0.1 * 3.4657359 + 1) ** 2  # log 32
    assert shape.latent.scale == pytest.approx(192**-0.5 * stretch)
    sparse = shape.mlps[1]
    assert isinstance(sparse, SparseShape)
    assert (sparse.routing.num_experts, sparse.routing.scale) == (384, 2.827)


def test_a_folder_of_kimis_type_gives_the_tokens_of_deepseek(
    model_folders: ModelFolders, tmp_path: Path
) -> None:
    """The folder's remote code is missing and not needed, and its auto_map is ignored."""
    folder = model_folders("deepseek-v3")
    kimi = edited(folder, tmp_path / "kimi", model_type="kimi_k2", auto_map=KIMI_K2["auto_map"])
    prompt = random_tokens(40, seed=1)
    with LLM(str(kimi), max_model_len=128, num_gpu_blocks_override=20) as llm:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == Reference(folder).greedy(prompt, 12)


def test_ranks_have_some_heads_and_all_of_the_latent(model_folders: ModelFolders) -> None:
    """Each rank has all that makes latents, and half of what makes queries, keys and values of them."""

    def attention_of(group: LoneRank | None) -> dict[str, torch.Tensor]:
        options = ModelConfig(model=str(model_folders("deepseek-v3")), device="cpu")
        model = (load_model(options) if group is None else load_model(options, group)).model
        assert isinstance(model, Decoder)
        assert (model.num_kv_heads, model.head_dim, model.num_kv_vectors) == (1, 64, 1)
        prefix = "layers.1.attention."
        return {
            name.removeprefix(prefix): parameter
            for name, parameter in model.named_parameters()
            if name.startswith(prefix)
        }

    whole, *halves = (attention_of(group) for group in (None, LoneRank(0, 2), LoneRank(1, 2)))
    for name in ("down.weight", "q_norm", "kv_norm"):
        assert all(torch.equal(half[name], whole[name]) for half in halves)
    for name in ("query.weight", "key_map", "value_map"):
        assert torch.equal(torch.cat([half[name] for half in halves]), whole[name])


def test_heads_that_cannot_be_cut_are_refused(model_folders: ModelFolders) -> None:
    """Indivisible heads are refused in one sentence."""
    options = ModelConfig(model=str(model_folders("deepseek-v3")), device="cpu")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3, .* number of heads, 4"):
        load_model(options, LoneRank(0, 3))


def test_layers_for_predicting_further_tokens_are_left_out(
    model_folders: ModelFolders, tmp_path: Path
) -> None:
    """DeepSeek-V3's checkpoint has one after the last layer."""
    folder = Path(shutil.copytree(model_folders("deepseek-v3"), tmp_path / "model"))
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.4.eh_proj.weight": torch.zeros(8, 8)}, path)
    load_model(ModelConfig(model=str(folder), device="cpu"))


def test_a_checkpoint_in_fp8_gives_the_tokens_of_its_weights(tmp_path: Path) -> None:
    """A checkpoint with scales of blocks that do not divide the latent's rows, as DeepSeek-V3's, is right."""
    fields = {**VARIANTS["deepseek-v3"], "hidden_size": 128}
    source = make_model_folder(tmp_path / "plain", **fields)
    folder = write_quantized(source, tmp_path, WRITERS["fp8-blocks"])
    assert any("kv_b_proj" in name for name in folder.names)
    prompt = random_tokens(30, seed=4)
    with LLM(str(folder.path), max_model_len=64, num_gpu_blocks_override=10) as llm:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == Reference(folder.dequantized).greedy(prompt, 12)


@pytest.mark.slow
def test_in_int8_the_maps_of_latents_stay_as_they_are(tmp_path: Path) -> None:
    """Linears are quantized, where there are kernels for experts too."""
    folder = make_model_folder(tmp_path / "model", **VARIANTS["deepseek-v2"] | {"dtype": "bfloat16"})
    if compiled_gemm(64, torch.device("cpu"), torch.bfloat16) is None:
        pytest.skip("there is no compiled GEMM: it needs a compiler and a CPU with AVX512_BF16")
    model = load_model(ModelConfig(model=str(folder), device="cpu", quantization="int8")).model
    assert isinstance(model, Decoder)
    attention = model.layers[1].get_submodule("attention")
    assert not any(isinstance(module, torch.nn.Linear) for module in attention.modules())
    up = load_file(folder / "model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"]
    keys, values = attention.get_parameter("key_map"), attention.get_parameter("value_map")
    assert torch.equal(torch.cat((keys, values.transpose(1, 2)), dim=1).flatten(0, 1), up)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek-v2", {"norm_topk_prob": True}),
        ("deepseek-v2", {"topk_method": "noaux_tc"}),
        ("deepseek-v2", {"mlp_bias": True}),
        ("deepseek-v3", {"scoring_func": "softmax"}),
        ("deepseek-v3", {"moe_layer_freq": 2}),
        ("deepseek-v3", {"hidden_act": "gelu"}),
    ],
)
def test_what_their_code_would_not_compute_is_refused(
    name: str, fields: dict[str, object], model_folders: ModelFolders, tmp_path: Path
) -> None:
    """They are refused, rather than computed by code that ignores these fields."""
    folder = edited(model_folders(name), tmp_path / "model", **fields)
    with pytest.raises(ModelLoadError, match="has no native implementation"):
        load_model(ModelConfig(model=str(folder), device="cpu", model_impl="native"))
    with pytest.raises(ModelLoadError, match="asks for what neither native code nor transformers' computes"):
        load_model(ModelConfig(model=str(folder), device="cpu"))


def test_published_defaults_are_native() -> None:
    """The default configs of transformers are native: the first DeepSeek-V2 and DeepSeek-V3."""
    assert is_native(DeepseekV2Config(num_experts_per_tok=6))
    assert is_native(DeepseekV3Config())
