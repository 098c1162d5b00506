"""Linears of one row, in Triton's interpreter and compiled for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from engine.worker.gpu import triton_rows
from engine.worker.gpu.torch_ops import TorchOps
from engine.worker.gpu.triton_ops import TritonOps
from tests.worker.gpu.sm90 import LaunchRecorder, compile_all_for_sm90

SHAPES = ((64, 512), (7, 2048), (33, 80), (520, 1100), (5, 4096))
"""Outputs and inputs: with full tiles, and with partial ones."""


def random_case(
    outputs: int, inputs: int, *, bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(1, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    return x, weight, torch.randn(outputs, generator=generator) if bias else None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_is_that_of_a_gemm(outputs: int, inputs: int, bias: bool) -> None:
    case = random_case(outputs, inputs, bias=bias)
    torch.testing.assert_close(TritonOps().linear_of_row(*case), TorchOps().linear_of_row(*case))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_gates_are_opened_on_the_way(outputs: int, inputs: int, bias: bool) -> None:
    case = random_case(2 * outputs, inputs, bias=bias)
    torch.testing.assert_close(TritonOps().swiglu_of_row(*case), TorchOps().swiglu_of_row(*case))


@pytest.mark.slow
def test_they_stay_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linears of Llama-3.1-8B stay in registers."""
    recorder = LaunchRecorder(triton_rows._linear_of_row)
    monkeypatch.setattr(triton_rows, "_linear_of_row", recorder)
    for outputs, inputs, gated in ((6144, 4096, False), (28672, 4096, True), (4096, 14336, False)):
        x, weight = (torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta") for rows in (1, outputs))
        triton_rows.linear_of_row(x, weight, None, gated=gated)
    assert len(recorder.builds) == 3
    for used in compile_all_for_sm90(recorder.builds):
        assert used.spill_bytes == 0
