"""The bench of parts and constants removes each part, varies each constant, and omits none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.policy.cell import Cell
from benchmarks.policy.command import main
from benchmarks.policy.constants import BOUNDS, DOUBLE, HALF, WHY, constants
from benchmarks.policy.part_table import constant_table, part_table
from benchmarks.policy.parts import Part, parts
from continuum.config import ContinuumConfig
from eval.baselines.catalog import parse_policy
from eval.report.results import read_results
from eval.workloads.recorded import write_jobs
from tests.benchmarks.test_policy_bench import made_job
from tests.eval.hand_made import run

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording whose jobs do not all fit in the pool at once."""
    made = tmp_path_factory.mktemp("workloads")
    jobs = [made_job(f"job-{number}", 60_000, num_turns=2) for number in range(24)]
    write_jobs(made / "agentcgroup-glm.jsonl", jobs)
    return made


def bench(folder: Path, *flags: str) -> int:
    arguments = ["--workloads", str(folder), "--quick", "--only", "agentcgroup-glm", "--processes", "1"]
    return main([*arguments, *flags])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_part_is_taken_away(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part has a line per cell and one for the grid; without pins no KV is held; losses are shown."""
    out = tmp_path / "parts.json"
    assert bench(folder, "--ablation", "--json", str(out)) == 0
    told = capsys.readouterr().out
    runs = read_results(out).runs
    for part in parts():
        assert told.count(f"\n{part.policy} ") == 5, part  # four cells, and the grid
        assert f"| `{part.policy}`" in told
        assert len([one for one in runs if one.name == part.policy]) == 4
    held = {one.name: sum((one.pins_ended or {}).values()) for one in runs if one.name.startswith("cont")}
    assert held["continuum"] > 0
    assert held["continuum:pin_budget=0"] == 0
    assert "mean JCT of continuum with a host tier over that without: " in told


@pytest.mark.slow
def test_a_constant_is_halved_and_doubled(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A constant runs at half and double, under the heaviest load on both tiers; a share has no double."""
    out = tmp_path / "constants.json"
    assert bench(folder, "--constants", "max_ttl_s,pin_budget", "--json", str(out)) == 0
    told = capsys.readouterr().out
    assert "| `max_ttl_s`  | 600 " in told
    assert "over 2 cells, 1 seed:" in told
    names = {one.name for one in read_results(out).runs}
    variants = {"max_ttl_s=300.0", "max_ttl_s=1200.0", "pin_budget=0.45"}
    assert names == {"fcfs", "continuum", *(f"continuum:{variant}" for variant in variants)}
    assert {one.setting.jobs_per_s for one in read_results(out).runs} == {0.1}


def test_a_constant_that_is_none_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown constant is refused with one sentence that lists the known ones."""
    assert bench(folder, "--constants", "luck") == 1
    assert capsys.readouterr().err.startswith("The policy has no constant 'luck'; it has grace_s, ")


def test_every_policy_that_is_compared_can_be_made() -> None:
    """Every part and every constant at half and double makes a policy; halves and doubles differ."""
    for part in parts():
        assert parse_policy(part.policy).name == part.policy
    for constant in constants():
        for factor in (HALF, DOUBLE):
            policy = constant.times(factor)
            assert policy is None or parse_policy(policy).name == policy
        if constant.value:
            assert constant.times(HALF) is not None


def test_every_option_that_is_a_number_says_why_it_has_its_value() -> None:
    """Every reason belongs to an existing option, and docs/lab/policy.md has a line for each."""
    assert {constant.name for constant in constants()} == set(WHY)
    docs = (REPOSITORY / "docs" / "lab" / "policy.md").read_text()
    assert [constant.name for constant in constants() if f"| `{constant.name}` " not in docs] == []


def _numbers_of(path: Path) -> Iterator[str]:
    """Yields names of a module's constants that are numbers or arrays of numbers."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            is_number = any(
                isinstance(part, ast.Constant) and type(part.value) in (int, float)
                for part in ast.walk(node.value)
            )
            if name.isupper() and not name.startswith("_") and is_number:
                yield name


def test_no_constant_is_left_out() -> None:
    """Every named number in a module of policy or estimator is an option that the bench varies, or is listed
    as a bound with what it bounds."""
    tuning = ast.parse((REPOSITORY / "continuum" / "tuning.py").read_text())
    turned = {
        f"{(node.module or '').rpartition('.')[2]}.{one.name}"
        for node in tuning.body
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    }
    found = {
        f"{path.stem}.{name}"
        for package in ("continuum", "estimator")
        for path in (REPOSITORY / package).rglob("*.py")
        if "cli" not in path.parts
        for name in _numbers_of(path)
    } - turned
    told = {name for name in BOUNDS if not name.startswith("config.")}
    no_decisions = {"state.STATE_VERSION", "durations.NO_BELIEF", "survival.NOTHING_KNOWN"}
    no_decisions |= {name for name in found if name.startswith(("tool_signals.", "retention."))}
    assert found - no_decisions == told
    options = {name.removeprefix("config.") for name in BOUNDS if name.startswith("config.")}
    assert all(hasattr(ContinuumConfig(), name) for name in options)


def _cell(host_tier: bool, **seconds: float) -> Cell:
    """A cell of two seeds, the second twice as slow; ``seconds``: JCTs by policy."""
    runs = {name: [run(name, took_s), run(name, 2 * took_s, seed=1)] for name, took_s in seconds.items()}
    return Cell("mix", 0.1, host_tier, runs)


def test_a_part_that_brings_something_is_told_from_one_that_does_not() -> None:
    """The grid's mean and its interval decide whether a part helps; with equal JCTs it does not."""
    names = ("a", "b", "c")
    cells = [
        _cell(False, fcfs=200, continuum=100, a=150, b=100, c=90),
        _cell(True, fcfs=50, continuum=50, a=50, b=50, c=40),
    ]
    text = part_table(cells, [Part(name, "") for name in names])
    a, b, c = [next(line for line in text.splitlines() if f"`{name}`" in line) for name in names]
    assert "brings 22.5%" in a
    assert "1.00 to 1.50" in a
    assert "makes no difference" in b
    assert "COSTS 15.1%" in c
    assert "with a host tier over that without: 0.500 (0.500-0.500)" in text


def test_a_constant_that_moves_nothing_is_named() -> None:
    """A constant that moves the mean by less than half a percent is named; a share has no double."""
    (share,) = constants(["pin_budget"])
    (ttl,) = constants(["max_ttl_s"])
    seconds = {"continuum": 100.0, "continuum:pin_budget=0.45": 104.0}
    seconds |= {"continuum:max_ttl_s=300.0": 100.0, "continuum:max_ttl_s=1200.0": 100.4}
    text = constant_table([_cell(False, **seconds)], [share, ttl])
    assert "1.040 (1.040-1.040); 1.04 to 1.04; 1.040 (1.040-1.040)" in text
    assert "no difference" in text
    assert "Neither half nor double moves the mean JCT of any cell by 0.5%: `max_ttl_s`." in text
