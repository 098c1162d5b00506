"""``python -m benchmarks.policy``: runs the grid, prints a table per cell and which promises are kept.

With ``--ablation`` it compares the policy with itself without each of its parts; with ``--constants`` with
itself with each of its constants at half and at double.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks.policy.cell import BASELINE, Cell
from benchmarks.policy.constants import constants, turned
from benchmarks.policy.part_table import constant_table, part_table
from benchmarks.policy.parts import parts
from benchmarks.policy.promises import SUBJECT, judge
from benchmarks.policy.table import cell_table, grid_table, notes, promise_list
from benchmarks.policy.traffic import GPU, ROWS, TRAFFIC, Traffic, chosen
from engine.errors import EngineError
from eval.arguments import add_processes, count
from eval.baselines.catalog import parse_policies
from eval.load.server_process import unwound_by_sigterm
from eval.report.metrics import RunResult
from eval.report.results import ResultFile, require_writable, write_results
from eval.reproduction.experiment import with_host
from eval.sim.hardware import GPUS
from eval.sim.simulate import SimulationPlan, SimulationRun, simulate

POLICIES = (
    "fcfs,program-fcfs,plas,gate:0.7,gate:0.9,fixed-ttl:2,fixed-ttl:10,fixed-ttl:60,fork,paper,infercept,"
    "hrrn,wspt,gittins,pause,idleness,continuum,oracle,known-work:work_weight=4"
)
QUICK_POLICIES = "fcfs,fixed-ttl:10,continuum,oracle"
NUM_JOBS = 40
QUICK_JOBS = 20
NUM_SEEDS = 5
CONSTANT_SEEDS = 3
FOLDER = Path("workloads")


class Loads(Enum):
    """Which loads of each workload run."""

    ALL = "all"
    LIGHTEST_AND_HEAVIEST = "lightest and heaviest"
    HEAVIEST = "heaviest"


@dataclass(frozen=True, slots=True)
class Report:
    """What is printed: for each cell when it is done, and for all cells at the end."""

    cell: Callable[[Cell], str | None]
    end: Callable[[Sequence[Cell]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """A grid to run."""

    workloads: Path
    traffic: Sequence[Traffic]
    gpu: str
    policies: tuple[str, ...]
    """Policies to compare; they include fcfs."""
    seeds: range
    num_jobs: int
    which_loads: Loads
    num_processes: int
    report: Report

    def plans(self) -> list[tuple[Traffic, SimulationPlan]]:
        """Returns each workload on its tiers. EvalError if a recording is missing."""
        return [
            (traffic, traffic.plan(self.workloads, self.gpu, self.num_jobs, host_tier=host_tier))
            for traffic in self.traffic
            for host_tier in traffic.host_tiers
        ]

    def loads(self, traffic: Traffic) -> tuple[float, ...]:
        match self.which_loads:
            case Loads.ALL:
                return traffic.loads
            case Loads.LIGHTEST_AND_HEAVIEST:
                return (traffic.loads[0], traffic.loads[-1])
            case Loads.HEAVIEST:
                return (traffic.loads[-1],)

    def runs(self, traffic: Traffic) -> list[SimulationRun]:
        """Returns the runs without plot data, which would be a hundred megabytes for a thousand runs."""
        return [
            SimulationRun(policy, load, seed, detail=False)
            for load in self.loads(traffic)
            for seed in self.seeds
            for policy in self.policies
        ]


def run_cells(config: BenchConfig) -> Iterator[list[Cell]]:
    """Yields the cells of one workload and one tier at a time, by load; reports progress on stderr."""
    for traffic, plan in config.plans():
        runs = config.runs(traffic)
        tier = "with a host tier" if plan.host_kv_tokens else "without a host tier"
        print(f"running {traffic.name} {tier}: {len(runs)} runs", file=sys.stderr, flush=True)
        results = [with_host(result, plan) for result in simulate(plan, runs, config.num_processes)]
        yield [
            Cell(traffic.name, load, plan.host_kv_tokens > 0, _by_policy(results, load))
            for load in config.loads(traffic)
        ]


def _by_policy(results: Sequence[RunResult], load: float) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {}
    for result in results:
        if result.setting.jobs_per_s == load:
            found.setdefault(result.name, []).append(result)
    return found


def run(config: BenchConfig, command: str, out: Path | None) -> None:
    """Prints the cells as they are done, then the whole grid. Keeps ``out`` up to date with what is done."""
    cells: list[Cell] = []
    for done in run_cells(config):
        cells += done
        for told in filter(None, map(config.report.cell, done)):
            print(told, end="\n\n", flush=True)
        if out is not None:
            write_results(out, _result_file(cells, command))
    print(config.report.end(cells))


def _promises(cells: Sequence[Cell]) -> str:
    subjects = [policy for policy in cells[0].runs if policy.partition(":")[0] == SUBJECT]
    told = [promise_list(policy, judge(cells, policy)) for policy in subjects]
    return "\n\n".join([notes(), grid_table(cells), *told])


def _ablation(cells: Sequence[Cell]) -> str:
    return "\n\n".join([notes(SUBJECT), grid_table(cells, SUBJECT), part_table(cells, parts())])


def _result_file(cells: Sequence[Cell], command: str) -> ResultFile:
    runs = [result for cell in cells for results in cell.runs.values() for result in results]
    return ResultFile(title="policies on a grid of workloads, simulated", command=command, runs=runs)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Exit code 1, with one sentence, if something cannot be run; 0 even if promises
    break."""
    given = _parser().parse_args(argv)
    try:
        require_writable(given.json)
        with unwound_by_sigterm():
            run(_config(given), _command(given), given.json)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy", description=__doc__)
    add = parser.add_argument
    add("--workloads", type=Path, default=FOLDER, metavar="FOLDER", help=f"with the recordings ({FOLDER})")
    add("--only", metavar="NAME[,...]", help=f"of {', '.join(ROWS)} (the first {len(TRAFFIC)})")
    add("--gpu", choices=sorted(GPUS), default=GPU, help="what is simulated; a larger one has a larger pool")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--policies", metavar="P[,P...]", help="these instead of all; fcfs is always there")
    kinds.add_argument(
        "--ablation", action="store_true", help="the agent policy, and what is left without each part of it"
    )
    kinds.add_argument(
        "--constants",
        nargs="?",
        const="",
        metavar="NAME[,...]",
        help="the agent policy with its constants, or these, at half and at double; heaviest loads only",
    )
    add("--seeds", type=count, metavar="K", help=f"of jobs and arrivals ({NUM_SEEDS}; of constants 3)")
    add("--heaviest", action="store_true", help="only the heaviest load of each workload")
    add(
        "--quick",
        action="store_true",
        help=f"one seed, {QUICK_JOBS} jobs, two loads, few policies: a first impression",
    )
    add_processes(parser)
    add("--json", type=Path, metavar="OUT", help="write the results there, for continuum compare")
    return parser


def _config(given: argparse.Namespace) -> BenchConfig:
    report, policies, loads, num_seeds = _asked(given)
    return BenchConfig(
        workloads=given.workloads,
        traffic=chosen(given.only),
        gpu=given.gpu,
        policies=tuple(dict.fromkeys([BASELINE, *policies])),
        seeds=range(given.seeds or (1 if given.quick else num_seeds)),
        num_jobs=QUICK_JOBS if given.quick else NUM_JOBS,
        which_loads=loads,
        num_processes=given.processes,
        report=report,
    )


def _asked(given: argparse.Namespace) -> tuple[Report, Sequence[str], Loads, int]:
    """Returns the report, the policies, the loads and the number of seeds."""
    loads = Loads.LIGHTEST_AND_HEAVIEST if given.quick else Loads.ALL
    loads = Loads.HEAVIEST if given.heaviest else loads
    if given.ablation:
        report = Report(lambda cell: cell_table(cell, SUBJECT), _ablation)
        return report, [SUBJECT, *(part.policy for part in parts())], loads, NUM_SEEDS
    if given.constants is not None:
        chosen = constants([name for name in given.constants.split(",") if name])
        report = Report(lambda _: None, lambda cells: constant_table(cells, chosen))
        return report, turned(chosen), Loads.HEAVIEST, CONSTANT_SEEDS
    asked = parse_policies(given.policies or (QUICK_POLICIES if given.quick else POLICIES))
    return Report(cell_table, _promises), [policy.name for policy in asked], loads, NUM_SEEDS


def _command(given: argparse.Namespace) -> str:
    """Returns the flags that decide the results, without output paths: equal runs have equal commands."""
    words = ["python", "-m", "benchmarks.policy", "--workloads", str(given.workloads), "--gpu", given.gpu]
    for flag in ("only", "policies", "constants", "seeds"):
        if getattr(given, flag) is not None:
            words += [f"--{flag}", *filter(None, [str(getattr(given, flag))])]
    switches = [f"--{name}" for name in ("ablation", "heaviest", "quick") if getattr(given, name)]
    return shlex.join([*words, *switches])
