"""Layers with states in compiled code compute what their definitions say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.cpu.kernels.library import KernelUnavailable
from engine.worker.cpu.state_kernels import StateKernels, state_kernels
from engine.worker.states import selection, torch_states
from engine.worker.states.selection import select_state_ops
from engine.worker.states.state_batch import StateBatch
from tests.worker.states.definitions import (
    SIZES,
    Found,
    Inputs,
    Sizes,
    batches,
    channel_scan_by_definition,
    channel_scan_inputs,
    conv_by_definition,
    conv_inputs,
    delta_rule_by_definition,
    delta_rule_inputs,
    scan_by_definition,
    scan_inputs,
)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Relative errors: in fp32, a few units in the last place, as for sums of 128; in bf16, where inputs are
exact and sums are fp32, that of rounding the result once (2^-9) and a margin."""
DRAWN = given(
    sizes=st.sampled_from(SIZES),
    batch=batches(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 1000),
)


@pytest.fixture(scope="module")
def kernels() -> StateKernels:
    try:
        return state_kernels()
    except KernelUnavailable as reason:
        pytest.skip(f"there are no compiled kernels: {reason}")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def left_by(kernel: Callable[..., torch.Tensor], inputs: Inputs, batch: StateBatch) -> Found:
    """Runs a kernel on a copy of the pool."""
    operation, before = inputs
    pool = before.clone()
    return Found(kernel(operation, pool, batch), pool)


def check(found: Found, wanted: Found, before: torch.Tensor, batch: StateBatch) -> None:
    """Asserts that outputs and the states in targets are near, and all other slots are equal bit for bit."""
    near(found.output, wanted.output)
    near(found.pool[batch.targets], wanted.pool[batch.targets])
    others = np.setdiff1d(np.arange(len(before)), batch.targets)
    assert torch.equal(found.pool[others].nan_to_num(7), before[others].nan_to_num(7))


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < TOLERANCE[found.dtype]


@settings(max_examples=60, deadline=None)
@DRAWN
def test_delta_rule_is_its_definition(
    kernels: StateKernels, sizes: Sizes, batch: StateBatch, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = delta_rule_inputs(sizes, batch, dtype)
    found = left_by(kernels.gated_delta_rule, inputs, batch)
    check(found, delta_rule_by_definition(*inputs, batch), inputs[-1], batch)


@settings(max_examples=60, deadline=None)
@DRAWN
def test_scan_is_its_definition(
    kernels: StateKernels, sizes: Sizes, batch: StateBatch, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = scan_inputs(sizes, batch, dtype)
    found = left_by(kernels.selective_scan, inputs, batch)
    check(found, scan_by_definition(*inputs, batch), inputs[-1], batch)


@settings(max_examples=60, deadline=None)
@DRAWN
def test_scan_by_channel_is_its_definition(
    kernels: StateKernels, sizes: Sizes, batch: StateBatch, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = channel_scan_inputs(sizes, batch, dtype)
    found = left_by(kernels.channel_scan, inputs, batch)
    check(found, channel_scan_by_definition(*inputs, batch), inputs[-1], batch)


@settings(max_examples=60, deadline=None)
@DRAWN
@pytest.mark.parametrize(("bias", "silu"), [(False, True), (True, True), (True, False)])
def test_convolution_is_its_definition(
    kernels: StateKernels,
    bias: bool,
    silu: bool,
    sizes: Sizes,
    batch: StateBatch,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    inputs = conv_inputs(sizes, batch, dtype, bias=bias, silu=silu)
    found = left_by(kernels.causal_conv, inputs, batch)
    check(found, conv_by_definition(*inputs, batch), inputs[-1], batch)


LENGTHS = (1, 9, 100, 1, 30)
TOGETHER = StateBatch(np.array(LENGTHS), np.array([0, 2, 6, 4, 6]), np.array([1, 2, 3, 4, 5]))
"""Sequences in one batch, two of which share a source."""
KERNELS: dict[str, Callable[[StateBatch], Inputs]] = {
    "causal_conv": (lambda batch: conv_inputs(SIZES[1], batch, torch.bfloat16, bias=True)),
    "gated_delta_rule": (lambda batch: delta_rule_inputs(SIZES[1], batch, torch.bfloat16)),
    "selective_scan": (lambda batch: scan_inputs(SIZES[1], batch, torch.bfloat16)),
    "channel_scan": (lambda batch: channel_scan_inputs(SIZES[1], batch, torch.bfloat16)),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_bits_depend_on_no_other_sequence_and_no_thread(
    kernels: StateKernels, name: str, num_threads: int
) -> None:
    kernel: Callable[..., torch.Tensor] = getattr(kernels, name)
    inputs = KERNELS[name](TOGETHER)
    with threads(3):
        wanted = left_by(kernel, inputs, TOGETHER)
    pool, outputs = inputs[-1].clone(), []
    for i, start in enumerate(TOGETHER.starts):
        tokens = slice(start, start + LENGTHS[i])
        alone = StateBatch(
            *(column[i : i + 1] for column in (TOGETHER.query_lens, TOGETHER.sources, TOGETHER.targets))
        )
        with threads(num_threads):
            outputs.append(kernel(inputs[0].of_tokens(tokens), pool, alone))
    assert torch.equal(torch.cat(outputs), wanted.output)
    assert torch.equal(pool[1:6], wanted.pool[1:6])


@pytest.mark.parametrize("name", KERNELS)
def test_bits_depend_on_no_step(kernels: StateKernels, name: str) -> None:
    """A prompt gives the same bits in one step, in steps of any size, and token by token."""
    kernel: Callable[..., torch.Tensor] = getattr(kernels, name)
    inputs = KERNELS[name](TOGETHER)
    whole = StateBatch(np.array([sum(LENGTHS)]), np.array([0]), np.array([1]))
    wanted = left_by(kernel, inputs, whole)
    for steps in (LENGTHS, (1,) * sum(LENGTHS)):
        pool, outputs, done = inputs[-1].clone(), [], 0
        for count in steps:
            step = StateBatch(np.array([count]), np.array([min(done, 1)]), np.array([1]))
            tokens = slice(done, done + count)
            outputs.append(kernel(inputs[0].of_tokens(tokens), pool, step))
            done += count
        assert torch.equal(torch.cat(outputs), wanted.output)
        assert torch.equal(pool[1], wanted.pool[1])


def test_torch_computes_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(selection, "state_kernels", state_kernels.__wrapped__)  # what it remembers stays
    assert select_state_ops.__wrapped__(torch.device("cpu")) is torch_states
    assert "no C++ compiler found (no-such-compiler)" in caplog.text


def test_compiled_code_is_chosen_on_a_cpu(kernels: StateKernels) -> None:
    assert select_state_ops(torch.device("cpu")) is kernels
    assert select_state_ops(torch.device("meta")) is torch_states
