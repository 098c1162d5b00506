"""How many agents at once keep an SLO: simulates more and more of them until it breaks."""

from __future__ import annotations

from typing import TextIO

import msgspec

from eval.fit.memory import BLOCK_SIZE
from eval.sim.simulate import Hardware, SimulationPlan, SimulationRun, simulate_one
from eval.workloads.arrivals import ArrivalKind
from eval.workloads.sampling import JobLimits

JOBS_PER_AGENT = 3
"""Jobs that each agent runs one after another, so that most of a run is at full load."""
MAX_AGENTS = 4096
GAP_CAP_S = 600.0


class Tried(msgspec.Struct, kw_only=True):
    """One simulation."""

    agents: int
    return_p95_s: float | None
    """Time to first token that 95 of 100 returning turns have; None if no turn returned."""
    jobs_per_hour: float | None


class AgentsAtSlo(msgspec.Struct, kw_only=True):
    """The most agents that kept the SLO, and what was tried."""

    agents: int
    """0 if not even one did."""
    tried: list[Tried]
    """The simulations, fewest agents first."""
    notes: list[str]
    """What the simulation measured and assumed."""


def agents_at_slo(
    hardware: Hardware,
    workload: str,
    *,
    policy: str,
    context: int,
    return_s: float,
    first: int,
    num_jobs: int | None,
    host_kv_tokens: int,
    progress: TextIO,
) -> AgentsAtSlo:
    """Doubles or halves the number of agents from ``first`` on until the SLO breaks or holds, then bisects
    until the two are within a tenth. An agent begins its next job when one has ended. ``context`` and
    ``host_kv_tokens`` are in tokens, ``return_s`` in seconds."""
    tried: dict[int, Tried] = {}
    notes: list[str] = []

    def keeps(agents: int) -> bool:
        if agents not in tried:
            print(f"simulating {agents:,} agents", file=progress, flush=True)
            plan = SimulationPlan(
                workload=workload,
                num_jobs=num_jobs or JOBS_PER_AGENT * agents,
                limits=JobLimits(max_context_tokens=context - BLOCK_SIZE, gap_cap_s=GAP_CAP_S),
                arrivals=ArrivalKind.CLOSED,
                concurrency=agents,
                hardware=hardware,
                host_kv_tokens=host_kv_tokens,
                block_size=BLOCK_SIZE,
            )
            tried[agents] = _simulated(plan, policy, agents, notes)
        waited_s = tried[agents].return_p95_s
        return waited_s is None or waited_s <= return_s

    good, bad = 0, MAX_AGENTS + 1
    agents = min(first, MAX_AGENTS)
    while good < agents < bad:
        if keeps(agents):
            good = agents
            agents = min(2 * agents, MAX_AGENTS)
        else:
            bad = agents
            agents //= 2
    while bad - good > max(1, good // 10):
        middle = (good + bad) // 2
        if keeps(middle):
            good = middle
        else:
            bad = middle
    return AgentsAtSlo(agents=good, tried=[tried[number] for number in sorted(tried)], notes=notes)


def _simulated(plan: SimulationPlan, policy: str, agents: int, notes: list[str]) -> Tried:
    result = simulate_one(plan, SimulationRun(policy, None, 0, detail=False))
    notes[:] = result.notes
    waits = result.returning_ttft_s
    return Tried(
        agents=agents,
        return_p95_s=None if waits is None else waits.p95,
        jobs_per_hour=result.jobs_per_hour,
    )
