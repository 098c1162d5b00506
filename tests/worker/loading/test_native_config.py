"""A config read without transformers means the same as in transformers, or is left to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config.engine_config import ModelConfig
from engine.worker.loading.model_folder import choose_dtype, choose_max_model_len, read_config
from engine.worker.loading.native_config import NativeConfig, native_config
from engine.worker.models.base import architecture_of
from engine.worker.models.families.table import decoder_shape, is_native
from engine.worker.models.rotary import RotaryEmbedding
from tests.worker.conftest import ModelFolders

LLAMA_3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA_3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 128256,
}
"""Configs on the hub, with the names of the library's fourth version."""
PLAIN = {name: value for name, value in LLAMA.items() if name != "rope_scaling"}
QWEN = {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}
QWEN3_MOE = (
    {name: value for name, value in (PLAIN | QWEN).items() if name not in ("mlp_bias", "pretraining_tp")}
    | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "mlp_only_layers": []}
    | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8}
    | {"output_router_logits": False, "router_aux_loss_coef": 0.001, "rope_scaling": None}
)
MIXTRAL = (
    {name: value for name, value in PLAIN.items() if name not in ("head_dim", "attention_bias", "mlp_bias")}
    | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    | {"output_router_logits": False, "router_aux_loss_coef": 0.02}
)
GLM4_MOE = (
    {name: value for name, value in PLAIN.items() if name not in ("mlp_bias", "pretraining_tp")}
    | {"model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "hidden_size": 5120}
    | {"first_k_dense_replace": 3, "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1}
    | {"n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True}
    | {"num_attention_heads": 96, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5}
    | {"routed_scaling_factor": 2.5, "use_qk_norm": True, "rope_scaling": None, "num_key_value_heads": 8}
)
KNOWN = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, some layers dense": QWEN3_MOE | {"mlp_only_layers": [0, 3], "decoder_sparse_step": 2},
    "mixtral": MIXTRAL,
    "mixtral, no theta": {name: value for name, value in MIXTRAL.items() if name != "rope_theta"},
    "mixtral with a window": MIXTRAL | {"sliding_window": 4096},
    "glm4_moe": GLM4_MOE,
    "glm4_moe, half of a head by default": {
        name: value for name, value in GLM4_MOE.items() if name != "partial_rotary_factor"
    },
    "llama 3": LLAMA,
    "llama, linear": PLAIN | {"rope_scaling": {"type": "linear", "factor": 4}},
    "llama, no theta": {name: value for name, value in PLAIN.items() if name != "rope_theta"},
    "mistral": PLAIN | {"model_type": "mistral", "sliding_window": 4096, "head_dim": None},
    "mistral without a window": PLAIN | {"model_type": "mistral", "sliding_window": None},
    "qwen2": PLAIN | QWEN | {"model_type": "qwen2"},
    "qwen3": PLAIN | QWEN | {"model_type": "qwen3", "rope_scaling": None, "head_dim": 128},
    "qwen3, layers named": PLAIN
    | QWEN
    | {"model_type": "qwen3", "sliding_window": None, "layer_types": ["full_attention"] * 16},
}
UNKNOWN = {
    "another family": PLAIN | {"model_type": "gpt_neox"},
    "no family": {name: value for name, value in PLAIN.items() if name != "model_type"},
    "a field of its own": PLAIN | {"attention_sinks": True},
    "code of its own": PLAIN | {"auto_map": {"AutoConfig": "configuration.MyConfig"}},
    "rounded weights": PLAIN | {"quantization_config": {"quant_method": "gptq"}},
    "a window for some layers": PLAIN | QWEN | {"model_type": "qwen2", "use_sliding_window": True},
    "a window by default": PLAIN | {"model_type": "mistral"},
    "heads of a default size": {n: v for n, v in PLAIN.items() if n != "head_dim"} | {"model_type": "qwen3"},
    "stretched by yarn": PLAIN | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "rope with a number missing": PLAIN | {"rope_scaling": {"rope_type": "linear"}},
    "rope with a number too many": PLAIN | {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
    "rope that is no record": PLAIN | {"rope_scaling": "linear"},
    "part of a head turned": PLAIN | {"partial_rotary_factor": 0.5},
    "a size that is a text": PLAIN | {"hidden_size": "2048"},
    "a size of nothing": PLAIN | {"num_hidden_layers": 0},
    "heads that do not divide": PLAIN | {"num_attention_heads": 30},
    "heads of odd size": PLAIN | {"head_dim": 63},
    "another activation": PLAIN | {"hidden_act": "gelu"},
    "part of a head turned where it is not": QWEN3_MOE | {"partial_rotary_factor": 0.5},
    "experts of another family": QWEN3_MOE | {"n_shared_experts": 1},
    "experts of none": PLAIN | {"num_experts": 8},
    "the number of experts missing": {n: v for n, v in MIXTRAL.items() if n != "num_local_experts"},
    "both names of a field": PLAIN | {"dtype": "float32"},
}


def theirs(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder)


def frequencies_of_theirs(config: Any, head_dim: int) -> torch.Tensor:
    """The library has no function for plain frequencies: each model computes them."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))[0]
        return frequencies
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain: torch.Tensor = 1.0 / (rope["rope_theta"] ** exponents)
    return plain


def assert_same(folder: Path) -> None:
    """Asserts that both ways read the same from a config."""
    ours: Any = read_config(folder, trust_remote_code=False)
    other = theirs(folder)
    kind: type = type(ours)
    assert issubclass(kind, NativeConfig)
    assert is_native(ours)
    shape = decoder_shape(other)
    assert decoder_shape(ours) == shape
    assert architecture_of(ours) == architecture_of(other)
    assert choose_dtype("auto", ours) == choose_dtype("auto", other)
    options = ModelConfig(model=str(folder))
    assert choose_max_model_len(options, ours) == choose_max_model_len(options, other)
    rotary_dim = shape.rotary_dim or shape.head_dim
    rotary = RotaryEmbedding(ours, rotary_dim, torch.device("cpu"))
    assert rotary.scaling == 1.0
    assert torch.equal(rotary.frequencies, frequencies_of_theirs(other, rotary_dim))


@pytest.mark.parametrize("fields", KNOWN.values(), ids=KNOWN)
def test_what_is_read_is_what_transformers_reads(fields: dict[str, Any], tmp_path: Path) -> None:
    """Shape, frequencies, type and length of typical configs are equal."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert_same(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-llama3-rope", "mistral", "mistral-window", "qwen2", "qwen3"),
        *("qwen3-moe", "mixtral", "mixtral-window", "glm4-moe", "glm4-moe-groups"),
    ],
)
def test_what_transformers_writes_is_read_without_it(name: str, model_folders: ModelFolders) -> None:
    """Every model that transformers saves starts without it."""
    assert_same(model_folders(name))


@pytest.mark.parametrize("fields", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_to_the_last_field_is_left_to_transformers(fields: dict[str, Any]) -> None:
    """Nothing is guessed: an unknown field may have a meaning, or be wrong, which only transformers knows."""
    assert native_config(fields) is None


@pytest.mark.parametrize("name", ["llama-yarn-tied", "qwen2-window", "gpt_neox"])
def test_the_others_are_read_by_transformers(name: str, model_folders: ModelFolders) -> None:
    """Configs that are not read natively equal transformers'."""
    folder = model_folders(name)
    assert read_config(folder, trust_remote_code=False).to_dict() == theirs(folder).to_dict()
