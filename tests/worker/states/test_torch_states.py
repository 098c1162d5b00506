"""The torch functions of states against transformers' own, however sequences are cut and batched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.falcon_mamba.modeling_falcon_mamba import mamba_selective_scan
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from engine.worker.states.operations import ChannelScan, Convolution, DeltaRule, Scan
from engine.worker.states.state_batch import StateBatch
from engine.worker.states.torch_states import causal_conv, channel_scan, gated_delta_rule, selective_scan

LENGTHS = (1, 2, 3, 64, 65, 131, 200)
K_HEADS, V_HEADS, K_SIZE, V_SIZE = 2, 6, 8, 5
HEADS, HEAD_SIZE, GROUPS, STATE_SIZE = 4, 6, 2, 8
CHANNELS, WIDTH = 12, 4

Inputs = dict[str, torch.Tensor]


@dataclass
class Case:
    """One of the functions with random inputs, and transformers' result for whole sequences."""

    make: Callable[[int, torch.Generator], Inputs]
    """Inputs of this many tokens, each [num_tokens, ...]."""
    run: Callable[[Inputs, torch.Tensor, StateBatch], torch.Tensor]
    expected: Callable[[Inputs], torch.Tensor]
    state_shape: tuple[int, ...]


def random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


WEIGHTS = torch.Generator().manual_seed(7)
KERNEL, KERNEL_BIAS = random((CHANNELS, WIDTH), WEIGHTS), random((CHANNELS,), WEIGHTS)
CHANNEL_A = -random((HEADS, STATE_SIZE), torch.Generator().manual_seed(9)).exp()
A, D, DT_BIAS = -random((HEADS,), WEIGHTS).exp(), random((HEADS,), WEIGHTS), random((HEADS,), WEIGHTS)


def conv_case(bias: torch.Tensor | None, silu: bool) -> Case:
    return Case(
        lambda n, generator: {"x": random((n, CHANNELS), generator)},
        lambda each, pool, batch: causal_conv(Convolution(each["x"], KERNEL, bias, silu), pool, batch),
        lambda each: causal_conv1d_fn(each["x"].t()[None], KERNEL, bias, "silu" if silu else None)[0].t(),
        (CHANNELS, WIDTH - 1),
    )


def delta_inputs(n: int, generator: torch.Generator) -> Inputs:
    return {
        "q": random((n, K_HEADS, K_SIZE), generator),
        "k": random((n, K_HEADS, K_SIZE), generator),
        "v": random((n, V_HEADS, V_SIZE), generator),
        "g": -random((n, V_HEADS), generator).exp(),
        "beta": random((n, V_HEADS), generator).sigmoid(),
    }


def expected_delta(each: Inputs) -> torch.Tensor:
    q, k, v, g, beta = (each[name][None] for name in ("q", "k", "v", "g", "beta"))
    output, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    assert isinstance(output, torch.Tensor)
    return output[0]


def channel_inputs(n: int, generator: torch.Generator) -> Inputs:
    heads = {name: random((n, V_HEADS, K_SIZE), generator) for name in ("q", "k")}
    decays = -random((n, V_HEADS, K_SIZE), generator).exp()
    return {**delta_inputs(n, generator), **heads, "g": decays}


def expected_by_channel(each: Inputs) -> torch.Tensor:
    q, k, v, g, beta = (each[name][None] for name in ("q", "k", "v", "g", "beta"))
    output, _ = chunk_kimi_delta_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    assert isinstance(output, torch.Tensor)
    return output[0]


def scan_inputs(n: int, generator: torch.Generator) -> Inputs:
    return {
        "x": random((n, HEADS, HEAD_SIZE), generator),
        "dt": random((n, HEADS), generator),
        "b": random((n, GROUPS, STATE_SIZE), generator),
        "c": random((n, GROUPS, STATE_SIZE), generator),
    }


def expected_scan(each: Inputs) -> torch.Tensor:
    x, dt, b, c = (each[name][None] for name in ("x", "dt", "b", "c"))
    output = mamba2_chunk_scan(x, dt, A, b, c, 32, D=D, dt_bias=DT_BIAS, dt_softplus=True)
    assert isinstance(output, torch.Tensor)
    return output[0]


def channel_scan_inputs(n: int, generator: torch.Generator) -> Inputs:
    return {
        "x": random((n, HEADS), generator),
        "dt": random((n, HEADS), generator),
        "b": random((n, STATE_SIZE), generator),
        "c": random((n, STATE_SIZE), generator),
    }


def expected_channel_scan(each: Inputs) -> torch.Tensor:
    x, dt, b, c = (each[name].t()[None] for name in ("x", "dt", "b", "c"))
    scanned: Any = mamba_selective_scan
    output = scanned(x, dt, CHANNEL_A, b, c, delta_bias=DT_BIAS, delta_softplus=True)
    assert isinstance(output, torch.Tensor)
    return output[0].t()


CASES = {
    "causal_conv": conv_case(None, silu=False),
    "causal_conv with a bias and SiLU": conv_case(KERNEL_BIAS, silu=True),
    "gated_delta_rule": Case(
        delta_inputs,
        lambda each, pool, batch: gated_delta_rule(DeltaRule(**each), pool, batch),
        expected_delta,
        (V_HEADS, K_SIZE, V_SIZE),
    ),
    "gated_delta_rule by channel": Case(
        channel_inputs,
        lambda each, pool, batch: gated_delta_rule(DeltaRule(**each), pool, batch),
        expected_by_channel,
        (V_HEADS, K_SIZE, V_SIZE),
    ),
    "selective_scan": Case(
        scan_inputs,
        lambda each, pool, batch: selective_scan(Scan(**each, a=A, d=D, dt_bias=DT_BIAS), pool, batch),
        expected_scan,
        (HEADS, HEAD_SIZE, STATE_SIZE),
    ),
    "channel_scan": Case(
        channel_scan_inputs,
        lambda each, pool, batch: channel_scan(
            ChannelScan(**each, a=CHANNEL_A, dt_bias=DT_BIAS), pool, batch
        ),
        expected_channel_scan,
        (HEADS, STATE_SIZE),
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def make_pool(case: Case, num_slots: int) -> torch.Tensor:
    """A pool of slots that hold no numbers yet."""
    return torch.full((num_slots, *case.state_shape), torch.nan)


def batch_of(*sequences: tuple[int, int, int]) -> StateBatch:
    """A batch of (query_len, source, target)."""
    return StateBatch(*(np.array(each, dtype=np.int64) for each in zip(*sequences, strict=True)))


def joined(parts: list[Inputs]) -> Inputs:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def cut(each: Inputs, start: int, end: int) -> Inputs:
    return {name: tensor[start:end] for name, tensor in each.items()}


def test_sequences_of_one_step_are_those_of_transformers(case: Case) -> None:
    """Sequences of any length that begin in one step give the same as each alone."""
    generator = torch.Generator().manual_seed(1)
    sequences = [case.make(length, generator) for length in LENGTHS]
    batch = batch_of(*((length, 0, slot) for slot, length in enumerate(LENGTHS, 1)))
    output = case.run(joined(sequences), make_pool(case, len(LENGTHS) + 1), batch)
    expected = torch.cat([case.expected(each) for each in sequences])
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_any_size_continue_a_sequence(case: Case, seed: int) -> None:
    """Sequences computed in pieces, in place or from slot to slot, in one batch, give the same as at once."""
    generator, choose = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    sequences = [case.make(length, generator) for length in LENGTHS]
    outputs: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    done, slots = [0] * len(LENGTHS), [0] * len(LENGTHS)
    pool = make_pool(case, 3 * len(LENGTHS) + 1)
    free = list(range(1, len(pool)))
    while any(done[i] < length for i, length in enumerate(LENGTHS)):
        waiting = [i for i, length in enumerate(LENGTHS) if done[i] < length]
        chosen = choose.permutation(waiting)[: choose.integers(1, 5)].tolist()
        plans, parts = [], []
        for i in chosen:
            size = min(int(choose.choice([1, 1, 2, 5, 70])), LENGTHS[i] - done[i])
            target = slots[i] if slots[i] and choose.random() < 0.5 else free.pop()
            plans.append((size, slots[i], target))
            parts.append(cut(sequences[i], done[i], done[i] + size))
        output = case.run(joined(parts), pool, batch_of(*plans))
        for i, (size, source, target), own in zip(
            chosen, plans, torch.split(output, [size for size, _, _ in plans]), strict=True
        ):
            outputs[i].append(own)
            if source not in (0, target):
                free.insert(0, source)
            done[i], slots[i] = done[i] + size, target
    for each, pieces in zip(sequences, outputs, strict=True):
        torch.testing.assert_close(torch.cat(pieces), case.expected(each), atol=5e-5, rtol=5e-5)


def test_a_checkpoint_stays_as_it_was(case: Case) -> None:
    """Two sequences continue from one source, into their own slots, and leave it unchanged."""
    generator = torch.Generator().manual_seed(3)
    shared, first, second = (case.make(length, generator) for length in (70, 1, 9))
    pool = make_pool(case, 4)
    case.run(shared, pool, batch_of((70, 0, 1)))
    before = pool[1].clone()
    output = case.run(joined([first, second]), pool, batch_of((1, 1, 2), (9, 1, 3)))
    assert torch.equal(pool[1], before)
    for own, rest in ((output[:1], first), (output[1:], second)):
        expected = case.expected(joined([shared, rest]))[70:]
        torch.testing.assert_close(own, expected, atol=5e-5, rtol=5e-5)


def test_inputs_in_bf16_keep_their_dtype(case: Case) -> None:
    """Outputs have the inputs' dtype, and are as near to fp32's as bf16 allows."""
    generator = torch.Generator().manual_seed(4)
    each = {name: tensor.bfloat16() for name, tensor in case.make(90, generator).items()}
    output = case.run(each, make_pool(case, 2), batch_of((90, 0, 1)))
    is_wide = case is CASES["channel_scan"]  # whose outputs are gated in fp32
    assert output.dtype == (torch.float32 if is_wide else torch.bfloat16)
    exact = case.run({name: t.float() for name, t in each.items()}, make_pool(case, 2), batch_of((90, 0, 1)))
    torch.testing.assert_close(output.float(), exact, atol=1e-2, rtol=1e-2)
