"""Whether steps can be compiled where the tests run."""

from __future__ import annotations

import torch

from engine.worker.cpu.attention_kernel import CpuKernel
from engine.worker.cpu.kernels.library import KernelUnavailable


def has_compiled_steps() -> bool:
    """Compiled steps need a compiler and a CPU that multiplies pairs of bf16."""
    try:
        return hasattr(CpuKernel.load(32, torch.bfloat16).library, "continuum_run_step")
    except KernelUnavailable:
        return False
