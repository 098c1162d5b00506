"""Layers with states in Triton's interpreter, and compiled for a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from benchmarks.gpu.measures.closeness import LIMITS, row_error
from engine.worker.gpu import triton_states
from engine.worker.gpu.state_chunks import kernels, prepare
from engine.worker.gpu.state_chunks.table import table_on
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
CHUNKED = StateBatch(
    np.array([1, 64, 200, 3, 65, 63]), np.array([0, 2, 6, 4, 6, 0]), np.array([1, 2, 3, 4, 5, 7])
)
"""Sequences token by token, and some by chunks: a whole chunk, less and more."""
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
    conv, pool = conv_inputs(SIZES[1], BATCH, torch.float32, bias=False, silu=silu)
    other = pool.clone()
    found = TritonStates().causal_conv(conv, pool, BATCH)
    torch.testing.assert_close(found, torch_states.causal_conv(conv, other, BATCH))
    torch.testing.assert_close(pool, other, equal_nan=True)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_may_be_bf16(name: str) -> None:
    """The roundings agree nearly: the interpreter truncates bf16 where a GPU rounds to the nearest."""
    torch.manual_seed(2)
    inputs = LAYERS[name](SIZES[1], BATCH, torch.bfloat16)
    wanted = getattr(torch_states, name)(*inputs[:-1], inputs[-1].clone(), BATCH).float()
    found = getattr(TritonStates(), name)(*inputs[:-1], inputs[-1].clone(), BATCH).float()
    assert (found - wanted).norm() < 0.01 * wanted.norm()


def by_chunks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    for kinds in ("_IN_CHUNKS", "_SCANS_IN_CHUNKS"):
        monkeypatch.setattr(triton_states, kinds, {dtype})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [Sizes(1, 2, 12, 24), Sizes(2, 4, 32, 48)], ids=str)
@pytest.mark.parametrize("name", ["gated_delta_rule", "selective_scan"])
def test_prompts_by_chunks(
    name: str, sizes: Sizes, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of outputs and states are right, here also in fp32; slots that no sequence has stay NaN."""
    by_chunks(monkeypatch, dtype)
    torch.manual_seed(3)
    inputs = LAYERS[name](sizes, CHUNKED, dtype)
    found, wanted = inputs[-1].clone(), inputs[-1].clone()
    output = getattr(TritonStates(), name)(*inputs[:-1], found, CHUNKED)
    expected = getattr(torch_states, name)(*inputs[:-1], wanted, CHUNKED)
    assert torch.equal(found.isnan(), wanted.isnan())
    limit = LIMITS[dtype]
    assert row_error(output, expected) < limit
    used = CHUNKED.targets
    assert row_error(found[used].flatten(1), wanted[used].flatten(1)) < LIMITS[dtype]


def test_chunks_of_strong_and_of_no_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logarithms down to -20 a token, and equal keys without decay: there, powers would overflow."""
    by_chunks(monkeypatch, torch.float32)
    torch.manual_seed(4)
    rule, pool = delta_rule_inputs(Sizes(1, 2, 16, 16), CHUNKED, torch.float32)
    g = -20 * torch.rand_like(rule.g)
    g[::3] = 0
    _check("gated_delta_rule", (rule._replace(g=g), pool))
    scan, scan_pool = scan_inputs(Sizes(1, 2, 16, 16), CHUNKED, torch.float32)
    _check("selective_scan", (scan._replace(a=-20 * torch.rand_like(scan.a)), scan_pool))
    equal = rule.k[:1].expand_as(rule.k)
    lasting = torch.zeros_like(g)
    _check("gated_delta_rule", (rule._replace(k=equal, g=lasting, beta=torch.ones_like(rule.beta)), pool))


def _check(name: str, inputs: Inputs) -> None:
    found, wanted = inputs[-1].clone(), inputs[-1].clone()
    output = getattr(TritonStates(), name)(*inputs[:-1], found, CHUNKED)
    expected = getattr(torch_states, name)(*inputs[:-1], wanted, CHUNKED)
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_one_launch_has_what_its_table_says() -> None:
    """Short sequences come first, then chunks of the others in the order of their tokens."""
    table = table_on(CHUNKED, torch.device("cpu"))
    assert table.num_short == 2
    assert table.sequences.tolist() == [
        [0, 1, 0, 1, 0, 0],
        [265, 3, 4, 4, 5, 0],
        [1, 64, 2, 2, 0, 1],
        [65, 200, 6, 3, 1, 4],
        [268, 65, 6, 5, 5, 2],
        [333, 63, 0, 7, 7, 1],
    ]
    firsts = [(1, 64), (65, 64), (129, 64), (193, 64), (257, 8), (268, 64), (332, 1), (333, 63)]
    assert table.chunks.tolist() == [list(row) for row in firsts]


@pytest.mark.slow
def test_chunks_fit_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes of Qwen3-Next and Granite 4 nothing is spilled, and two programs share a processor."""
    recorders = []
    for module, kernel in (
        (kernels, "states_before_chunks"),
        (kernels, "outputs_of_chunks"),
        (prepare, "prepare_delta"),
        (prepare, "prepare_scan"),
    ):
        recorders.append(LaunchRecorder(getattr(module, kernel)))
        monkeypatch.setattr(module, kernel, recorders[-1])
    by_chunks(monkeypatch, torch.bfloat16)
    prompt = StateBatch(np.array([64]), np.array([0]), np.array([1]))
    for name, sizes in (
        ("gated_delta_rule", Sizes(16, 32, 128, 128)),
        ("selective_scan", Sizes(1, 64, 128, 64)),
    ):
        getattr(TritonStates(), name)(*LAYERS[name](sizes, prompt, torch.bfloat16), prompt)
    for used in compile_all_for_sm90([build for each in recorders for build in each.builds]):
        assert used.spill_bytes == 0
        assert used.shared_bytes < 99 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_it_fits_a_hopper_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes of Qwen3-Next nothing is spilled."""
    kernel = f"_{name}"
    recorder = LaunchRecorder(getattr(triton_states, kernel))
    monkeypatch.setattr(triton_states, kernel, recorder)
    inputs = LAYERS[name](Sizes(16, 32, 128, 128), BATCH, torch.bfloat16)
    getattr(TritonStates(), name)(*inputs, BATCH)
    for used in compile_all_for_sm90(recorder.builds):
        assert used.spill_bytes == 0
