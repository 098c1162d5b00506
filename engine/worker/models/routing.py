"""Chooses each token's experts and their weights: in the order of operations of transformers' routers, and
rounded where they round."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.shape import Routing

_NO_ZERO = 1e-20
"""Sigmoid routers add this number to the sum that they divide by."""
_BEST_BY_SIGMOID = 2
_BEST_BY_SOFTMAX = 1
"""The number of best experts that score a group: two in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), one in
DeepSeek-V2 (arXiv 2405.04434, section 2.2.2)."""


class Router(nn.Module):
    """The router of one layer; every rank has all of it."""

    def __init__(self, hidden_size: int, routing: Routing, build: Builder) -> None:
        super().__init__()
        self.routing = routing
        is_corrected = routing.by_sigmoid or routing.corrected
        wide = torch.float32 if routing.corrected else None
        self.weight = build.parameter(routing.num_experts, hidden_size, dtype=wide)
        self.bias = build.parameter(routing.num_experts) if routing.biased else None
        self.correction = build.parameter(routing.num_experts, dtype=torch.float32) if is_corrected else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [num_tokens, hidden_size] -> experts and their weights, both [num_tokens, experts_per_token]"""
        if self.routing.scales_input:
            return by_own_sigmoid(linear(x, self.weight), self.routing)
        if self.correction is None:
            in_fp32 = self.routing.in_fp32
            logits = linear(x.float(), self.weight.float()) if in_fp32 else linear(x, self.weight, self.bias)
            return by_softmax(logits, self.routing)
        logits = linear(x.float(), self.weight.float())
        if self.routing.by_sigmoid:
            return by_sigmoid(logits, self.correction, self.routing)
        experts, weights = by_corrected_softmax(logits, self.correction, self.routing)
        return experts, weights.to(x.dtype) if self.routing.rounded else weights

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        parts = {"weight": TensorPart(self.weight)}
        if self.bias is not None:
            parts["bias"] = TensorPart(self.bias)
        if self.correction is not None:
            flat = self.correction if self.routing.by_sigmoid else self.correction[None]
            parts["e_score_correction_bias"] = TensorPart(flat)
        return parts


def by_softmax(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the highest probabilities, which are their weights, within the best groups. logits
    [num_tokens, num_experts] -> like ``Router.forward``"""
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    if routing.num_groups > 1:
        scores = _of_best_groups(scores, routing, _BEST_BY_SOFTMAX, others=0.0)
    weights, experts = scores.topk(routing.experts_per_token)
    if routing.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights * routing.scale
    return experts, weights.to(logits.dtype) if routing.rounded else weights


def by_corrected_softmax(
    logits: torch.Tensor, correction: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the highest corrected probabilities; the correction does not affect their weights.
    logits, fp32 [num_tokens, num_experts] -> like ``Router.forward``, in fp32"""
    scores = logits.softmax(dim=-1)
    experts = (scores + correction).topk(routing.experts_per_token).indices
    weights = scores.gather(1, experts)
    return experts, weights / weights.sum(dim=-1, keepdim=True).clamp(min=routing.smallest_sum)


def by_own_sigmoid(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the highest logits, and the factors of their inputs. logits [num_tokens, num_experts]
    -> like ``Router.forward``"""
    best, experts = logits.topk(routing.experts_per_token)
    return experts, best.float().sigmoid().to(logits.dtype)


def by_sigmoid(
    logits: torch.Tensor, correction: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the highest corrected scores, within the best groups; the correction, which balances
    their load, does not affect their weights. logits, fp32 [num_tokens, num_experts] -> like
    ``Router.forward``"""
    scores = logits.sigmoid()
    eligible = scores + correction
    if routing.num_groups > 1:
        eligible = _of_best_groups(eligible, routing, _BEST_BY_SIGMOID, others=-torch.inf)
    experts = eligible.topk(routing.experts_per_token, sorted=False).indices
    weights = scores.gather(1, experts)
    if routing.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _NO_ZERO)
    return experts, weights * routing.scale


def _of_best_groups(scores: torch.Tensor, routing: Routing, num_counted: int, others: float) -> torch.Tensor:
    """``scores``, with ``others`` in place of scores outside the best groups: those whose ``num_counted``
    best experts have the highest sum."""
    groups = scores.view(len(scores), routing.num_groups, -1)
    totals = groups.topk(num_counted).values.sum(dim=-1)
    best = totals.topk(routing.num_top_groups, sorted=False).indices
    is_out = torch.ones_like(totals, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out[..., None], others).flatten(1)
