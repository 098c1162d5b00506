"""Folders that hold a text decoder with other parts, such as a vision tower: which of them are known, and
which of their tensors are the decoder's. Knows no model code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MULTIMODAL_TYPES = frozenset(
    (
        *("gemma3", "gemma4", "internvl", "kimi_k25", "llama4", "llava", "llava_next", "llava_onevision"),
        *("mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "voxtral"),
        *("qwen2_audio", "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    )
)
"""Model types of folders whose ``text_config`` is the config of a decoder that computes the same without the
other parts, if there are no images and no sound."""
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.": "",
    "lm_head.": "lm_head.",
    "thinker.model.language_model.": "model.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
    **{name: name for name in ("model.embed_tokens.", "model.layers.", "model.norm.")},
}
"""Prefixes of a decoder's tensor names in such folders, and in a folder of the decoder alone. The first and
the third are Qwen3.5's, as published and as transformers holds it; those of a thinker are Qwen-Omni's; the
last ones are Qwen2.5-VL's, the second all others'."""
_HOLDERS = ("model.", "", "thinker.model.", "thinker.")
_PROJECTOR = {f"{of}multi_modal_projector.": "multi_modal_projector." for of in _HOLDERS}
_VISION = {
    **{f"{of}visual.": "" for of in _HOLDERS},
    **{f"{of}vision_tower.": "vision_tower." for of in _HOLDERS},
    **_PROJECTOR,
}
"""The same for a vision tower: Qwen's is alone, others have a projector."""
_AUDIO = {
    **{f"{of}{part}": part for of in _HOLDERS for part in ("audio_tower.", "embed_audio.")},
    **_PROJECTOR,
}
"""The same for an encoder of audio with a projector."""


_HEADS = ("lm_head.", "score.")


_LFM2 = {"model.embedding_norm.": "model.norm."}
_BAMBA = {"model.final_layernorm.": "model.norm."}
_OWN_PREFIXES = {
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm3": _LFM2,
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "jamba": _BAMBA,
    "nemotron_h": {
        "backbone.layers.": "model.layers.",
        **{f"{of}.embeddings.": "model.embed_tokens." for of in ("backbone", "model")},
        **{f"{of}.norm_f.": "model.norm." for of in ("backbone", "model")},
    },
}
"""Prefixes of tensor names outside of layers, as published and as transformers holds them, each with the
usual one; by model type."""


_DENSE_OF_KIMI = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.")


def usual_names(model_type: str) -> Callable[[str], str] | None:
    """The function that maps a tensor's name in a folder of this type to the usual one; None if all are
    usual."""
    if model_type == "kimi_linear":
        return _of_kimi
    if model_type == "olmo_hybrid":
        return _of_olmo_hybrid
    prefixes = _OWN_PREFIXES.get(model_type)
    return None if prefixes is None else partial(_usual_name, prefixes)


def _of_kimi(name: str) -> str:
    """transformers renames the MLPs of Kimi Linear's dense layers, too, when it writes a folder."""
    return _DENSE_OF_KIMI.sub(r".mlp.\1_proj.", name)


def _of_olmo_hybrid(name: str) -> str:
    """Its layers with a delta net have names of their own for norms, as published."""
    name = name.replace(".attention_layer_norm.", ".input_layernorm.")
    return name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")


def _usual_name(prefixes: Mapping[str, str], name: str) -> str:
    for prefix, usual in prefixes.items():
        if name.startswith(prefix):
            return usual + name.removeprefix(prefix)
    return name


def is_multimodal(raw: Mapping[str, Any]) -> bool:
    """Whether the config.json belongs to a folder with a decoder that is served without the other parts."""
    return str(raw.get("model_type")) in MULTIMODAL_TYPES


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the decoder in a multimodal config, with the folder's architecture.

    Its head is tied if either config says so; a head in the checkpoint overrides this. Configs may omit the
    field, and its defaults differ.
    """
    decoder = config.get_text_config(decoder=True)
    decoder.architectures = config.architectures
    decoder.tie_word_embeddings = any(
        bool(getattr(either, "tie_word_embeddings", False)) for either in (decoder, config)
    )
    if decoder.dtype is None:
        decoder.dtype = config.dtype
    return decoder


def headless_name(name: str) -> str | None:
    """Maps the name of a tensor of a folder without a head to that in a folder with one; None for heads of
    any kind."""
    if name.startswith("model."):
        return name
    return None if name.startswith(_HEADS) else f"model.{name}"


def vision_name(name: str) -> str | None:
    """Maps the name of a tensor of such a folder to that in its vision tower, alone or with a projector; None
    for tensors of other parts."""
    return _renamed(name, _VISION)


def audio_name(name: str) -> str | None:
    """Maps the name of a tensor of such a folder to that in its encoder of audio and its projector; None for
    tensors of other parts."""
    return _renamed(name, _AUDIO)


def lone_audio_name(name: str) -> str | None:
    """Like ``audio_name``, for an encoder that has no projector and is loaded alone."""
    found = _renamed(name, _AUDIO)
    return None if found is None else found.removeprefix("audio_tower.")


def _renamed(name: str, prefixes: Mapping[str, str]) -> str | None:
    for prefix, alone in prefixes.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return None


def thinker_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes what reads text, pictures and audio: Qwen-Omni's models have
    others, which speak. The same config where there is only one."""
    thinker = raw.get("thinker_config")
    if not isinstance(thinker, dict):
        return raw
    return {"model_type": f"{raw.get('model_type')}_thinker", **thinker}


def decoder_name(name: str) -> str | None:
    """Maps the name of a tensor of a multimodal folder to that in a folder of the decoder alone; None for
    tensors of other parts."""
    return _renamed(name, _PREFIXES)
