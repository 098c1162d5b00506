"""KV splits (Flash-Decoding): how many parts the KV of a sequence is split into, and scratch memory for the
partial results.

Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_SPLITS = 32
SCRATCH_BYTES = 64 * 2**20
INTERPRETED_PROCESSORS = 4
"""Number of processors assumed where kernels run in Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Scratch memory for partial results. Allocated once: CUDA graphs hold its address."""

    partial: torch.Tensor
    """[num_places, head_dim] fp32."""
    log_sums: torch.Tensor
    """[num_places] fp32."""

    @classmethod
    def allocate(cls, head_dim: int, device: torch.device) -> SplitScratch:
        num_places = SCRATCH_BYTES // (4 * (head_dim + 1))
        partial = torch.empty((num_places, head_dim), dtype=torch.float32, device=device)
        return cls(partial, torch.empty(num_places, dtype=torch.float32, device=device))

    def __len__(self) -> int:
        return len(self.log_sums)


@dataclass(frozen=True, slots=True)
class Splits:
    """How one launch is split."""

    number: int
    """Number of parts, a power of two; 1: not split."""
    min_part: int
    """Least tokens of KV per part, except the last: a short sequence has fewer parts."""
    scratch: SplitScratch

    def target(self, output: torch.Tensor) -> torch.Tensor:
        """Where programs write their results: ``output``, or scratch memory that is merged into it."""
        return output if self.number == 1 else self.scratch.partial


@dataclass(frozen=True, slots=True)
class KvSplitter:
    """Chooses the number of parts for one kind of launch."""

    scratch: SplitScratch
    enough_programs: int
    """Number of programs that keeps the device busy."""
    worth_it: int
    """Least tokens of KV that justify merging another part, if there are too few programs."""
    too_many: int
    """Tokens of KV that one program should not read alone, even if there are enough programs."""

    @classmethod
    def for_few_queries(cls, scratch: SplitScratch, num_processors: int) -> KvSplitter:
        """For decode. Each processor runs several programs that wait for memory; lengths differ, and a long
        sequence should not be left to a few programs after the others have ended. Two programs for each
        processor keep an H200's memory as busy as more would, with less to merge."""
        return cls(scratch, 2 * num_processors, worth_it=128, too_many=16384)

    @classmethod
    def for_prompts(cls, scratch: SplitScratch, num_processors: int) -> KvSplitter:
        """For prefill. One program fills a processor and has many results, which splits write and reread."""
        return cls(scratch, num_processors, worth_it=1024, too_many=2**20)

    def choose(self, *, num_programs: int, num_rows: int, longest: int) -> Splits:
        """num_programs: without splits; num_rows: (token, head) rows, each with a result per part; longest:
        most tokens of KV read for a sequence; in a CUDA graph, the most that may ever be"""
        enough = num_programs >= self.enough_programs
        wanted = max(_ratio(self.enough_programs, num_programs), _ratio(longest, self.too_many))
        # If there are enough programs, only sequences far longer than the rest are worth splitting.
        min_part = self.too_many // 4 if enough else self.worth_it
        possible = max(1, len(self.scratch) // num_rows)
        number = min(_power_above(wanted), _power_above(_ratio(longest, min_part)), MAX_SPLITS)
        return Splits(min(number, 1 << possible.bit_length() - 1), min_part, self.scratch)


def count_processors(device: torch.device) -> int:
    """Number of streaming multiprocessors of a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return INTERPRETED_PROCESSORS


def _ratio(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def _power_above(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
