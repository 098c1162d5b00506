"""How many agents at once keep the SLO of ``continuum fit``."""

from __future__ import annotations

from typing import TextIO

import msgspec

from eval.fit.memory import BLOCK_SIZE
from eval.report.metrics import TTFT_LIMIT_S, RunResult
from eval.report.slo import Slo
from eval.sim.agents import most_that_keep
from eval.sim.simulate import Hardware, SimulationPlan, SimulationRun, simulate_one
from eval.workloads.arrivals import ArrivalKind
from eval.workloads.sampling import JobLimits

GAP_CAP_S = 600.0
SEED = 0


class Tried(msgspec.Struct, kw_only=True):
    """One simulation."""

    agents: int
    return_p95_s: float
    """Time to first token that 95 of 100 returning turns have."""
    first_p95_s: float
    """Time to first token that 95 of 100 first turns have."""
    jobs_per_hour: float | None


class AgentsAtSlo(msgspec.Struct, kw_only=True):
    """The most agents that kept the SLO, and what was tried."""

    agents: int
    """0 if not even one did."""
    tried: list[Tried]
    """The simulations, fewest agents first."""
    notes: list[str]
    """What the simulation of that number measured and assumed."""


def agents_at_slo(
    hardware: Hardware,
    workload: str,
    *,
    policy: str,
    context: int,
    return_s: float,
    first: int,
    jobs_per_agent: int,
    host_kv_tokens: int,
    progress: TextIO,
) -> AgentsAtSlo:
    """Searches in a closed loop: an agent begins its next job when one has ended. ``context`` and
    ``host_kv_tokens`` are in tokens, ``return_s`` in seconds. UsageError if no turn of a job returns."""
    slo = Slo({"return": return_s}).with_first(TTFT_LIMIT_S)
    runs: dict[int, RunResult] = {}

    def keeps(agents: int) -> bool:
        print(f"simulating {agents:,} agents", file=progress, flush=True)
        plan = SimulationPlan(
            workload=workload,
            num_jobs=jobs_per_agent * agents,
            limits=JobLimits(max_context_tokens=context - BLOCK_SIZE, gap_cap_s=GAP_CAP_S),
            arrivals=ArrivalKind.CLOSED,
            concurrency=agents,
            hardware=hardware,
            host_kv_tokens=host_kv_tokens,
            block_size=BLOCK_SIZE,
        )
        runs[agents] = simulate_one(plan, SimulationRun(policy, None, SEED, detail=False))
        slo.check_measured([runs[agents]])
        return slo.is_kept([runs[agents]])

    most = most_that_keep(keeps, first)
    tried = [_tried(agents, run, slo) for agents, run in sorted(runs.items())]
    notes = [*runs[most].notes, "one seed: no confidence interval"] if most else []
    return AgentsAtSlo(agents=most, tried=tried, notes=notes)


def _tried(agents: int, run: RunResult, slo: Slo) -> Tried:
    waits_s = slo.waits_s([run])
    return_s = waits_s["return"]
    first_s = waits_s["first"]
    assert return_s is not None, "it was checked"
    assert first_s is not None, "it was checked"
    return Tried(agents=agents, return_p95_s=return_s, first_p95_s=first_s, jobs_per_hour=run.jobs_per_hour)
