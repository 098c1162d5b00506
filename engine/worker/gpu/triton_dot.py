"""The matrix multiplication of all Triton kernels here."""

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
