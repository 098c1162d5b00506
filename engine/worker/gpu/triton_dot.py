"""Functions that all Triton kernels here share: the matrix multiplication, and rounding like torch's."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right, sums):
    """left @ right + sums, in fp32. Triton's interpreter has no bf16 and would multiply the bits."""
    if _INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def rounded(x, like):
    """x in fp32, rounded to the type that ``like`` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def gated_by_gelu(gate, up, like):
    """gelu(gate) * up in fp32, rounded in between to the type that ``like`` points to. By GELU's tanh form,
    in which (1 + tanh(y)) / 2 = sigmoid(2 * y)."""
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return rounded(gate / (1.0 + tl.exp(-inner)), like) * up


@triton.jit
def gated_by_silu(gate, up, like):
    """silu(gate) * up in fp32, rounded in between to the type that ``like`` points to."""
    return rounded(gate / (1.0 + tl.exp(-gate)), like) * up
