"""Model folders and compiled code that the worker's tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_weights import compiled_gemm
from engine.worker.loading.tiny_models import make_model_folder

_LATENT = {"kv_lora_rank": 48, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 20}
"""Latents have 64 numbers; a token's keys and values of all heads would have 192."""
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.3,
}
"""Queries grow after 16 tokens."""
_INDEXED = {
    **_LATENT,
    "q_lora_rank": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "index_topk": 14,
    "index_head_dim": 24,
    "index_n_heads": 20,
}
"""An indexer chooses in all sequences but the shortest; with few heads many scores would be 0, and ties."""
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
_OLMO_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 6,
}
_NEMOTRON = {
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_MAMBA = {
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "shared_intermediate_size": 48,
    **_FACTORS,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_heads": 4, "num_kv_heads": 1},
    "llama-llama3-rope": {
        "family": "llama",
        "extra_config": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "attention_bias": True,
            "mlp_bias": True,
        },
    },
    "llama-yarn-tied": {
        "family": "llama",
        "tie": True,
        "extra_config": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
        },
    },
    "mistral": {"family": "mistral", "shards": 3},
    "mistral-window": {"family": "mistral", "extra_config": {"sliding_window": 12}},
    "qwen2": {"family": "qwen2", "tie": True},
    "qwen2-window": {
        "family": "qwen2",
        "extra_config": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    },
    "qwen3": {"family": "qwen3", "head_dim": 24, "shards": 2},
    "qwen3-moe": {
        "family": "qwen3_moe",
        "num_layers": 4,
        "head_dim": 24,
        "shards": 2,
        "extra_config": {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    },
    "qwen3-moe-every-other": {
        "family": "qwen3_moe",
        "num_layers": 4,
        "tie": True,
        "extra_config": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "attention_bias": True,
        },
    },
    "mixtral": {"family": "mixtral", "extra_config": {"num_local_experts": 4}},
    "mixtral-window": {
        "family": "mixtral",
        "intermediate_size": 96,
        "extra_config": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 12},
    },
    "gemma2": {"family": "gemma2", "num_layers": 4, "extra_config": {"sliding_window": 12}},
    "gemma3": {
        "family": "gemma3_text",
        "num_layers": 4,
        "extra_config": {"sliding_window": 12, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
    },
    "gemma4": {
        "family": "gemma4_text",
        "num_layers": 3,
        "num_kv_heads": 4,
        "head_dim": 16,
        "tie": True,
        "extra_config": {
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    },
    "gemma4-small": {
        "family": "gemma4_text",
        "num_layers": 5,
        "num_kv_heads": 1,
        "head_dim": 16,
        "tie": True,
        "extra_config": {
            "global_head_dim": 32,
            "sliding_window": 12,
            "layer_types": [
                *("sliding_attention", "sliding_attention", "full_attention"),
                *("sliding_attention", "full_attention"),
            ],
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    },
    "glm4-moe": {
        "family": "glm4_moe",
        "num_layers": 4,
        "extra_config": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    },
    "glm4-moe-groups": {
        "family": "glm4_moe",
        "num_layers": 3,
        "extra_config": {
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
        },
    },
    "deepseek-v2": {
        "family": "deepseek_v2",
        "num_layers": 3,
        "extra_config": {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    },
    "deepseek-v2-groups": {
        "family": "deepseek_v2",
        "num_layers": 3,
        "extra_config": {
            **_LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "attention_bias": True,
        },
    },
    "deepseek-v3": {
        "family": "deepseek_v3",
        "num_layers": 4,
        "extra_config": {
            **_LATENT,
            "q_lora_rank": 32,
            "first_k_dense_replace": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    },
    "deepseek-v3-halves": {
        "family": "deepseek_v3",
        "extra_config": {
            **_LATENT,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
        },
    },
    "gpt-oss": {
        "family": "gpt_oss",
        "num_layers": 4,
        "intermediate_size": 96,
        "extra_config": {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 12,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 512,
            },
        },
    },
    "llama4": {
        "family": "llama4_text",
        "num_layers": 4,
        "intermediate_size": 48,
        "extra_config": {
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.3,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "num_local_experts": 4,
        },
    },
    "llama4-other-switches": {
        "family": "llama4_text",
        "num_layers": 3,
        "intermediate_size": 48,
        "extra_config": {
            "attention_chunk_size": 12,
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "no_rope_layer_interval": 3,
            "num_experts_per_tok": 2,
            "num_local_experts": 6,
            "use_qk_norm": False,
        },
    },
    "qwen3-next": {
        "family": "qwen3_next",
        "num_layers": 4,
        "head_dim": 24,
        "extra_config": {
            **_DELTA_NET,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    },
    "qwen3.5": {"family": "qwen3_5_text", "num_layers": 4, "head_dim": 24, "extra_config": _DELTA_NET},
    "qwen3.5-moe": {
        "family": "qwen3_5_moe_text",
        "num_layers": 4,
        "head_dim": 24,
        "tie": True,
        "extra_config": {
            **_DELTA_NET,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    },
    "granite4": {
        "family": "granitemoehybrid",
        "num_layers": 4,
        "intermediate_size": 32,
        "extra_config": {**_MAMBA, "num_local_experts": 6, "num_experts_per_tok": 3},
    },
    "granite4-dense": {
        "family": "granitemoehybrid",
        "num_layers": 4,
        "extra_config": {
            **_MAMBA,
            "num_local_experts": 0,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "position_embedding_type": "rope",
        },
    },
    "minimax-m2": {
        "family": "minimax_m2",
        "intermediate_size": 32,
        "head_dim": 24,
        "extra_config": {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rotary_dim": 12,
        },
    },
    "olmo3": {
        "family": "olmo3",
        "num_layers": 4,
        "extra_config": {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                },
            },
        },
    },
    "exaone4": {
        "family": "exaone4",
        "num_layers": 4,
        "extra_config": {"sliding_window": 12, "sliding_window_pattern": 2},
    },
    "ernie4.5": {"family": "ernie4_5", "head_dim": 24, "tie": True, "extra_config": {"use_bias": True}},
    "glm4": {
        "family": "glm4",
        "head_dim": 24,
        "extra_config": {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    },
    "phi3": {"family": "phi3", "num_kv_heads": 1, "extra_config": {"sliding_window": None}},
    "granite3-moe-shared": {
        "family": "granitemoeshared",
        "intermediate_size": 32,
        "extra_config": {
            **_FACTORS,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
        },
    },
    "hy-v3": {
        "family": "hy_v3",
        "num_layers": 3,
        "head_dim": 24,
        "extra_config": {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    },
    "exaone-moe": {
        "family": "exaone_moe",
        "num_layers": 4,
        "extra_config": {
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
    },
    "mellum": {
        "family": "mellum",
        "num_layers": 4,
        "head_dim": 24,
        "extra_config": {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    },
    "youtu": {
        "family": "youtu",
        "num_layers": 3,
        "tie": True,
        "extra_config": {**_LATENT, "q_lora_rank": 24},
    },
    "apertus": {"family": "apertus", "extra_config": {"attention_bias": True}},
    "cohere2": {
        "family": "cohere2",
        "tie": True,
        "extra_config": {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 0.25,
        },
    },
    "minicpm3": {
        "family": "minicpm3",
        "num_layers": 3,
        "max_position_embeddings": 4096,
        "extra_config": {
            **_LATENT,
            "q_lora_rank": 24,
            "scale_emb": 3,
            "dim_model_base": 48,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
                "original_max_position_embeddings": 4096,
            },
        },
    },
    "arcee": {"family": "arcee", "head_dim": 24, "extra_config": {"mlp_bias": True, "attention_bias": True}},
    "ministral3": {
        "family": "ministral3",
        "head_dim": 24,
        "extra_config": {"sliding_window": None, "rope_parameters": _GROWING},
    },
    "ernie4.5-moe": {
        "family": "ernie4_5_moe",
        "num_layers": 4,
        "tie": True,
        "extra_config": {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_layer_end_index": 2,
        },
    },
    "mistral4": {
        "family": "mistral4",
        "num_layers": 3,
        "extra_config": {
            **_LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_GROWING, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    },
    "deepseek-v3.2": {
        "family": "deepseek_v32",
        "num_layers": 3,
        "extra_config": {
            **_INDEXED,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    },
    "glm-5": {
        "family": "glm_moe_dsa",
        "num_layers": 4,
        "extra_config": {
            **_INDEXED,
            "attention_bias": True,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    },
    "seed-oss": {
        "family": "seed_oss",
        "head_dim": 24,
        "extra_config": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True},
    },
    "smollm3": {
        "family": "smollm3",
        "num_layers": 4,
        "tie": True,
        "extra_config": {
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    },
    "qwen2-moe": {
        "family": "qwen2_moe",
        "num_layers": 3,
        "extra_config": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    },
    "granite3": {"family": "granite", "extra_config": {**_FACTORS, "mlp_bias": True}},
    "granite3-moe": {
        "family": "granitemoe",
        "intermediate_size": 32,
        "extra_config": {
            **_FACTORS,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_bias": True,
        },
    },
    "dots1": {
        "family": "dots1",
        "num_layers": 4,
        "extra_config": {
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "sliding_window": 12,
            "max_window_layers": 2,
        },
    },
    "solar-open": {
        "family": "solar_open",
        "head_dim": 24,
        "extra_config": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    },
    "glm4-moe-lite": {
        "family": "glm4_moe_lite",
        "num_layers": 4,
        "extra_config": {
            **_LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
    },
    "nemotron-h": {
        "family": "nemotron_h",
        "extra_config": {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        },
    },
    "nemotron-h-latents": {
        "family": "nemotron_h",
        "extra_config": {
            **_NEMOTRON,
            "moe_latent_size": 48,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        },
    },
    "nemotron-h-dense": {
        "family": "nemotron_h",
        "intermediate_size": 48,
        "extra_config": {
            **_NEMOTRON,
            "mlp_bias": True,
            "use_bias": True,
            "n_groups": 1,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        },
    },
    "bamba": {
        "family": "bamba",
        "num_layers": 4,
        "extra_config": {
            "attn_layer_indices": [2],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_proj_bias": True,
            "mlp_bias": True,
        },
    },
    "mimo-v2-flash": {
        "family": "mimo_v2_flash",
        "num_layers": 3,
        "num_kv_heads": 1,
        "head_dim": 24,
        "extra_config": {
            "v_head_dim": 16,
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
    },
    "lfm3": {
        "family": "lfm3",
        "num_layers": 5,
        "head_dim": 24,
        "tie": True,
        "extra_config": {
            "sliding_window": 12,
            "layer_types": ["conv", *["sliding_attention", "full_attention"] * 2],
        },
    },
    "jamba": {
        "family": "jamba",
        "num_layers": 4,
        "extra_config": {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 32,
        },
    },
    "falcon-h1": {
        "family": "falcon_h1",
        "num_layers": 3,
        "extra_config": {
            "mamba_d_ssm": 96,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "embedding_multiplier": 5.5,
            "lm_head_multiplier": 0.04,
            "key_multiplier": 0.5,
            "attention_in_multiplier": 0.75,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.31],
            "mlp_multipliers": [0.88, 0.58],
        },
    },
    "falcon-h1-norms": {
        "family": "falcon_h1",
        "num_layers": 3,
        "extra_config": {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
        },
    },
    "olmo-hybrid": {
        "family": "olmo_hybrid",
        "num_layers": 4,
        "extra_config": {
            **_OLMO_NET,
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        },
    },
    "olmo-hybrid-nope": {
        "family": "olmo_hybrid",
        "num_layers": 4,
        "extra_config": {**_OLMO_NET, "rope_parameters": None, "linear_allow_neg_eigval": False},
    },
    "kimi-linear": {
        "family": "kimi_linear",
        "num_layers": 5,
        "extra_config": {
            **_LATENT,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention"],
            "num_experts": 8,
            "num_experts_per_token": 3,
            "moe_intermediate_size": 32,
        },
    },
    "lfm2": {
        "family": "lfm2",
        "num_layers": 4,
        "tie": True,
        "extra_config": {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_bias": True,
            "block_multiple_of": 16,
        },
    },
    "lfm2-moe": {
        "family": "lfm2_moe",
        "num_layers": 4,
        "extra_config": {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
    },
    "gpt_neox": {"family": "gpt_neox"},
    "phi": {"family": "phi"},
    "olmo2": {"family": "olmo2"},
}
MODEL_NAMES = tuple(VARIANTS)
TWO_TABLES = (
    *("qwen2-window", "gemma2", "gemma3", "gpt-oss", "smollm3", "dots1", "olmo3", "exaone4"),
    *("exaone-moe", "mellum", "gemma4", "gemma4-small", "mimo-v2-flash", "lfm3", "cohere2"),
)
"""Models that have windows in some layers."""
WITH_STATES = (
    *("qwen3-next", "qwen3.5", "qwen3.5-moe", "granite4", "granite4-dense"),
    *("nemotron-h", "nemotron-h-latents", "nemotron-h-dense", "lfm2", "lfm2-moe", "bamba"),
    *("kimi-linear", "lfm3", "olmo-hybrid", "olmo-hybrid-nope"),
    *("falcon-h1", "falcon-h1-norms", "jamba"),
)
"""Models that have layers with states."""


WITH_INDEXER = ("deepseek-v3.2", "glm-5")
"""Models that choose the tokens that they attend to."""


class ModelFolders(Protocol):
    """Returns the folder of a variant, made once per session. Tests that damage a folder copy it first."""

    def __call__(self, name: str) -> Path: ...


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            made[name] = make_model_folder(tmp_path_factory.mktemp("models") / name, **VARIANTS[name])
        return made[name]

    return folder_of


@pytest.fixture
def compiled() -> CompiledGemm:
    """The GEMM of this machine's compiled code."""
    found = compiled_gemm(32, torch.device("cpu"), torch.bfloat16)
    if found is None:
        pytest.skip("there is no compiled GEMM: it needs a compiler and a CPU with AVX512_BF16")
    return found
