"""A cell of the grid: one workload at one load on one tier, under every policy. Arithmetic on its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.load.records import told
from eval.report.intervals import Estimate, ratio_interval
from eval.report.metrics import RunResult
from eval.trace.analysis.distribution import Distribution

BASELINE = "fcfs"
SHORT_SHARE = 0.1
"""Memory is short if fcfs recomputes more than this share of all prompt tokens."""

Measure = Callable[[RunResult], float]


def mean_jct_s(run: RunResult) -> float:
    return _jct(run).mean


def p95_jct_s(run: RunResult) -> float:
    return _jct(run).p95


def p99_jct_s(run: RunResult) -> float:
    return _jct(run).p99


def max_jct_s(run: RunResult) -> float:
    return _jct(run).max


def returning_p99_s(run: RunResult) -> float:
    """Returns the p99 time to first token of the turns that return from a tool; 0 without any."""
    return 0.0 if run.returning_ttft_s is None else run.returning_ttft_s.p99


def first_wait_s(run: RunResult) -> float:
    """Returns the longest time to first token of any job's first turn; 0 without any."""
    return 0.0 if run.first_ttft_s is None else run.first_ttft_s.max


def _jct(run: RunResult) -> Distribution:
    assert run.job_completion_s is not None, "a simulation ends with all jobs"
    return run.job_completion_s


@dataclass(frozen=True, slots=True)
class Cell:
    """The results of every policy on the same jobs."""

    traffic: str
    jobs_per_s: float
    host_tier: bool
    runs: dict[str, list[RunResult]]
    """Runs by policy; seeds in order."""

    @property
    def title(self) -> str:
        tier = "with a host tier" if self.host_tier else "without a host tier"
        return f"{self.traffic} at {self.jobs_per_s:g} jobs/s {tier}"

    @property
    def again_share(self) -> float:
        """Returns the share of all prompt tokens that fcfs recomputes."""
        runs = self.runs[BASELINE]
        return sum(told(run.recomputed_tokens) for run in runs) / sum(run.prompt_tokens for run in runs)

    @property
    def is_short(self) -> bool:
        return self.again_share > SHORT_SHARE

    def ratio(self, policy: str, measure: Measure, base: str = BASELINE) -> Estimate | None:
        """Returns the ratio to ``base``, paired by seed; below 1 the policy is better. None without pairs."""
        pairs = zip(self.runs[base], self.runs[policy], strict=True)
        return ratio_interval([(measure(before), measure(after)) for before, after in pairs])


def grid_ratio(
    cells: Sequence[Cell], policy: str, base: str = BASELINE, measure: Measure = mean_jct_s
) -> Estimate:
    """Returns a policy's grid mean of JCT (or another measure that is never 0), over that of ``base``.

    The mean per seed is geometric over all cells, so that each cell counts alike however long its jobs take.
    """
    num_seeds = len(cells[0].runs[base])
    pairs = [
        (_grid_mean_s(cells, base, seed, measure), _grid_mean_s(cells, policy, seed, measure))
        for seed in range(num_seeds)
    ]
    estimate = ratio_interval(pairs)
    assert estimate is not None
    return estimate


def tier_ratio(cells: Sequence[Cell], policy: str) -> Estimate | None:
    """Returns a policy's mean JCT with a host tier over that without, for loads that ran on both tiers; None
    without any."""
    hosted = {(cell.traffic, cell.jobs_per_s): cell for cell in cells if cell.host_tier}
    bare = [cell for cell in cells if not cell.host_tier and (cell.traffic, cell.jobs_per_s) in hosted]
    if not bare:
        return None
    both = [hosted[cell.traffic, cell.jobs_per_s] for cell in bare]
    seeds = range(len(bare[0].runs[policy]))
    return ratio_interval(
        [(_grid_mean_s(bare, policy, seed), _grid_mean_s(both, policy, seed)) for seed in seeds]
    )


def _grid_mean_s(cells: Sequence[Cell], policy: str, seed: int, measure: Measure = mean_jct_s) -> float:
    return math.exp(math.fsum(math.log(measure(cell.runs[policy][seed])) for cell in cells) / len(cells))
