"""Computes layers with states in torch operations. All other implementations are tested against these.

All sequences of a step are flattened into one axis. States are read from and written to a pool, whose first
axis is the slot. Arithmetic is in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn.functional import silu, softplus

from engine.worker.attention.backend import IntArray
from engine.worker.states.operations import ChannelScan, Convolution, DeltaRule, Scan
from engine.worker.states.state_batch import StateBatch

CHUNK = 64
"""Tokens of a prompt that are computed together, from one state to the next."""
CHANNEL_CHUNK = 16
"""The same for decays by channel, which need memory for each channel of each two tokens."""
_Advance = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Maps tokens and the state before them to the state after them, and outputs."""
_NO_ZERO = 1e-6
"""Added to a squared length before dividing by its root, as in flash-linear-attention."""


def causal_conv(conv: Convolution, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
    """The state is the last inputs: pool [num_slots, channels, width - 1] -> [num_tokens, channels]"""
    x = conv.x
    weight = conv.weight
    before = weight.shape[1] - 1
    rows = _rows_with_history(batch, before)
    inputs = x.new_empty(len(x) + before * len(batch.query_lens), x.shape[1])
    own, history, last = (torch.from_numpy(each).to(x.device) for each in rows)
    inputs[own] = x
    inputs[history] = _read(pool, batch.sources).transpose(1, 2).flatten(0, 1).to(x.dtype)
    pool[_on(pool, batch.targets)] = inputs[last].view(-1, before, x.shape[1]).transpose(1, 2).to(pool.dtype)
    weights = weight.float().t()
    total = sum(inputs[own - before + k].float() * weights[k] for k in range(before + 1))
    assert isinstance(total, torch.Tensor)
    if conv.bias is not None:
        total = total + conv.bias.float()
    return (silu(total) if conv.has_silu else total).to(x.dtype)


def _rows_with_history(batch: StateBatch, before: int) -> tuple[IntArray, IntArray, IntArray]:
    """Rows of an array in which ``before`` rows precede each sequence's tokens: those of the tokens
    [num_tokens], of the rows before them, and of each sequence's last ones, both [num_seqs * before]."""
    places = np.arange(before)
    sequences = np.arange(len(batch.query_lens))
    firsts = batch.starts + sequences * before
    own = np.arange(batch.query_lens.sum()) + np.repeat((sequences + 1) * before, batch.query_lens)
    history = (firsts[:, None] + places).ravel()
    return own, history, ((firsts + batch.query_lens)[:, None] + places).ravel()


def gated_delta_rule(rule: DeltaRule, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
    """Queries and keys are normalized here. pool [num_slots, v_heads, k_size, v_size] in fp32
    -> [num_tokens, v_heads, v_size]"""
    v = rule.v
    q = _normalized(rule.q) * rule.q.shape[-1] ** -0.5
    k = _normalized(rule.k)
    heads_each = v.shape[1] // k.shape[1]
    inputs = (
        q.repeat_interleave(heads_each, dim=1),
        k.repeat_interleave(heads_each, dim=1),
        v.float(),
        rule.g.float(),
        rule.beta.float(),
    )
    output = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if rule.g.dim() > 2:
        _advance(inputs, output, pool, batch, _delta_step, _channel_chunk, CHANNEL_CHUNK)
    else:
        _advance(inputs, output, pool, batch, _delta_step, _delta_chunk)
    return output.to(v.dtype)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NO_ZERO)


def _delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence: states [num_seqs, v_heads, k_size, v_size] before -> after it, and outputs
    [num_seqs, v_heads, v_size]."""
    decays = g.exp()
    states = states * (decays[..., None] if g.dim() > 2 else decays[..., None, None])
    recalled = (k[..., None, :] @ states)[..., 0, :]
    correction = (v - recalled) * beta[..., None]
    states = states + k[..., None] * correction[..., None, :]
    return states, (q[..., None, :] @ states)[..., 0, :]


def _delta_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive tokens of a sequence: state [v_heads, k_size, v_size] before -> after them, and outputs
    [num_tokens, v_heads, v_size].

    The corrections of all tokens solve a triangular system, since each recalls what those before it wrote
    (arXiv:2412.06464, section 3.3).
    """
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    g = g.t()
    beta = beta.t()[..., None]
    passed = g.cumsum(-1)
    decay = _decay_between(passed)
    weighted = k * beta
    system = (weighted @ k.mT) * decay
    recalled = (weighted * passed.exp()[..., None]) @ state
    corrections = torch.linalg.solve_triangular(system, v * beta - recalled, upper=False, unitriangular=True)
    output = (q * passed.exp()[..., None]) @ state + ((q @ k.mT) * decay) @ corrections
    left = (passed[:, -1:] - passed).exp()[..., None]
    state = state * passed[:, -1].exp()[:, None, None] + (k * left).mT @ corrections
    return state, output.transpose(0, 1)


def _channel_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like ``_delta_chunk``, with a decay for each row of a state. The decays between tokens are multiplied
    with each channel of keys before the channels are summed, since their quotients may overflow."""
    q, k, v, g = (each.transpose(0, 1) for each in (q, k, v, g))
    beta = beta.t()[..., None]
    passed = g.cumsum(1)
    decay = _decay_between(passed.transpose(1, 2)).movedim(1, -1)
    faded = k[:, None] * decay
    system = (k[:, :, None] * faded).sum(-1) * beta
    recalled = (k * beta * passed.exp()) @ state
    corrections = torch.linalg.solve_triangular(system, v * beta - recalled, upper=False, unitriangular=True)
    output = (q * passed.exp()) @ state + (q[:, :, None] * faded).sum(-1) @ corrections
    left = (passed[:, -1:] - passed).exp()
    state = state * passed[:, -1].exp()[..., None] + (k * left).mT @ corrections
    return state, output.transpose(0, 1)


def selective_scan(scan: Scan, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
    """pool [num_slots, heads, head_size, state_size] in fp32 -> [num_tokens, heads, head_size]"""
    x = scan.x
    heads_each = x.shape[1] // scan.b.shape[1]
    step = softplus(scan.dt.float() + scan.dt_bias.float())
    inputs = (
        x.float() * step[..., None],
        step * scan.a.float(),
        scan.b.float().repeat_interleave(heads_each, dim=1),
        scan.c.float().repeat_interleave(heads_each, dim=1),
    )
    output = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _advance(inputs, output, pool, batch, _scan_step, _scan_chunk)
    return (output + x.float() * scan.d.float()[:, None]).to(x.dtype)


def _scan_step(
    x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence: states [num_seqs, heads, head_size, state_size] before -> after it, and
    outputs [num_seqs, heads, head_size]. g: the logarithm of the decay."""
    states = states * g.exp()[..., None, None] + x[..., None] * b[..., None, :]
    return states, (states @ c[..., None])[..., 0]


def _scan_chunk(
    x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive tokens of a sequence: state [heads, head_size, state_size] before -> after them, and
    outputs [num_tokens, heads, head_size]."""
    x, b, c = (each.transpose(0, 1) for each in (x, b, c))
    passed = g.t().cumsum(-1)
    output = ((c @ b.mT) * _decay_between(passed)) @ x + (c * passed.exp()[..., None]) @ state.mT
    left = (passed[:, -1:] - passed).exp()[..., None]
    state = state * passed[:, -1].exp()[:, None, None] + x.mT @ (b * left)
    return state, output.transpose(0, 1)


def channel_scan(scan: ChannelScan, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
    """Computes prompts token by token: decays by channel and number would need memory for each two tokens of
    a chunk. pool [num_slots, channels, state_size] in fp32 -> [num_tokens, channels] in fp32"""
    step = softplus(scan.dt.float() + scan.dt_bias.float())
    inputs = step, scan.x.float() * step, scan.b.float(), scan.c.float()
    output = torch.empty(scan.x.shape, dtype=torch.float32, device=scan.x.device)
    a = scan.a.float()
    _advance(inputs, output, pool, batch, partial(_channel_step, a), partial(_channel_chunk_of, a))
    return output


def _channel_step(
    a: torch.Tensor,
    step: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence: states [num_seqs, channels, state_size] before -> after it, and outputs
    [num_seqs, channels]. x: inputs times their steps."""
    states = states * (step[..., None] * a).exp() + x[..., None] * b[:, None]
    return states, (states @ c[..., None])[..., 0]


def _channel_chunk_of(
    a: torch.Tensor,
    step: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive tokens of a sequence: state [channels, state_size] before -> after them, and outputs
    [num_tokens, channels]."""
    outputs = []
    for token in range(len(x)):
        state = state * (step[token, :, None] * a).exp() + x[token, :, None] * b[token]
        outputs.append(state @ c[token])
    return state, torch.stack(outputs)


def _decay_between(passed: torch.Tensor) -> torch.Tensor:
    """passed [..., n], logarithms of the decay since the chunk began -> [..., n, n]: the decay from the
    column's token to the row's; 0 if the row's comes first."""
    between = passed[..., :, None] - passed[..., None, :]
    # Masked before exp, which may overflow above the diagonal.
    above = torch.ones_like(between, dtype=torch.bool).triu(1)
    return between.masked_fill(above, -torch.inf).exp()


def _advance(
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
    pool: torch.Tensor,
    batch: StateBatch,
    by_token: _Advance,
    by_chunk: _Advance,
    num_together: int = CHUNK,
) -> None:
    """Fill ``output`` and the targets: sequences of one token together, the others one by one in chunks of
    ``num_together`` tokens."""
    single = np.flatnonzero(batch.query_lens == 1)
    longer = np.flatnonzero(batch.query_lens > 1)
    starts = batch.starts
    if len(single):
        rows = _on(output, starts[single])
        states, output[rows] = by_token(*(each[rows] for each in inputs), _read(pool, batch.sources[single]))
        pool[_on(pool, batch.targets[single])] = states
    for sequence in longer.tolist():
        start = starts[sequence]
        end = starts[sequence] + batch.query_lens[sequence]
        state = _read(pool, batch.sources[sequence : sequence + 1])[0]
        for first in range(start, end, num_together):
            chunk = slice(first, min(first + num_together, end))
            state, output[chunk] = by_chunk(*(each[chunk] for each in inputs), state)
        pool[int(batch.targets[sequence])] = state


def _read(pool: torch.Tensor, sources: IntArray) -> torch.Tensor:
    """The states [len(sources), ...] in slots; zeros for slot 0, whatever it holds."""
    states = pool[_on(pool, sources)]
    absent = _on(pool, sources == 0)
    return states.masked_fill_(absent.view(-1, *[1] * (pool.dim() - 1)), 0)


def _on(like: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)
