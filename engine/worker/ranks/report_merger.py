"""Merges the outputs of a model's ranks for one step. Every rank transfers its part of each KV block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from engine.core.outputs import ModelRunnerOutput


class ReportMerger:
    """Merges outputs. A load has ended only when it has ended on every rank, possibly in different steps."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._num_reports: Counter[int] = Counter()
        self._failed: set[int] = set()

    def merge(self, outputs: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
        """``outputs``: one per rank; the first is the first rank's, which has sampled."""
        if not any(output.finished_loads or output.failed_loads for output in outputs):
            return outputs[0]
        ended: list[int] = []
        for output in outputs:
            self._failed.update(output.failed_loads)
            for load_id in (*output.finished_loads, *output.failed_loads):
                self._num_reports[load_id] += 1
                if self._num_reports[load_id] == self._num_ranks:
                    ended.append(load_id)
                    del self._num_reports[load_id]
        failed = [load_id for load_id in ended if load_id in self._failed]
        self._failed.difference_update(failed)
        finished = [load_id for load_id in ended if load_id not in failed]
        return replace(outputs[0], finished_loads=finished, failed_loads=failed)
