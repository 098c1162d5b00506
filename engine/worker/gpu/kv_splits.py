"""Into how many parts the KV of a step's sequences is split, and where the results of the parts wait.

Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_SPLITS = 32
SCRATCH_BYTES = 64 * 2**20
INTERPRETED_PROCESSORS = 4
"""Stand for those of a GPU where kernels are interpreted."""


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Results of parts. Made once: a CUDA graph holds its address."""

    partial: torch.Tensor
    """[num_places, head_dim] fp32"""
    log_sums: torch.Tensor
    """[num_places] fp32"""

    @classmethod
    def allocate(cls, head_dim: int, device: torch.device) -> SplitScratch:
        num_places = SCRATCH_BYTES // (4 * (head_dim + 1))
        partial = torch.empty((num_places, head_dim), dtype=torch.float32, device=device)
        return cls(partial, torch.empty(num_places, dtype=torch.float32, device=device))

    def __len__(self) -> int:
        return len(self.log_sums)


@dataclass(frozen=True, slots=True)
class Splits:
    """The parts of one launch."""

    number: int
    """A power of two; 1: nothing is split."""
    min_part: int
    """Tokens of KV that each part but the last has: a short sequence has fewer parts."""
    scratch: SplitScratch

    def target(self, output: torch.Tensor) -> torch.Tensor:
        """Where programs put their results, of which ``output`` is to be made."""
        return output if self.number == 1 else self.scratch.partial


@dataclass(frozen=True, slots=True)
class KvSplitter:
    """Chooses the number of parts for one kind of launch."""

    scratch: SplitScratch
    enough_programs: int
    """To keep the device busy."""
    worth_it: int
    """Tokens of KV of a part that are worth its merging, if programs are too few."""
    too_many: int
    """Tokens of KV that one program should not read alone, however many programs there are."""

    @classmethod
    def for_few_queries(cls, scratch: SplitScratch, num_processors: int) -> KvSplitter:
        """Several programs wait for memory at a time on each processor; lengths differ, and the parts of a
        long sequence should not be read by few while the others have ended."""
        return cls(scratch, 4 * num_processors, worth_it=128, too_many=16384)

    @classmethod
    def for_prompts(cls, scratch: SplitScratch, num_processors: int) -> KvSplitter:
        """One program fills a processor, and has many results: those of parts are written and read again."""
        return cls(scratch, num_processors, worth_it=1024, too_many=2**20)

    def choose(self, *, num_programs: int, num_rows: int, longest: int) -> Splits:
        """num_programs: without splits; num_rows: heads of tokens, of which each part has a result; longest:
        tokens of KV that are read for a sequence, in a CUDA graph those that may ever be"""
        enough = num_programs >= self.enough_programs
        wanted = max(_ratio(self.enough_programs, num_programs), _ratio(longest, self.too_many))
        # Where programs are enough, only what is far longer than the rest should pay for its merging.
        min_part = self.too_many // 4 if enough else self.worth_it
        possible = max(1, len(self.scratch) // num_rows)
        number = min(_power_above(wanted), _power_above(_ratio(longest, min_part)), MAX_SPLITS)
        return Splits(min(number, 1 << possible.bit_length() - 1), min_part, self.scratch)


def count_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return INTERPRETED_PROCESSORS


def _ratio(numerator: int, denominator: int) -> int:
    """Rounded up."""
    return -(-numerator // denominator)


def _power_above(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
