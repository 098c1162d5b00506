"""Reads an adapter as peft saves it: ``adapter_config.json`` and ``adapter_model.safetensors``.

Everything that would change the result and is not supported is refused by name.
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
from safetensors import SafetensorError, safe_open

from engine.errors import RequestError
from engine.lora import CONFIG_FILE, WEIGHTS_FILE

_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)"
    r"\.lora_([AB])(?:\.default)?\.weight"
)
"""A tensor of the decoder: a vision tower has numbered layers, too."""
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
"""Fields that say how it was trained, or which modules: its tensors say that, too."""
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Those that leave the base model as it is."""


@dataclass(frozen=True, slots=True)
class LowRankWeights:
    """What an adapter adds to one linear: ``up (down x) * scale``."""

    down: torch.Tensor
    """[rank, in_features]"""
    up: torch.Tensor
    """[out_features, rank]"""
    scale: float


Linears = Mapping[tuple[int, str], LowRankWeights]
"""What is added, by the number of a layer and a linear's name in it, such as ``self_attn.q_proj``."""


def read_adapter(folder: Path, max_rank: int) -> Linears:
    """All that an adapter adds. Raises RequestError with one sentence that names the adapter's folder."""
    config = _read_config(folder)
    pairs = _read_pairs(folder)
    return {key: _weights(folder, key, pair, config, max_rank) for key, pair in pairs.items()}


def _fault(folder: Path, what: str) -> RequestError:
    return RequestError(f"The adapter in {folder} cannot be served: {what}.", "lora_path")


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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


def _read_pairs(folder: Path) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
    pairs: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found = _TENSOR.fullmatch(name)
                if found is None:
                    raise _fault(folder, f"tensor {name} belongs to no linear of a layer")
                pair = pairs.setdefault((int(found[1]), found[2]), {})
                pair[found[3]] = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise _fault(folder, f"{WEIGHTS_FILE} cannot be read") from error
    if not pairs:
        raise _fault(folder, "it has no tensors")
    return pairs


def _weights(
    folder: Path,
    key: tuple[int, str],
    pair: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    max_rank: int,
) -> LowRankWeights:
    name = f"layers.{key[0]}.{key[1]}"
    down, up = pair.get("A"), pair.get("B")
    if down is None or up is None or down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1]:
        raise _fault(folder, f"{name} needs lora_A [rank, inputs] and lora_B [outputs, rank]")
    rank = len(down)
    if not 0 < rank <= max_rank:
        raise _fault(folder, f"{name} has rank {rank}, and max_lora_rank is {max_rank}")
    if not (down.is_floating_point() and up.is_floating_point()):
        raise _fault(folder, f"{name} has weights that are no floating-point numbers")
    if not (down.isfinite().all() and up.isfinite().all()):
        raise _fault(folder, f"{name} has weights that are not finite")
    try:
        alpha = _of_pattern(config.get("alpha_pattern") or {}, name, config.get("lora_alpha", 8))
    except re.error as error:
        raise _fault(folder, f"alpha_pattern has a pattern that is none: {error}") from error
    return LowRankWeights(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_pattern(patterns: Mapping[str, Any], name: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module's name, as peft finds it."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", f"model.{name}"):
            return float(value)
    return float(default)
