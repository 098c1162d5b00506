"""Replaces modules of a model of transformers by faster ones: linears and experts by packed or quantized
ones, RMS norms by one operation. Knows no architecture."""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from torch import nn
from torch.nn.functional import gelu, rms_norm, silu
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from engine.errors import ConfigError
from engine.worker.models.builder import Builder
from engine.worker.models.linears import AnyEmbedding, Embedding
from engine.worker.models.moe import Experts
from engine.worker.models.replacements import Replacements
from engine.worker.models.shape import Routing, SparseShape
from engine.worker.parallel.group import ALONE

_ROUTERS = frozenset({"gate", "router"})
"""Names of linears that choose experts, which are not quantized."""
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "top_k")
"""Names of the number of experts of a token."""
_ROUNDING = 2.0**-7
"""The most by which a norm may differ, as a share of its length: bf16 numbers, rounded twice."""
_EPSILONS = ("variance_epsilon", "eps")
"""Names of the number that an RMS norm adds."""


class RowsLinear(nn.Module):
    """Gives a linear over rows the inputs of any shape that transformers passes."""

    def __init__(self, rows: nn.Module, in_features: int, out_features: int) -> None:
        super().__init__()
        self.rows = rows
        self.in_features = in_features
        self.out_features = out_features
        self.split: str | None = None
        """How ranks have parts of it: ``colwise``, by outputs, or ``rowwise``, by inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]"""
        output: torch.Tensor = self.rows(x.reshape(-1, x.shape[-1]))
        return output.view(*x.shape[:-1], output.shape[-1])


class _Table(nn.Module):
    """Gives an embedding ids of any shape."""

    def __init__(self, table: AnyEmbedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> [..., width]"""
        return self.table(ids.flatten()).view(*ids.shape, -1)


class _TiedHead(nn.Module):
    """A head over the vectors of an embedding."""

    def __init__(self, table: AnyEmbedding) -> None:
        super().__init__()
        self._table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> [..., num_vectors]"""
        return self._table.logits(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def replace_linears(model: PreTrainedModel, replacements: Replacements, *, quantized: bool) -> None:
    """Replace the linears of a model and its head, one by one: at most one weight is in memory twice. Linears
    whose weight other modules have, too, stay, except a head that is tied to its embedding."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    dtype = model.dtype
    _replace_tied_head(model, replacements)
    users = Counter(id(module.weight) for module in model.modules() if isinstance(module, nn.Linear))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype != dtype or users[id(child.weight)] > 1:
                continue
            if quantized and name in _ROUTERS:
                continue
            replace = replacements.head if child is head else replacements.linear
            rows = replace(child)
            if rows is not child:
                setattr(parent, name, RowsLinear(rows, child.in_features, child.out_features))


class _Norm(nn.Module):
    """An RMS norm in one operation."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape"""
        return rms_norm(x, self.weight.shape, self.weight, self._eps)


class RoutedExperts(nn.Module):
    """Gives our experts the arguments that transformers passes."""

    def __init__(self, experts: nn.Module, per_token: int) -> None:
        super().__init__()
        self._experts = experts
        self._per_token = per_token

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [..., hidden_size]; top_k_index, top_k_weights [num_tokens, experts_per_token] ->
        like hidden_states. ValueError for another number of experts per token than the config's."""
        if top_k_index.shape[-1] != self._per_token:
            raise ValueError(f"{top_k_index.shape[-1]} experts per token")
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output: torch.Tensor = self._experts(rows, top_k_index.long(), top_k_weights)
        return output.view(hidden_states.shape)


def replace_experts(model: PreTrainedModel, replacements: Replacements, *, quantized: bool) -> None:
    """Replace those experts that have a gate, and whose gates come before ups in one tensor. ConfigError if
    they cannot be quantized."""
    config = model.config.get_text_config()
    counts = (getattr(config, name, None) for name in _PER_TOKEN)
    per_token = next((count for count in counts if isinstance(count, int)), None)
    if per_token is None and quantized and any(map(are_known_experts, model.modules())):
        raise ConfigError("quantization of experts needs a config that says how many each token has.")
    if per_token is None:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not are_known_experts(child):
                continue
            plain = _as_experts(child, per_token)
            replacements.check_experts(plain)
            experts = replacements.experts(plain)
            setattr(parent, name, RoutedExperts(experts, per_token))


def are_known_experts(module: nn.Module) -> bool:
    """Whether a module is experts that ours compute, by what transformers says of it."""
    if not getattr(module, "has_gate", False) or _opens_by_gelu(module) is None:
        return False
    others = ("has_bias", "has_post_expert_norm", "is_transposed")
    names = {name for name, _ in module.named_parameters()}
    is_plain = getattr(module, "is_concatenated", False) and not any(getattr(module, o) for o in others)
    has_own_gate = getattr(type(module), "_apply_gate", None) is not _default_apply_gate
    return is_plain and not has_own_gate and names == {"gate_up_proj", "down_proj"}


def _opens_by_gelu(module: nn.Module) -> bool | None:
    """Whether gates go through the tanh form of GELU, otherwise SiLU; None: neither."""
    opens = getattr(module, "act_fn", None)
    if opens is None:
        return None
    x = torch.linspace(-4.0, 4.0, 65)
    try:
        opened = opens(x)
    except (RuntimeError, TypeError):  # it takes other arguments, or has parameters
        return None
    if torch.allclose(opened, silu(x), atol=1e-6):
        return False
    return True if torch.allclose(opened, gelu(x, approximate="tanh"), atol=1e-6) else None


def _as_experts(module: nn.Module, per_token: int) -> Experts:
    gate_up = module.get_parameter("gate_up_proj")
    down = module.get_parameter("down_proj")
    num_experts, hidden_size, expert_size = down.shape
    routing = Routing(num_experts, per_token)
    shape = SparseShape(expert_size, routing, by_gelu=bool(_opens_by_gelu(module)))
    experts = Experts(hidden_size, shape, Builder(down.dtype, ALONE))
    experts.gate_up = gate_up
    experts.down = down
    return experts


@torch.inference_mode()
def replace_norms(model: PreTrainedModel) -> None:
    """Replace those modules that compute an RMS norm of numbers drawn at random, up to rounding."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            norm = _as_norm(child)
            if norm is not None:
                setattr(parent, name, norm)


def _as_norm(module: nn.Module) -> _Norm | None:
    eps = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    weights = dict(module.named_parameters())
    weight = weights.get("weight")
    if not isinstance(eps, float) or weight is None or len(weights) > 1 or weight.dim() != 1:
        return None
    norm = _Norm(weight.data, eps)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((4, len(weight)), generator=generator).to(weight.dtype)
    expected = module(x)
    found = norm(x)
    is_one = expected.dtype == found.dtype and (expected - found).norm() <= _ROUNDING * expected.norm()
    return norm if is_one else None


def _replace_tied_head(model: PreTrainedModel, replacements: Replacements) -> None:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    plain = model.get_input_embeddings()
    is_known = type(head) is nn.Linear and type(plain) is nn.Embedding
    if not is_known or head.weight is not plain.weight or head.bias is not None:
        return
    table = replacements.table(Embedding(plain.weight))
    if isinstance(table, Embedding):
        return
    of_head = cast("AnyEmbedding", table)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is plain:
                setattr(parent, name, _Table(of_head))
            elif child is head:
                setattr(parent, name, _TiedHead(of_head))
