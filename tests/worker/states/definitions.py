"""Layers with states by their definitions, token by token in fp64, and batches of sequences for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn.functional import softplus

from engine.worker.states.operations import ChannelScan, Convolution, DeltaRule, Scan
from engine.worker.states.state_batch import StateBatch

NUM_SLOTS = 12
CONV_WIDTH = 4


Inputs = tuple[Any, torch.Tensor]
"""The arguments of a kernel before the batch: the operation and the pool."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer with ``k_heads`` keys or groups, and a multiple of that many heads."""

    k_heads: int
    v_heads: int
    k_size: int
    v_size: int
    by_channel: bool = False
    """Whether each row of a state of the delta rule has its own decay."""


SIZES = (
    Sizes(1, 1, 16, 16),
    Sizes(2, 6, 32, 48),
    Sizes(3, 3, 20, 7),
    Sizes(1, 5, 128, 130),
    Sizes(2, 4, 128, 128),
    Sizes(2, 6, 20, 7, by_channel=True),
    Sizes(3, 3, 128, 130, by_channel=True),
)


@st.composite
def batches(draw: st.DrawFn) -> StateBatch:
    """Sequences of up to 200 tokens: new ones, ones that continue in place, and ones that leave their source
    unchanged, which another may share."""
    lengths = draw(
        st.lists(st.sampled_from((1, 1, 1, 2, 3, 7, 8, 9, 40, 63, 64, 65, 200)), min_size=1, max_size=5)
    )
    targets = draw(st.permutations(range(1, NUM_SLOTS)))[: len(lengths)]
    kept = [slot for slot in range(1, NUM_SLOTS) if slot not in targets]
    sources = [draw(st.sampled_from((0, target, *kept[:2]))) for target in targets]
    return StateBatch(*(np.array(column, dtype=np.int64) for column in (lengths, sources, targets)))


def pool_of(batch: StateBatch, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States in the slots that the batch may read, NaN in all others."""
    pool = torch.full((NUM_SLOTS, *shape), float("nan"), dtype=dtype)
    for slot in {int(source) for source in batch.sources} - {0}:
        pool[slot] = noise(*shape, dtype=dtype)
    return pool


@dataclass(frozen=True, slots=True)
class Found:
    """Output and pool of a kernel."""

    output: torch.Tensor
    pool: torch.Tensor


def conv_by_definition(conv: Convolution, pool: torch.Tensor, batch: StateBatch) -> Found:
    """See ``Convolution``."""
    x, weight, bias, has_silu = conv
    outputs, left = [], pool.clone()
    for rows, source, target in _sequences(x.double(), batch):
        before = torch.zeros(pool.shape[1:]) if source == 0 else pool[source]
        seen = torch.cat((before.double().T, rows))
        windows = seen.unfold(0, weight.shape[1], 1)
        found = (windows * weight.double()).sum(-1) + (0 if bias is None else bias.double())
        outputs.append(found * found.sigmoid() if has_silu else found)
        left[target] = seen[len(rows) :].T.to(pool.dtype)
    return Found(torch.cat(outputs), left)


def delta_rule_by_definition(rule: DeltaRule, pool: torch.Tensor, batch: StateBatch) -> Found:
    """See ``DeltaRule``; arXiv 2412.06464, equation 10."""
    q, k, v, g, beta = rule
    q, k = (_normalized(x).repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    tokens = zip(q * q.shape[-1] ** -0.5, k, v.double(), g.double(), beta.double(), strict=True)
    outputs, left = [], pool.double()
    for length, source, target in zip(batch.query_lens, batch.sources, batch.targets, strict=True):
        state = pool[source].double() if source else torch.zeros(pool.shape[1:], dtype=torch.float64)
        for _ in range(length):
            q_t, k_t, v_t, g_t, beta_t = next(tokens)
            state = state * (g_t.exp()[:, :, None] if g_t.dim() > 1 else g_t.exp()[:, None, None])
            delta = (v_t - torch.einsum("hkv,hk->hv", state, k_t)) * beta_t[:, None]
            state = state + k_t[:, :, None] * delta[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state, q_t))
        left[target] = state
    return Found(torch.stack(outputs), left)


def scan_by_definition(scan: Scan, pool: torch.Tensor, batch: StateBatch) -> Found:
    """See ``Scan``; arXiv 2405.21060, section 2."""
    x, dt, b, c, a, d, dt_bias = scan
    b, c = (y.double().repeat_interleave(x.shape[1] // y.shape[1], dim=1) for y in (b, c))
    lengths = torch.nn.functional.softplus(dt.double() + dt_bias.double())
    tokens = zip(x.double(), lengths, b, c, strict=True)
    outputs, left = [], pool.double()
    for length, source, target in zip(batch.query_lens, batch.sources, batch.targets, strict=True):
        state = pool[source].double() if source else torch.zeros(pool.shape[1:], dtype=torch.float64)
        for _ in range(length):
            x_t, dt_t, b_t, c_t = next(tokens)
            state = state * (dt_t * a.double()).exp()[:, None, None]
            state = state + (x_t * dt_t[:, None])[:, :, None] * b_t[:, None, :]
            outputs.append(torch.einsum("hpn,hn->hp", state, c_t) + d.double()[:, None] * x_t)
        left[target] = state
    return Found(torch.stack(outputs), left)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _sequences(x: torch.Tensor, batch: StateBatch) -> Iterator[tuple[torch.Tensor, int, int]]:
    """The rows, source and target of each sequence."""
    lengths = [int(length) for length in batch.query_lens]
    for rows, source, target in zip(torch.split(x, lengths), batch.sources, batch.targets, strict=True):
        yield rows, int(source), int(target)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def rows_of(batch: StateBatch, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, *shape], a slice of wider rows, as from projections."""
    numbers = math.prod(shape)
    wide = noise(int(sum(batch.query_lens)), numbers + 8, dtype=dtype)
    return wide[:, 8:].view(-1, *shape)


def conv_inputs(
    sizes: Sizes, batch: StateBatch, dtype: torch.dtype, *, bias: bool, silu: bool = False
) -> Inputs:
    channels = sizes.v_heads * sizes.v_size
    conv = Convolution(
        x=rows_of(batch, channels, dtype=dtype),
        weight=noise(channels, CONV_WIDTH, dtype=dtype),
        bias=noise(channels, dtype=dtype) if bias else None,
        has_silu=silu,
    )
    return conv, pool_of(batch, channels, CONV_WIDTH - 1, dtype=dtype)


def delta_rule_inputs(sizes: Sizes, batch: StateBatch, dtype: torch.dtype) -> Inputs:
    """Some tokens decay strongly, some hardly."""
    k_heads, v_heads, k_size, v_size = sizes.k_heads, sizes.v_heads, sizes.k_size, sizes.v_size
    decays = (v_heads, k_size) if sizes.by_channel else (v_heads,)
    rule = DeltaRule(
        q=rows_of(batch, k_heads, k_size, dtype=dtype),
        k=rows_of(batch, k_heads, k_size, dtype=dtype),
        v=rows_of(batch, v_heads, v_size, dtype=dtype),
        g=-torch.nn.functional.softplus(3 * rows_of(batch, *decays, dtype=torch.float32)),
        beta=rows_of(batch, v_heads, dtype=dtype).sigmoid(),
    )
    return rule, pool_of(batch, v_heads, k_size, v_size)


def scan_inputs(sizes: Sizes, batch: StateBatch, dtype: torch.dtype) -> Inputs:
    groups, heads, head_size, state_size = sizes.k_heads, sizes.v_heads, sizes.v_size, sizes.k_size
    scan = Scan(
        x=rows_of(batch, heads, head_size, dtype=dtype),
        dt=rows_of(batch, heads, dtype=dtype),
        a=-noise(heads).exp(),
        b=rows_of(batch, groups, state_size, dtype=dtype),
        c=rows_of(batch, groups, state_size, dtype=dtype),
        d=noise(heads),
        dt_bias=noise(heads),
    )
    return scan, pool_of(batch, heads, head_size, state_size)


def channel_scan_inputs(sizes: Sizes, batch: StateBatch, dtype: torch.dtype) -> Inputs:
    channels, state_size = sizes.v_heads * sizes.v_size, sizes.k_size
    scan = ChannelScan(
        x=rows_of(batch, channels, dtype=dtype),
        dt=rows_of(batch, channels, dtype=dtype),
        b=rows_of(batch, state_size, dtype=dtype),
        c=rows_of(batch, state_size, dtype=dtype),
        a=-noise(channels, state_size).exp(),
        dt_bias=noise(channels),
    )
    return scan, pool_of(batch, channels, state_size)


def channel_scan_by_definition(scan: ChannelScan, pool: torch.Tensor, batch: StateBatch) -> Found:
    """In fp64: the state decays by exp(dt a), takes in dt x b, and is read by c."""
    x, dt, b, c, a = (each.double() for each in (scan.x, scan.dt, scan.b, scan.c, scan.a))
    step = softplus(dt + scan.dt_bias.double())
    output, left = torch.empty(x.shape, dtype=torch.float64), pool.double()
    for start, count, source, target in zip(
        batch.starts, batch.query_lens, batch.sources, batch.targets, strict=True
    ):
        state = torch.zeros(a.shape, dtype=torch.float64) if source == 0 else pool[source].double()
        for token in range(start, start + count):
            decay = (step[token, :, None] * a).exp()
            state = state * decay + (step[token] * x[token])[:, None] * b[token]
            output[token] = state @ c[token]
        left[target] = state
    return Found(output.float(), left.float())
