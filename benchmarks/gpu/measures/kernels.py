"""Section ``kernels``: checks each kernel against its definition in fp32 or fp64, in real models' shapes."""

from __future__ import annotations

from benchmarks.gpu.measures import (
    draws,
    experts,
    fused_ops,
    host_copies,
    latents,
    paged_attention,
    rows,
    shared_prefix,
    states,
)
from benchmarks.gpu.measures.bench import Bench


def run(bench: Bench) -> None:
    for part in (
        paged_attention,
        shared_prefix,
        latents,
        experts,
        rows,
        fused_ops,
        states,
        draws,
        host_copies,
    ):
        part.check(bench)
