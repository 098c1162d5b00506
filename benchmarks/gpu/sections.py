"""The sections of a run, in order: what each shows, and its time limit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run, in a separate process."""

    name: str
    shows: str
    limit_s: float
    must_be_done: bool = False
    """The section shows correctness: a run without it proves nothing."""


SECTIONS = (
    Section("rates", "copy and matmul rates of the device, which the floors are made of", 40),
    Section("kernels", "every kernel against fp32 or fp64 references", 200, must_be_done=True),
    Section("equality", "greedy tokens of whole models against transformers", 160, must_be_done=True),
    Section("steps", "decode and prefill of Llama-3.1-8B, step by step", 110),
    Section("idle", "how long the device waits for the host between steps", 80),
    Section("throughput", "256 requests to Qwen3-0.6B, and transformers' own continuous batching", 150),
    Section("host-tier", "a history loaded back from host memory, and recomputed", 90),
)
NAMES = tuple(section.name for section in SECTIONS)
RATES = SECTIONS[0]
