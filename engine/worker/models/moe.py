"""A decoder's mixture of experts: each token goes through a few of many gated MLPs, and in some families also
through a shared one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import gelu, linear, relu, silu

from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mlp import GatedMLP, SquaredMLP
from engine.worker.models.routing import Router
from engine.worker.models.shape import ClampedGate, DenseShape, SparseShape
from engine.worker.parallel.group import TensorParallelGroup


class Experts(nn.Module):
    """The experts of one layer, or a rank's part: a part of each, or some whole experts."""

    def __init__(self, hidden_size: int, shape: SparseShape, build: Builder) -> None:
        super().__init__()
        self.shape = shape
        self._place = _place_of(build.group, by_rank=shape.by_rank)
        inner = shape.expert_size
        self.gate_up = build.parameter(shape.num_local_experts, 2 * inner, hidden_size)
        self.down = build.parameter(shape.num_local_experts, hidden_size, inner)
        is_biased = shape.clamped is not None
        self.gate_up_bias = build.parameter(shape.num_local_experts, 2 * inner) if is_biased else None
        self.down_bias = build.parameter(shape.num_local_experts, hidden_size) if is_biased else None

    @property
    def first(self) -> int:
        """The number of this rank's first expert."""
        return self.shape.first_expert(self._place[0])

    @property
    def added_bias(self) -> torch.Tensor | None:
        """The bias of ``down``; None if there is none, or if another rank with a part of the same experts
        adds it."""
        return self.down_bias if self.shape.by_rank or self._place[0] == 0 else None

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of this rank's experts for each token. x [num_tokens, hidden_size]; experts,
        weights [num_tokens, experts_per_token] -> [num_tokens, hidden_size]"""
        return sum_of_experts(x, experts - self.first, weights, len(self.gate_up), self._expert)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        if self.shape.clamped is None:
            gate, up = linear(x, self.gate_up[expert]).chunk(2, dim=-1)
            opened = gelu(gate, approximate="tanh") if self.shape.by_gelu else silu(gate)
            return linear(opened.mul_(up), self.down[expert])
        assert self.gate_up_bias is not None
        gate_up = linear(x, self.gate_up[expert], self.gate_up_bias[expert])
        bias = self.added_bias
        inner = clamped_gate(gate_up, self.shape.clamped)
        return linear(inner, self.down[expert], None if bias is None else bias[expert])

    def published_parts(self) -> dict[str, TensorPart]:
        """The tensors of a checkpoint with three tensors per expert: names, each with its part and the
        parameter that it fills."""
        names = self.shape.names
        parts = {}
        rank, size = (0, 1) if self.shape.by_rank else self._place
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True), self.first):
            gate, up = gate_up.chunk(2)
            parts[f"{index}.{names.gate}.weight"] = TensorPart(gate, 0, rank, size)
            parts[f"{index}.{names.up}.weight"] = TensorPart(up, 0, rank, size)
            parts[f"{index}.{names.down}.weight"] = TensorPart(down, 1, rank, size)
        return parts

    def fused_parts(self) -> dict[str, TensorPart]:
        """Like ``published_parts``, for a checkpoint with two tensors for all experts, as transformers 5
        holds them in memory."""
        rank, size = self._place
        if self.shape.clamped is not None:
            return self._transposed_parts()
        rows, columns = (2, 1) if self.shape.names.transposed else (1, 2)
        gate_up = self.gate_up.transpose(1, rows)
        down = self.down.transpose(1, rows)
        if self.shape.by_rank:
            return {
                "gate_up_proj": TensorPart(gate_up, 0, rank, size),
                "down_proj": TensorPart(down, 0, rank, size),
            }
        return {
            "gate_up_proj": TensorPart(gate_up, rows, rank, size, num_pieces=2),
            "down_proj": TensorPart(down, columns, rank, size),
        }

    def _transposed_parts(self) -> dict[str, TensorPart]:
        """Like ``fused_parts``, for a checkpoint with inputs before outputs, and with biases."""
        assert self.gate_up_bias is not None
        assert self.down_bias is not None
        (rank, size), by_rank = self._place, self.shape.by_rank
        down_bias = TensorPart(self.down_bias, 0, rank, size) if by_rank else TensorPart(self.down_bias)
        return {
            "gate_up_proj": TensorPart(self.gate_up.transpose(1, 2), 0 if by_rank else 2, rank, size),
            "gate_up_proj_bias": TensorPart(self.gate_up_bias, 0 if by_rank else 1, rank, size),
            "down_proj": TensorPart(self.down.transpose(1, 2), 0 if by_rank else 1, rank, size),
            "down_proj_bias": down_bias,
        }


class SquaredExperts(nn.Module):
    """Experts without gates of one layer, ``down(relu(up) ** 2)``, or a rank's part of them. They are not
    packed for a CPU's kernels, nor quantized."""

    def __init__(self, hidden_size: int, shape: SparseShape, build: Builder) -> None:
        super().__init__()
        self.shape = shape
        self._place = _place_of(build.group, by_rank=shape.by_rank)
        self.up = build.parameter(shape.num_local_experts, shape.expert_size, hidden_size)
        self.down = build.parameter(shape.num_local_experts, hidden_size, shape.expert_size)

    @property
    def first(self) -> int:
        """The number of this rank's first expert."""
        return self.shape.first_expert(self._place[0])

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of this rank's experts for each token. x [num_tokens, hidden_size]; experts,
        weights [num_tokens, experts_per_token] -> [num_tokens, hidden_size]"""
        return sum_of_experts(x, experts - self.first, weights, len(self.up), self._expert)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return linear(relu(linear(x, self.up[expert])).square(), self.down[expert])

    def published_parts(self) -> dict[str, TensorPart]:
        """See ``Experts.published_parts``; there are two tensors per expert."""
        names = self.shape.names
        parts = {}
        rank, size = (0, 1) if self.shape.by_rank else self._place
        for index, (up, down) in enumerate(zip(self.up, self.down, strict=True), self.first):
            parts[f"{index}.{names.up}.weight"] = TensorPart(up, 0, rank, size)
            parts[f"{index}.{names.down}.weight"] = TensorPart(down, 1, rank, size)
        return parts

    def fused_parts(self) -> dict[str, TensorPart]:
        """See ``Experts.fused_parts``."""
        rank, size = self._place
        by_rank = self.shape.by_rank
        return {
            "up_proj": TensorPart(self.up, 0 if by_rank else 1, rank, size),
            "down_proj": TensorPart(self.down, 0 if by_rank else 2, rank, size),
        }


def sum_of_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    run: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The weighted sum of the experts of each token, of those from 0 to ``num_experts`` - 1. x [num_tokens,
    hidden_size]; chosen, weights [num_tokens, experts_per_token] -> [num_tokens, hidden_size]

    Rows are sorted by expert, so that ``run`` is called once for each expert, with its rows.
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    tokens = order // chosen.shape[1]
    outputs = x.new_zeros(len(order), x.shape[1])
    for expert, begin, end in _ranges(flat[order], num_experts):
        outputs[order[begin:end]] = run(expert, x[tokens[begin:end]])
    outputs = outputs.view(*chosen.shape, -1) * weights[..., None]
    return outputs.sum(dim=1, dtype=torch.float32).to(x.dtype)


def _ranges(chosen: torch.Tensor, num_experts: int) -> list[tuple[int, int, int]]:
    """Each chosen expert of this rank, with the start and the end of its rows. chosen: ascending."""
    bounds = torch.arange(num_experts + 1, device=chosen.device)
    ends: list[int] = torch.searchsorted(chosen, bounds).tolist()
    ranges = enumerate(pairwise(ends))
    return [(expert, begin, end) for expert, (begin, end) in ranges if begin < end]


def clamped_gate(gate_up: torch.Tensor, clamped: ClampedGate) -> torch.Tensor:
    """gate_up [n, 2 * size] -> [n, size], rounded like transformers' gpt-oss"""
    gate = gate_up[..., ::2].clamp(max=clamped.limit)
    up = gate_up[..., 1::2].clamp(-clamped.limit, clamped.limit)
    return (up + 1).mul_(gate * torch.sigmoid(gate * clamped.alpha))


class MixtureOfExperts(nn.Module):
    """Router, experts and shared expert of one layer, or a rank's part of them."""

    def __init__(self, hidden_size: int, shape: SparseShape, build: Builder) -> None:
        super().__init__()
        self.shape = shape
        self._group = build.group
        self.router = Router(hidden_size, shape.routing, build)
        kind = SquaredExperts if shape.squared else Experts
        self.experts: nn.Module = kind(shape.latent_size or hidden_size, _of_experts(shape), build)
        latent = shape.latent_size
        self.to_latent = build.linear(hidden_size, latent, bias=False) if latent else None
        self.from_latent = build.linear(latent, hidden_size, bias=False) if latent else None
        self.shared = _shared_mlp(hidden_size, shape, build) if shape.shared_size else None
        self.share = build.parameter(1, hidden_size) if shape.gated_share else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape

        Every rank has all tokens, so ranks exchange only the sum of their experts' outputs.
        """
        if self.to_latent is not None:
            return self.mixed_by(self._mix_latents, x)
        return self.mixed_by(self._mix_scaled if self.shape.routing.scales_input else self.experts, x)

    def mixed_by(self, mix: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """The output for x, with ``mix`` in place of ``Experts.forward``.

        If several cores share experts, each mixes the tokens of all cores.
        """
        rows = self._group.peers.gather(x)
        mixed = self._group.peers.own_sum(mix(rows, *self.router(rows)))
        return self._add_up(mixed, x) if len(x) else mixed

    def _mix_latents(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The output of experts that read latents. That of a rank's experts is mapped before ranks add up."""
        assert self.to_latent is not None
        assert self.from_latent is not None
        output: torch.Tensor = self.from_latent(self.experts(self.to_latent(x), experts, weights))
        return output

    def _mix_scaled(self, x: torch.Tensor, experts: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The sum of the outputs of each token's experts, each of which reads its own multiple of x."""
        num_tokens, count = experts.shape
        scaled = (x[:, None] * factors[..., None]).flatten(0, 1)
        ones = torch.ones((len(scaled), 1), dtype=torch.float32, device=x.device)
        outputs: torch.Tensor = self.experts(scaled, experts.reshape(-1, 1), ones)
        return outputs if count == 1 else outputs.view(num_tokens, count, -1).sum(dim=1)

    def _add_up(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The output for x, given the output of this rank's experts; ``mixed`` is overwritten."""
        if self.shared is not None:
            mixed += self._shared_output(x, self.shared)
        return self._group.all_reduce(mixed)

    def _shared_output(self, x: torch.Tensor, shared: nn.Module) -> torch.Tensor:
        output: torch.Tensor = shared(x)
        return output if self.share is None else output * linear(x, self.share).sigmoid()

    def is_of_other_rank(self, name: str) -> bool:
        """Whether a tensor of the checkpoint, named within a layer, belongs to an expert of another rank."""
        names = self.shape.names
        kinds = f"{names.gate}|{names.up}|{names.down}"
        expert = re.fullmatch(rf"{re.escape(names.prefix)}experts\.(\d+)\.({kinds})\.weight", name)
        return self.shape.by_rank and expert is not None and int(expert[1]) < self.shape.routing.num_experts

    def checkpoint_parts(self, *, fused: bool = False) -> dict[str, TensorPart]:
        """The checkpoint's tensor names within a layer, each with its part and the parameter that it fills.
        ``fused``: see ``Experts.fused_parts``."""
        assert isinstance(self.experts, Experts | SquaredExperts), "no parts after load()"
        fused = fused or self.shape.clamped is not None
        experts = self.experts.fused_parts() if fused else self.experts.published_parts()
        names = self.shape.names
        is_own = fused and not names.transposed and not self.shape.squared
        prefix = "mlp." if is_own and names.prefix else names.prefix
        parts = {f"{prefix}experts.{name}": part for name, part in experts.items()}
        router = self.router.checkpoint_parts()
        parts |= {f"{prefix}{names.router}.{name}": part for name, part in router.items()}
        if self.shared is not None:
            shared = self.shared.checkpoint_parts()
            parts |= {f"{prefix}{names.shared}.{name}": part for name, part in shared.items()}
        if self.to_latent is not None and self.from_latent is not None:
            parts[f"{prefix}fc1_latent_proj.weight"] = TensorPart(self.to_latent.weight)
            parts[f"{prefix}fc2_latent_proj.weight"] = TensorPart(self.from_latent.weight)
        if self.share is not None:
            parts[f"{prefix}{names.shared}_gate.weight"] = TensorPart(self.share)
        return parts


def _place_of(group: TensorParallelGroup, *, by_rank: bool) -> tuple[int, int]:
    """A rank's number among those that share the experts, and their count."""
    cores = group.peers
    if by_rank:
        return cores.core * group.size + group.rank, cores.num_cores * group.size
    return group.rank, group.size


def _shared_mlp(hidden_size: int, shape: SparseShape, build: Builder) -> GatedMLP | SquaredMLP:
    """The expert that all tokens go through."""
    dense = DenseShape(shape.shared_size, joined=shape.names.joined_share, squared=shape.squared)
    kind = SquaredMLP if shape.squared else GatedMLP
    return kind(hidden_size, dense, build, partial=True)


def _of_experts(shape: SparseShape) -> SparseShape:
    """The shape for the experts: if their inputs are scaled, each row is for one expert."""
    if not shape.routing.scales_input:
        return shape
    return replace(shape, routing=replace(shape.routing, experts_per_token=1))
