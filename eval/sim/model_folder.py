"""The shape of a model, by the name of a preset or from the config of its folder. Reads no weights."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from eval.errors import HardwareError
from eval.sim.models import MODELS, ModelShape

DENSE = ("llama", "mistral", "qwen2", "qwen3")
SPARSE = ("mixtral", "qwen3_moe")
"""Families that are read without torch and transformers, in a moment."""


def find_model(name: str) -> ModelShape:
    """Returns a preset by its name, in any case, or the shape of a model folder. HardwareError names the
    known presets."""
    shape = MODELS.get(name.lower())
    if shape is not None:
        return shape
    if not Path(name).is_dir():
        raise HardwareError(f"Unknown model {name!r}; name a model folder, or one of {', '.join(MODELS)}.")
    return shape_of_folder(Path(name))


@cache
def shape_of_folder(folder: Path) -> ModelShape:
    """The shape of a model whose family runs in our own decoder. HardwareError for other architectures and
    for a folder without a readable config."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HardwareError(f"{folder} has no readable config.json: {error}.") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in (*DENSE, *SPARSE):
        from eval.sim.native_folder import shape_of_native

        return shape_of_native(folder, kind)
    heads = _size(config, folder, "num_attention_heads")
    hidden_size = _size(config, folder, "hidden_size")
    window = config.get("sliding_window") if config.get("use_sliding_window", kind == "mistral") else None
    shape = ModelShape(
        name=str(folder),
        hidden_size=hidden_size,
        num_layers=_size(config, folder, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        intermediate_size=_size(config, folder, "intermediate_size"),
        vocab_size=_size(config, folder, "vocab_size"),
        head_dim=config.get("head_dim") or hidden_size // heads,
        qkv_bias=kind == "qwen2",
        qk_norm=kind.startswith("qwen3"),
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        windows=(window,),
    )
    if kind in DENSE:
        return shape
    return replace(
        shape,
        num_dense_layers=0,
        num_experts=_size(config, folder, "num_experts", "num_local_experts"),
        experts_per_token=_size(config, folder, "num_experts_per_tok"),
        moe_intermediate_size=_size(config, folder, "moe_intermediate_size", "intermediate_size"),
    )


def _size(config: dict[str, Any], folder: Path, *names: str) -> int:
    """The first of these fields; HardwareError unless it is a whole number above 0."""
    value = next((config[name] for name in names if name in config), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HardwareError(f"{folder}: {names[0]} must be a whole number above 0, got {value!r}.")
    return value
