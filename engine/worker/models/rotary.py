"""Rotary position embedding (RoPE) of a flattened batch, scaled as the model's config specifies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.models.shape import NO_ROPE, QueryGrowth

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Rope types whose frequencies do not depend on a sequence's length, so that one table serves all
sequences."""

_SECTIONS = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), (16, 24, 24)),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_omni_moe_text"), (24, 20, 20)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), (11, 11, 10)),
}
"""The numbers of frequencies for time, height and width, if the config does not specify them."""


def is_static(rope: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Whether one table of a rope's frequencies serves all sequences, however long."""
    rope_type = rope.get("rope_type", "default")
    return rope_type in STATIC_ROPE_TYPES or (rope_type == "longrope" and _is_short(rope, config))


def _is_short(rope: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Whether no sequence may be longer than longrope's original context: only its short factors count."""
    most: int = config.max_position_embeddings
    original: int = rope.get("original_max_position_embeddings") or most
    return original >= most


def rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """The config's rope parameters; empty for a model without rope."""
    parameters: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    return parameters or {}


def all_ropes(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """The rope parameters of each layer type with a separate rope; those of all layers have an empty name."""
    parameters = rope_parameters(config)
    nested = {kind: rope for kind, rope in parameters.items() if isinstance(rope, dict)}
    return nested or {"": parameters}


class RotaryEmbedding:
    """Computes the cosines and sines of positions, which the layers of a step share."""

    def __init__(
        self,
        config: PreTrainedConfig,
        head_dim: int,
        device: torch.device,
        kind: str = "",
        growth: QueryGrowth | None = None,
    ) -> None:
        """``kind``: the name of the rope, if there are several; see ``all_ropes``. NO_ROPE rotates by
        nothing, which changes no bit."""
        self._growth = growth
        still = torch.zeros(head_dim // 2), 1.0
        frequencies, self.scaling = still if kind == NO_ROPE else _frequencies(config, head_dim, kind)
        self.frequencies = frequencies.to(device)
        axes = mrope_axes(config, len(frequencies))
        self.axes = None if axes is None else axes.to(device)
        """The axis of the position that each frequency uses, for a model that reads pictures."""

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens], or [3, num_tokens] in time, height and width -> cos, sin [num_tokens, 1,
        head_dim], as ``rotate`` takes them; if queries grow, cos has a last column with their factors"""
        by_frequency = positions[:, None] if positions.dim() == 1 else positions[self.axes].t()
        angles = by_frequency[:, None].float() * self.frequencies
        cos = angles.cos() * self.scaling
        sin = angles.sin() * self.scaling
        factors = () if self._growth is None else (grown(positions, self._growth),)
        return torch.cat((cos, cos, *factors), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def grown(positions: torch.Tensor, growth: QueryGrowth) -> torch.Tensor:
    """The factors of queries at positions [num_tokens] -> [num_tokens, 1, 1]"""
    steps = torch.floor(positions[:, None, None].float() / growth.interval)
    return 1.0 + growth.growth * torch.log1p(steps)


def mrope_axes(config: PreTrainedConfig, num_frequencies: int) -> torch.Tensor | None:
    """The axis of each frequency, 0 to 2 for time, height and width: [num_frequencies]. None for a model
    whose tokens have one position each, or whose sections do not add up to the number of frequencies.

    Qwen2-VL groups the frequencies by axis; Qwen3-VL alternates them, as long as height and width have any
    left.
    """
    own = _SECTIONS.get(config.model_type)
    if own is None:
        return None
    sections: list[int] = list(rope_parameters(config).get("mrope_section") or own)
    if len(sections) != 3 or sum(sections) != num_frequencies:
        return None
    axes = torch.zeros(num_frequencies, dtype=torch.int64)
    if config.model_type.startswith("qwen2"):
        return axes.new_tensor([0, 1, 2]).repeat_interleave(axes.new_tensor(sections))
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def have_axes(ropes: Iterable[object]) -> bool:
    """Whether any of a model's ropes uses three positions per token."""
    return any(isinstance(rope, RotaryEmbedding) and rope.axes is not None for rope in ropes)


def _frequencies(config: PreTrainedConfig, head_dim: int, kind: str) -> tuple[torch.Tensor, float]:
    """The frequencies [head_dim / 2], and the factor for cosines and sines."""
    parameters = all_ropes(config)[kind]
    rope_type = parameters.get("rope_type", "default")
    assert is_static(parameters, config)
    if rope_type == "yarn":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        of_kind = {"layer_type": kind} if kind else {}
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), **of_kind)
        return frequencies, scaling
    if rope_type == "proportional":
        return _first_rotated(parameters, head_dim), 1.0
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
    if rope_type == "linear":
        frequencies = frequencies / parameters["factor"]
    elif rope_type == "longrope":
        frequencies = frequencies / torch.tensor(parameters["short_factor"], dtype=torch.float32)
    elif rope_type == "llama3":
        frequencies = _stretched(frequencies, parameters)
    return frequencies, 1.0


def _first_rotated(parameters: dict[str, Any], head_dim: int) -> torch.Tensor:
    """The frequencies of a rope that rotates a share of all pairs and leaves the others alone: [head_dim /
    2]"""
    num_rotated = int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
    exponents = torch.arange(0, 2 * num_rotated, 2, dtype=torch.float32) / head_dim
    rotated = 1.0 / (parameters["rope_theta"] ** exponents) / parameters.get("factor", 1.0)
    return torch.cat((rotated, torch.zeros(head_dim // 2 - num_rotated)))


def _stretched(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Scale frequencies as in Llama 3.1: wavelengths above the original context by the factor, short ones not
    at all, and interpolated in between. frequencies [head_dim / 2] -> the same shape"""
    turns = parameters["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    low, high, factor = (parameters[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    stretched: torch.Tensor = (1 - kept) * frequencies / factor + kept * frequencies
    return stretched


def pairs_apart(x: torch.Tensor, width: int) -> torch.Tensor:
    """Move the first numbers of rotated pairs that are neighbors to the front, as ``rotate`` takes them. Done
    to queries and keys alike, it changes no dot product. x [num_tokens, heads, head_dim], of which the first
    ``width`` numbers are rotated -> the same shape"""
    return torch.cat((x[..., :width:2], x[..., 1:width:2], x[..., width:]), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + width / 2) of the first ``width`` numbers of x [num_tokens, heads, head_dim].

    cos, sin [num_tokens, 1, width]; the sines of the first half are negative. A small step spends its time on
    calls, not on arithmetic: this makes four calls for any number of heads.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((second, first), dim=-1).mul_(sin))
