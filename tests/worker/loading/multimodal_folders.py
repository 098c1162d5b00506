"""Small folders with a text decoder and other parts, written by transformers' own classes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MISTRAL = {**_TEXT, "model_type": "mistral", "sliding_window": None}
_QWEN2 = {**{name: x for name, x in _TEXT.items() if name != "head_dim"}, "model_type": "qwen2"}
_QWEN2_VL = {
    **{name: x for name, x in _QWEN2.items() if name != "model_type"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
}
_DELTA_NET = {
    **_TEXT,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 2, 2],
    },
}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION = {**_TOWER, "image_size": 28, "patch_size": 14}
_PIXTRAL = {**_VISION, "model_type": "pixtral", "head_dim": 16}
_CLIP = {**_VISION, "model_type": "clip_vision_model"}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_DEEPSEEK = {
    **{name: x for name, x in _TEXT.items() if name != "head_dim"},
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
MISTRAL3_DECODERS: dict[str, dict[str, Any]] = {
    "ministral3": {**_MISTRAL, "model_type": "ministral3", "rope_parameters": _GROWING},
    "mistral4": {**_DEEPSEEK, "model_type": "mistral4", "rope_parameters": _GROWING},
}
"""Decoders of Mistral 3's folders but the first, by model type: Ministral 3's and Mistral Small 4's."""
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**_TEXT, "sliding_window": 12}, "vision_config": _VISION},
    "gemma4": {
        "text_config": {
            **_TEXT,
            "global_head_dim": 32,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 2,
            "pad_token_id": 0,
        },
        "vision_config": {**_TOWER, "head_dim": 16, "num_key_value_heads": 2},
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "output_proj_dims": 32,
        },
    },
    "internvl": {
        "text_config": _QWEN2,
        "vision_config": {**_TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "kimi_k25": {"text_config": _DEEPSEEK, "vision_config": _TOWER},
    "llava": {"text_config": _MISTRAL, "vision_config": _PIXTRAL},
    "llava_next": {"text_config": _MISTRAL, "vision_config": _CLIP},
    "llava_onevision": {"text_config": _QWEN2, "vision_config": _VISION},
    "mistral3": {"text_config": _MISTRAL, "vision_config": _PIXTRAL},
    "qwen2_vl": {
        "text_config": _QWEN2_VL,
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    },
    "qwen2_5_vl": {
        "text_config": _QWEN2_VL,
        "vision_config": _QWEN_VISION,
    },
    "qwen3_vl": {
        "text_config": _TEXT,
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {"text_config": _DELTA_NET, "vision_config": _QWEN_VISION},
    "qwen3_5_moe": {"text_config": {**_DELTA_NET, **_EXPERTS}, "vision_config": _QWEN_VISION},
    "voxtral": {"text_config": {**_TEXT, "model_type": "llama"}, "audio_config": _TOWER},
}
"""Fields of configs, by model type."""


def make_multimodal_folder(to: Path, model_type: str, tokenizer_of: Path, **fields: Any) -> Path:
    """Makes a folder of random weights and another's tokenizer; ``fields`` are of the outer config, and
    replace those of ``CONFIGS``."""
    config = AutoConfig.for_model(model_type, **(CONFIGS[model_type] | fields))
    model = random_weights(class_of(config)(config))
    model.save_pretrained(to)
    if model_type == "kimi_k25":  # transformers also renames the decoder's layers to "blocks"
        _rename(to, lambda name: name.replace("language_model.model.blocks.", "language_model.model.layers."))
    for file in tokenizer_of.glob("*"):
        if file.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            shutil.copy(file, to)
    return to


def code_of(folder: Path) -> Any:
    """The class of transformers that a folder names."""
    return getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])


def random_weights(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Fills a model, equally in each run."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter, generator))
    return model


def class_of(config: Any) -> Callable[[Any], PreTrainedModel]:
    mapping: Any = transformers.AutoModelForMultimodalLM._model_mapping
    found: Callable[[Any], PreTrainedModel] = mapping[type(config)]
    return found


def _random(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers that keep the scale of activations, and norms that are not neutral."""
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() > 1:
        return noise * 0.3 if "embed" in name else noise / parameter.shape[-1] ** 0.5
    return noise * 0.5 - 2.5 if name.endswith("A_log") else noise * 0.1 + ("norm" in name)


def renamed(folder: Path, to: Path, name_of: Callable[[str], str]) -> Path:
    """Copies a folder and renames its tensors."""
    shutil.copytree(folder, to)
    _rename(to, name_of)
    return to


def _rename(folder: Path, name_of: Callable[[str], str]) -> None:
    weights = folder / "model.safetensors"
    tensors = {name_of(name): x for name, x in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
