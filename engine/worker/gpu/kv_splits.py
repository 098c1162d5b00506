"""KV splits (Flash-Decoding): chooses how many parts the KV of a sequence is split into, and keeps scratch
memory for the partial results.

Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """The split of one launch."""

    number: int
    """Number of parts, a power of two if there are no others; 1: not split."""
    min_part: int
    """The fewest tokens of KV per part, except the last: a short sequence has fewer parts."""
    scratch: SplitScratch
    num_others: int = 0
    """Parts of another launch that are merged with these: one attends to a prefix, one to the rest."""
    first: int = 0
    """Index of the first part among all of them."""

    @property
    def total(self) -> int:
        """Parts that are merged, a power of two."""
        return self.number + self.num_others

    def target(self, output: torch.Tensor) -> torch.Tensor:
        """The tensor that programs write to: ``output``, or scratch memory that is merged into it."""
        return output if self.total == 1 else self.scratch.partial


@dataclass(frozen=True, slots=True)
class KvSplitter:
    """Chooses the number of parts for one kind of launch."""

    scratch: SplitScratch
    enough_programs: int
    """The number of programs that keeps the device busy."""
    worth_it: int
    """The fewest tokens of KV that justify merging another part, if there are too few programs."""
    too_many: int
    """Tokens of KV that one program should not read alone, even if there are enough programs."""

    @classmethod
    def for_few_queries(cls, scratch: SplitScratch, num_processors: int) -> KvSplitter:
        """For decode. Each processor runs several programs that wait for memory. Lengths differ, and a long
        sequence should not be left to a few programs after the others have ended. Two programs per processor
        keep an H200's memory as busy as more would, with less to merge."""
        return cls(scratch, 2 * num_processors, worth_it=128, too_many=16384)

    @classmethod
    def for_prompts(cls, scratch: SplitScratch, num_processors: int) -> KvSplitter:
        """For prefill. One program fills a processor and has many results, which splits write and reread."""
        return cls(scratch, num_processors, worth_it=1024, too_many=2**20)

    def choose(self, *, num_programs: int, num_rows: int, longest: int) -> Splits:
        """num_programs: without splits; num_rows: (token, head) rows, each with a result per part; longest:
        most tokens of KV read for a sequence; in a CUDA graph, the most that may ever be"""
        min_part = self._min_part(num_programs)
        wanted = max(_ratio(self.enough_programs, num_programs), _ratio(longest, self.too_many))
        number = min(_power_above(wanted), _power_above(_ratio(longest, min_part)), MAX_SPLITS)
        return Splits(min(number, self._possible(num_rows) or 1), min_part, self.scratch)

    def choose_beside_prefix(
        self, *, num_programs: int, num_rows: int, longest: int
    ) -> tuple[Splits, Splits] | None:
        """Splits for the tokens after a shared prefix, see ``choose``, and for the prefix, whose queries fill
        few tiles: it gets all other possible parts. None if scratch memory is too small for both."""
        total = min(MAX_SPLITS, self._possible(num_rows))
        if total < 2:
            return None
        chosen = self.choose(num_programs=num_programs, num_rows=num_rows, longest=longest)
        number = min(chosen.number, total // 2)
        others = total - number
        of_prefix = Splits(others, self.worth_it, self.scratch, num_others=number, first=number)
        return replace(chosen, number=number, num_others=others), of_prefix

    def _min_part(self, num_programs: int) -> int:
        """If there are enough programs, only sequences far longer than the rest are worth splitting."""
        return self.too_many // 4 if num_programs >= self.enough_programs else self.worth_it

    def _possible(self, num_rows: int) -> int:
        """The most parts for ``num_rows`` rows that fit in scratch memory, a power of two, or 0."""
        possible = len(self.scratch) // num_rows
        return 1 << possible.bit_length() - 1 if possible else 0


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
