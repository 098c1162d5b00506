"""Lists the families that run natively, and the function that reads the shape of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from engine.worker.models.families.apertus import apertus_shape, is_known_apertus
from engine.worker.models.families.arcee import arcee_shape, is_known_arcee
from engine.worker.models.families.bamba import bamba_shape, is_known_bamba
from engine.worker.models.families.cohere2 import cohere2_shape
from engine.worker.models.families.deepseek_v2 import (
    deepseek_v2_shape,
    is_known_deepseek_v2,
    is_known_deepseek_v3,
)
from engine.worker.models.families.deepseek_v3 import deepseek_v3_shape
from engine.worker.models.families.deepseek_v32 import (
    deepseek_v32_shape,
    glm_moe_dsa_shape,
    is_known_deepseek_v32,
)
from engine.worker.models.families.dots1 import dots1_shape
from engine.worker.models.families.ernie4_5 import ernie4_5_shape
from engine.worker.models.families.ernie4_5_moe import ernie4_5_moe_shape, is_known_ernie4_5_moe
from engine.worker.models.families.exaone4 import exaone4_shape
from engine.worker.models.families.exaone_moe import exaone_moe_shape
from engine.worker.models.families.falcon_h1 import falcon_h1_shape, is_known_falcon_h1
from engine.worker.models.families.gemma2 import gemma2_shape, is_known_gemma
from engine.worker.models.families.gemma3 import gemma3_shape
from engine.worker.models.families.gemma4 import gemma4_shape, is_known_gemma4
from engine.worker.models.families.glm4 import glm4_shape
from engine.worker.models.families.glm4_moe import glm4_moe_shape
from engine.worker.models.families.glm4_moe_lite import glm4_moe_lite_shape, is_known_glm4_moe_lite
from engine.worker.models.families.gpt_oss import gpt_oss_shape
from engine.worker.models.families.granite import granite_moe_shape, granite_shape
from engine.worker.models.families.granitemoehybrid import granite_hybrid_shape, is_known_granite_hybrid
from engine.worker.models.families.hy_v3 import hy_v3_shape, is_known_hy_v3
from engine.worker.models.families.jamba import is_known_jamba, jamba_shape
from engine.worker.models.families.kimi_linear import is_known_kimi_linear, kimi_linear_shape
from engine.worker.models.families.lfm2 import (
    is_known_lfm2,
    is_known_lfm2_moe,
    lfm2_moe_shape,
    lfm2_shape,
)
from engine.worker.models.families.lfm3 import is_known_lfm3, lfm3_shape
from engine.worker.models.families.llama import llama_shape
from engine.worker.models.families.llama4 import is_known_llama4, llama4_shape
from engine.worker.models.families.mellum import mellum_shape
from engine.worker.models.families.mimo_v2_flash import is_known_mimo_v2, mimo_v2_shape
from engine.worker.models.families.minicpm3 import is_known_minicpm3, minicpm3_shape
from engine.worker.models.families.minimax_m2 import minimax_m2_shape
from engine.worker.models.families.ministral3 import is_known_ministral3, ministral3_shape
from engine.worker.models.families.mistral import mistral_shape
from engine.worker.models.families.mistral4 import is_known_mistral4, mistral4_shape
from engine.worker.models.families.mixtral import mixtral_shape
from engine.worker.models.families.nemotron_h import is_known_nemotron_h, nemotron_h_shape
from engine.worker.models.families.olmo3 import olmo3_shape
from engine.worker.models.families.olmo_hybrid import olmo_hybrid_shape
from engine.worker.models.families.phi3 import phi3_shape
from engine.worker.models.families.plain import names_mlps
from engine.worker.models.families.qwen2 import qwen2_shape
from engine.worker.models.families.qwen2_moe import qwen2_moe_shape
from engine.worker.models.families.qwen3 import qwen3_shape
from engine.worker.models.families.qwen3_moe import qwen3_moe_shape
from engine.worker.models.families.qwen3_next import is_known_qwen3_next, qwen3_next_shape
from engine.worker.models.families.seed_oss import seed_oss_shape
from engine.worker.models.families.smollm3 import smollm3_shape
from engine.worker.models.families.solar_open import solar_open_shape
from engine.worker.models.families.youtu import is_known_youtu, youtu_shape
from engine.worker.models.rotary import all_ropes, is_static
from engine.worker.models.shape import DecoderShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SHAPES: Mapping[str, Callable[[PreTrainedConfig], DecoderShape]] = {
    "llama": llama_shape,
    "mistral": mistral_shape,
    "qwen2": qwen2_shape,
    "qwen2_vl_text": qwen2_shape,
    "qwen2_5_vl_text": qwen2_shape,
    "qwen2_5_omni_text": qwen2_shape,
    "qwen3": qwen3_shape,
    "qwen3_vl_text": qwen3_shape,
    "qwen3_moe": qwen3_moe_shape,
    "qwen3_omni_moe_text": qwen3_moe_shape,
    "qwen2_moe": qwen2_moe_shape,
    "seed_oss": seed_oss_shape,
    "apertus": apertus_shape,
    "arcee": arcee_shape,
    "cohere2": cohere2_shape,
    "minicpm3": minicpm3_shape,
    "ministral3": ministral3_shape,
    "olmo3": olmo3_shape,
    "exaone4": exaone4_shape,
    "ernie4_5": ernie4_5_shape,
    "ernie4_5_moe": ernie4_5_moe_shape,
    "glm4": glm4_shape,
    "smollm3": smollm3_shape,
    "granite": granite_shape,
    "granitemoe": granite_moe_shape,
    "granitemoeshared": granite_moe_shape,
    "phi3": phi3_shape,
    "mixtral": mixtral_shape,
    "minimax_m2": minimax_m2_shape,
    "mimo_v2_flash": mimo_v2_shape,
    "hy_v3": hy_v3_shape,
    "exaone_moe": exaone_moe_shape,
    "mellum": mellum_shape,
    "dots1": dots1_shape,
    "solar_open": solar_open_shape,
    "glm4_moe": glm4_moe_shape,
    "gpt_oss": gpt_oss_shape,
    "granitemoehybrid": granite_hybrid_shape,
    "nemotron_h": nemotron_h_shape,
    "bamba": bamba_shape,
    "falcon_h1": falcon_h1_shape,
    "jamba": jamba_shape,
    "lfm2": lfm2_shape,
    "lfm2_moe": lfm2_moe_shape,
    "lfm3": lfm3_shape,
    "kimi_linear": kimi_linear_shape,
    "olmo_hybrid": olmo_hybrid_shape,
    "qwen3_next": qwen3_next_shape,
    "qwen3_5_text": qwen3_next_shape,
    "qwen3_5_moe_text": qwen3_next_shape,
    "gemma2": gemma2_shape,
    "gemma3_text": gemma3_shape,
    "gemma4_text": gemma4_shape,
    "deepseek_v2": deepseek_v2_shape,
    "deepseek_v3": deepseek_v3_shape,
    "glm4_moe_lite": glm4_moe_lite_shape,
    "youtu": youtu_shape,
    "mistral4": mistral4_shape,
    "deepseek_v32": deepseek_v32_shape,
    "glm_moe_dsa": glm_moe_dsa_shape,
    "llama4_text": llama4_shape,
}
_KNOWN: Mapping[str, Callable[[PreTrainedConfig], bool]] = {
    "gemma2": is_known_gemma,
    "gemma3_text": is_known_gemma,
    "gemma4_text": is_known_gemma4,
    "deepseek_v2": is_known_deepseek_v2,
    "deepseek_v3": is_known_deepseek_v3,
    "glm4_moe_lite": is_known_glm4_moe_lite,
    "youtu": is_known_youtu,
    "hy_v3": is_known_hy_v3,
    "apertus": is_known_apertus,
    "arcee": is_known_arcee,
    "minicpm3": is_known_minicpm3,
    "ernie4_5_moe": is_known_ernie4_5_moe,
    "ministral3": is_known_ministral3,
    "mistral4": is_known_mistral4,
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), is_known_deepseek_v32),
    **dict.fromkeys(("exaone_moe", "mellum"), names_mlps),
    "llama4_text": is_known_llama4,
    "granitemoehybrid": is_known_granite_hybrid,
    "nemotron_h": is_known_nemotron_h,
    "bamba": is_known_bamba,
    "falcon_h1": is_known_falcon_h1,
    "jamba": is_known_jamba,
    "kimi_linear": is_known_kimi_linear,
    "olmo_hybrid": is_known_qwen3_next,
    "mimo_v2_flash": is_known_mimo_v2,
    "lfm2": is_known_lfm2,
    "lfm2_moe": is_known_lfm2_moe,
    "lfm3": is_known_lfm3,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), is_known_qwen3_next),
}
"""Checks for families whose configs may request more than their module supports."""
_SEVERAL_ROPES = frozenset({"gemma3_text", "gemma4_text", "lfm3", "mellum", "mimo_v2_flash", "olmo3"})
_PARTIAL_ROPE = frozenset(
    {
        *("glm4", "glm4_moe", "phi3", "minimax_m2", "mistral4", "gemma4_text"),
        *("bamba", "lfm3", "mimo_v2_flash"),
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    }
)
NATIVE_MODEL_TYPES = _SHAPES.keys()
MISREAD = frozenset({"deepseek_v2", "deepseek_v3"})
"""Families of whose configs transformers' code ignores fields, so that only what is native is computed as
published."""


def decoder_shape(config: PreTrainedConfig) -> DecoderShape:
    """The shape of a config for which ``is_native`` is true."""
    return _SHAPES[config.model_type](config)


def _has_silu(config: PreTrainedConfig) -> bool:
    return bool(config.hidden_act == "silu")


def is_native(config: PreTrainedConfig) -> bool:
    """Whether our own decoder computes exactly what this config describes."""
    family = config.model_type
    ropes = all_ropes(config)
    if family not in NATIVE_MODEL_TYPES:
        return False
    return (
        _KNOWN.get(family, _has_silu)(config)
        and ("" in ropes or family in _SEVERAL_ROPES)
        and all(is_static(rope, config) for rope in ropes.values())
        and (
            family in _PARTIAL_ROPE
            or all(rope.get("partial_rotary_factor", 1.0) == 1.0 for rope in ropes.values())
        )
    )
