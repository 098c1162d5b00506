"""Rotary position embedding of a flattened batch, scaled as the model's config says."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Frequencies that do not depend on a sequence's length, so that one table serves every sequence."""


def rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """The config's rope parameters; empty for a model without rope."""
    parameters: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    return parameters or {}


class RotaryEmbedding:
    """Turns positions into the cosines and sines that all layers of a step share."""

    def __init__(self, config: PreTrainedConfig, head_dim: int, device: torch.device) -> None:
        parameters = rope_parameters(config)
        rope_type = parameters.get("rope_type", "default")
        assert rope_type in STATIC_ROPE_TYPES
        if rope_type == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            frequencies, self.scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
        else:
            frequencies, self.scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        self.frequencies = frequencies.to(device)

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens] -> cos, sin [num_tokens, 1, head_dim], as ``rotate`` takes them"""
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + head_dim / 2) of x [num_tokens, heads, head_dim].

    cos, sin [num_tokens, 1, head_dim]; the sines of the first half are negative. A small step pays for calls,
    not for numbers: these are four, however many heads there are.
    """
    first, second = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((second, first), dim=-1).mul_(sin))
