"""Reads an adapter as peft saves it: ``adapter_config.json`` and ``adapter_model.safetensors``.

Unsupported settings that would change the result are refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine.errors import RequestError
from engine.records.adapters import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE, digest_of, open_regular
from engine.worker.lora.alpha_patterns import AlphaPatterns

_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d{1,6})\.(.+)"
    r"\.lora_([AB])(?:\.default)?\.weight"
)
"""A tensor of the decoder. A vision tower has numbered layers, too, which this does not match."""
_NEUTRAL: tuple[object, ...] = (None, False, "", [], {}, "none")
_READ = frozenset(("peft_type", "lora_alpha", "r", "use_rslora", "rank_pattern", "alpha_pattern"))
_WITHOUT_EFFECT = frozenset(
    (
        *(
            "task_type",
            "base_model_name_or_path",
            "revision",
            "inference_mode",
            "auto_mapping",
            "lora_dropout",
        ),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "peft_version"),
        *("qalora_group_size", "runtime_config", "ensure_weight_tying", "megatron_core"),
    )
)
"""Fields that describe the training, or which modules are adapted, which the tensors show, too."""
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initializations that do not change the base model."""


@dataclass(frozen=True, slots=True)
class LowRankWeights:
    """The weights of an adapter for one linear, to which it adds ``up (down x) * scale``."""

    down: torch.Tensor
    """[rank, in_features]"""
    up: torch.Tensor
    """[out_features, rank]"""
    scale: float


Linears = Mapping[tuple[int, str], LowRankWeights]
"""An adapter's weights by the number of a layer and a linear's name in it, such as ``self_attn.q_proj``."""


def read_adapter(folder: Path, max_rank: int) -> tuple[Linears, str]:
    """All weights of an adapter, and the digest of the bytes that were read. Raises RequestError with a
    one-sentence message that names the adapter's folder."""
    config_bytes = _read(folder, CONFIG_FILE, MAX_CONFIG_BYTES)
    weights_bytes = _read(folder, WEIGHTS_FILE, None)
    config = _read_config(folder, config_bytes)
    pairs = _read_pairs(folder, weights_bytes)
    try:
        alphas = AlphaPatterns.of(config.get("alpha_pattern") or {}, config.get("lora_alpha", 8))
    except ValueError as error:
        raise _fault(folder, str(error)) from error
    linears = {key: _weights(folder, key, pair, config, alphas, max_rank) for key, pair in pairs.items()}
    return linears, digest_of(config_bytes, weights_bytes)


def _read(folder: Path, name: str, most_bytes: int | None) -> bytes:
    try:
        with open_regular(folder / name, most_bytes) as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise _fault(folder, f"{name} cannot be read") from error


def _fault(folder: Path, what: str) -> RequestError:
    return RequestError(f"The adapter in {folder} cannot be served: {what}.", "lora_path")


def _read_config(folder: Path, raw: bytes) -> Mapping[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _fault(folder, f"{CONFIG_FILE} cannot be read") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise _fault(folder, f"{CONFIG_FILE} does not say peft_type LORA")
    if config.get("init_lora_weights", True) not in _INITIALIZATIONS:
        raise _fault(folder, f"init_lora_weights {config['init_lora_weights']!r} changes the base model")
    for name, value in config.items():
        if name not in _READ | _WITHOUT_EFFECT | {"init_lora_weights"} and value not in _NEUTRAL:
            raise _fault(folder, f"{name} is not supported")
    if not _is_number(config.get("lora_alpha", 8)):
        raise _fault(folder, "lora_alpha must be a number")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_is_number, patterns.values())):
        raise _fault(folder, "alpha_pattern must have a number for each pattern")
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_pairs(folder: Path, raw: bytes) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
    pairs: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    try:
        tensors = load(raw)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise _fault(folder, f"{WEIGHTS_FILE} cannot be read") from error
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise _fault(folder, f"tensor {name} belongs to no linear of a layer")
        pairs.setdefault((int(found[1]), found[2]), {})[found[3]] = tensor
    if not pairs:
        raise _fault(folder, "it has no tensors")
    return pairs


def _weights(
    folder: Path,
    key: tuple[int, str],
    pair: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    alphas: AlphaPatterns,
    max_rank: int,
) -> LowRankWeights:
    name = f"layers.{key[0]}.{key[1]}"
    down = pair.get("A")
    up = pair.get("B")
    if down is None or up is None or down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1]:
        raise _fault(folder, f"{name} needs lora_A [rank, inputs] and lora_B [outputs, rank]")
    rank = len(down)
    if not 0 < rank <= max_rank:
        raise _fault(folder, f"{name} has rank {rank}, and max_lora_rank is {max_rank}")
    if not (down.is_floating_point() and up.is_floating_point()):
        raise _fault(folder, f"{name} has weights that are no floating-point numbers")
    if not (down.isfinite().all() and up.isfinite().all()):
        raise _fault(folder, f"{name} has weights that are not finite")
    alpha = alphas.value(name)
    return LowRankWeights(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
