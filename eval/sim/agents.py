"""How many agents at once keep an SLO: simulates more and more of them until it breaks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eval.report.metrics import RunResult
from eval.report.slo import Slo, seconds_or_not
from eval.report.tables import aligned, notes_of
from eval.sim.simulate import SimulationPlan, grid, simulate

MAX_AGENTS = 4096
"""No more are tried."""
FIRST = 8
"""Tried first."""
JOBS_PER_AGENT = 3
"""Jobs that an agent runs, one after another."""


@dataclass(frozen=True, slots=True)
class AgentsAtSlo:
    """The most agents with which a policy kept the SLO, and what was tried."""

    policy: str
    agents: int
    """0 if not even one kept it."""
    tried: dict[int, list[RunResult]]
    """The runs by the number of agents, fewest first: one for each seed."""


def most_that_keep(keeps: Callable[[int], bool], first: int) -> int:
    """Doubles or halves the number from ``first`` on until it no longer keeps or breaks, then bisects until
    the two are within a tenth. Returns the greatest that kept, 0 if none did."""
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
    return good


def agents_at_slo(
    plan: SimulationPlan, policy: str, slo: Slo, first: int, seeds: Sequence[int], num_processes: int
) -> AgentsAtSlo:
    """Searches in a closed loop: an agent begins its next job when one has ended. UsageError if the SLO
    bounds what no job has."""
    tried: dict[int, list[RunResult]] = {}

    def keeps(agents: int) -> bool:
        print(f"{policy}: simulating {agents:,} agents at once", file=sys.stderr, flush=True)
        one = replace(plan, num_jobs=JOBS_PER_AGENT * agents, concurrency=agents)
        tried[agents] = simulate(one, grid([policy], [None], seeds), num_processes)
        slo.check_measured(tried[agents])
        return slo.is_kept(tried[agents])

    most = most_that_keep(keeps, first)
    return AgentsAtSlo(policy, most, dict(sorted(tried.items())))


def render(found: Sequence[AgentsAtSlo], slo: Slo) -> str:
    """A line for each policy, then one for each number of its agents that was tried, then the notes."""
    blank = [""] * len(slo.bounds_s)
    lines = [["policy", "agents", *slo.bounds_s, "jobs/h", ""]]
    lines.append(["", "", *["p95" for _ in blank], "", ""])
    for each in found:
        lines.append([each.policy, _most(each.agents), *blank, "", ""])
        for agents, runs in each.tried.items():
            waits = map(seconds_or_not, slo.waits_s(runs).values())
            verdict = "kept" if slo.is_kept(runs) else "broken"
            lines.append(["", f"{agents:,}", *waits, _jobs_per_hour(runs), verdict])
    text = aligned(lines, gap="  ")
    text.insert(2, "-" * max(map(len, text)))
    notes = notes_of([list(each.tried.values())[-1] for each in found])
    return "\n".join([f"Most agents at once that keep {slo}", *text, notes])


def _most(agents: int) -> str:
    if not agents:
        return "none"
    return f"at least {agents:,}" if agents == MAX_AGENTS else f"{agents:,}"


def _jobs_per_hour(runs: Sequence[RunResult]) -> str:
    known = [run.jobs_per_hour for run in runs if run.jobs_per_hour is not None]
    return f"{sum(known) / len(known):,.0f}" if known else "-"
