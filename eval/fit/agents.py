"""How many agents at once keep an SLO: simulates more and more of them until it breaks."""

from __future__ import annotations

from typing import TextIO

import msgspec

from eval.errors import UsageError
from eval.fit.memory import BLOCK_SIZE
from eval.sim.simulate import Hardware, SimulationPlan, SimulationRun, simulate_one
from eval.workloads.arrivals import ArrivalKind
from eval.workloads.sampling import JobLimits

MAX_AGENTS = 4096
"""No more are tried."""
GAP_CAP_S = 600.0
SEED = 0


class Tried(msgspec.Struct, kw_only=True):
    """One simulation."""

    agents: int
    return_p95_s: float
    """Time to first token that 95 of 100 returning turns have."""
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
    """Doubles or halves the number of agents from ``first`` on until the SLO breaks or holds, then bisects
    until the two are within a tenth. An agent begins its next job when one has ended. ``context`` and
    ``host_kv_tokens`` are in tokens, ``return_s`` in seconds. UsageError if no turn of a job returns."""
    tried: dict[int, Tried] = {}
    notes: dict[int, list[str]] = {0: []}

    def keeps(agents: int) -> bool:
        if agents not in tried:
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
            tried[agents], notes[agents] = _simulated(plan, policy, agents)
        return tried[agents].return_p95_s <= return_s

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
    return AgentsAtSlo(agents=good, tried=[tried[number] for number in sorted(tried)], notes=notes[good])


def _simulated(plan: SimulationPlan, policy: str, agents: int) -> tuple[Tried, list[str]]:
    """The result, and the notes on it."""
    result = simulate_one(plan, SimulationRun(policy, None, SEED, detail=False))
    if result.returning_ttft_s is None:
        raise UsageError(f"No turn of {plan.workload} returns from a tool: there is no wait to bound.")
    tried = Tried(agents=agents, return_p95_s=result.returning_ttft_s.p95, jobs_per_hour=result.jobs_per_hour)
    return tried, [*result.notes, "one seed: no confidence interval"]
