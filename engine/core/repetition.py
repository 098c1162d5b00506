"""Detects an output that repeats itself: V1's ``check_sequence_repetition``."""

from __future__ import annotations

from collections.abc import Sequence

from engine.records.sampling_params import RepetitionDetection


def ends_in_repetition(token_ids: Sequence[int], num_output: int, detection: RepetitionDetection) -> bool:
    """Whether ``token_ids`` end with a pattern, repeated as often as ``detection`` says.

    ``num_output``: how many of the last tokens are checked.
    """
    shortest = max(1, detection.min_pattern_size)
    longest = min(detection.max_pattern_size, num_output // detection.min_count)
    return any(_is_repeated(token_ids, size, detection.min_count) for size in range(shortest, longest + 1))


def _is_repeated(token_ids: Sequence[int], size: int, count: int) -> bool:
    """Whether the last ``size * count`` tokens are the same ``size`` tokens ``count`` times."""
    compared = range(1, size * (count - 1) + 1)
    return all(token_ids[-place] == token_ids[-place - size] for place in compared)
