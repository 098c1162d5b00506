"""Layers with states in Triton's interpreter, and compiled for a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.worker.gpu import triton_states
from engine.worker.gpu.triton_states import TritonStates
from engine.worker.states import torch_states
from engine.worker.states.state_batch import StateBatch
from tests.worker.gpu.sm90 import LaunchRecorder, compile_all_for_sm90
from tests.worker.states.definitions import (
    SIZES,
    Inputs,
    Sizes,
    conv_inputs,
    delta_rule_inputs,
    scan_inputs,
)

BATCH = StateBatch(np.array([1, 2, 20, 3, 17]), np.array([0, 2, 6, 4, 6]), np.array([1, 2, 3, 4, 5]))
"""New, in place, and two that share a source; steps shorter than a convolution's width, and longer ones."""
Make = Callable[[Sizes, StateBatch, torch.dtype], Inputs]
LAYERS: dict[str, Make] = {
    "causal_conv": lambda *case: conv_inputs(*case, bias=True),
    "gated_delta_rule": delta_rule_inputs,
    "selective_scan": scan_inputs,
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sizes", SIZES[1:4], ids=str)
def test_numbers_are_those_of_torch(name: str, sizes: Sizes) -> None:
    """Slots that no sequence has are NaN before and after."""
    torch.manual_seed(0)
    inputs = LAYERS[name](sizes, BATCH, torch.float32)
    found, wanted = inputs[-1].clone(), inputs[-1].clone()
    output = getattr(TritonStates(), name)(*inputs[:-1], found, BATCH)
    torch.testing.assert_close(
        output, getattr(torch_states, name)(*inputs[:-1], wanted, BATCH), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("silu", [False, True])
def test_a_convolution_without_bias_and_with_silu(silu: bool) -> None:
    torch.manual_seed(1)
    x, weight, _, pool = conv_inputs(SIZES[1], BATCH, torch.float32, bias=False)
    other = pool.clone()
    found = TritonStates().causal_conv(x, weight, None, pool, BATCH, silu=silu)
    torch.testing.assert_close(found, torch_states.causal_conv(x, weight, None, other, BATCH, silu=silu))
    torch.testing.assert_close(pool, other, equal_nan=True)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_may_be_bf16(name: str) -> None:
    """Nearly: the interpreter cuts bf16 off where a GPU rounds to the nearest."""
    torch.manual_seed(2)
    inputs = LAYERS[name](SIZES[1], BATCH, torch.bfloat16)
    wanted = getattr(torch_states, name)(*inputs[:-1], inputs[-1].clone(), BATCH).float()
    found = getattr(TritonStates(), name)(*inputs[:-1], inputs[-1].clone(), BATCH).float()
    assert (found - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_it_fits_a_hopper_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-Next's sizes: nothing is spilled."""
    kernel = f"_{name}"
    recorder = LaunchRecorder(getattr(triton_states, kernel))
    monkeypatch.setattr(triton_states, kernel, recorder)
    inputs = LAYERS[name](Sizes(16, 32, 128, 128), BATCH, torch.bfloat16)
    getattr(TritonStates(), name)(*inputs, BATCH)
    for used in compile_all_for_sm90(recorder.builds):
        assert used.spill_bytes == 0
