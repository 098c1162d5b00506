"""``continuum simulate --slo``: the most agents at once that keep an SLO, and what is tried for that."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum.cli.main import main
from eval.report.results import read_results
from eval.report.slo import Slo, verdict
from eval.sim.agents import MAX_AGENTS, most_that_keep
from tests.eval.hand_made import run

WORKLOAD = ["--workload", "swe-bench:tokens=0.2", "--max-turns", "8", "--kv-tokens", "100000"]


@given(limit=st.integers(0, MAX_AGENTS + 100), first=st.integers(1, 2 * MAX_AGENTS))
def test_the_search_ends_within_a_tenth(limit: int, first: int) -> None:
    """Wherever it begins; no number is tried twice."""
    tried: list[int] = []

    def keeps(agents: int) -> bool:
        tried.append(agents)
        return agents <= limit

    most = most_that_keep(keeps, first)
    assert most <= min(limit, MAX_AGENTS)
    assert most >= min(limit, MAX_AGENTS) - max(1, limit // 10)
    assert len(set(tried)) == len(tried)


@pytest.mark.slow
def test_the_number_keeps_the_slo_and_a_tenth_more_breaks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a simulation of that number says. An agent that waits to begin is not served."""
    out = tmp_path / "out.json"
    search = ["--policies", "continuum", "--slo", "return=1000ms,first=5", "--seeds", "2", "--json", str(out)]
    assert main(["simulate", *WORKLOAD, *search]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        "Most agents at once that keep p95 of TTFT of first turns within 5 s, and of TTFT of returning turns "
        "within 1 s"
    )
    (most,) = (int(line.split()[1]) for line in printed if line.startswith("continuum"))
    lines = [line.split() for line in printed if line.endswith(("kept", "broken"))]
    verdicts = {int(agents): verdict for agents, *_, verdict in lines}
    above = min(agents for agents in verdicts if agents > most)
    assert (verdicts[most], verdicts[above]) == ("kept", "broken")
    assert above - most <= max(1, most // 10)
    found = [run for run in read_results(out).runs if run.setting.concurrency == above]
    again = tmp_path / "again.json"
    load = ["--concurrency", str(above), "--jobs", str(3 * above), "--seeds", "2", "--json", str(again)]
    assert main(["simulate", *WORKLOAD, "--policies", "continuum", *load]) == 0
    assert [run.returning_ttft_s for run in read_results(again).runs] == [
        run.returning_ttft_s for run in found
    ]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--slo", "wait=2"], "argument --slo: 'wait' is none of first, return, tpot"),
        (["--slo", "return=2,return=3"], "argument --slo: return is there twice"),
        (["--slo", "return=soon"], "argument --slo: return must be a time such as 2 or 50ms, got 'soon'"),
        (["--slo", "return=0"], "argument --slo: return must be above 0 and finite, got 0"),
        (["--slo", "return=nan"], "argument --slo: return must be above 0 and finite, got nan"),
        (
            ["--slo", "return=2", "--rate", "1"],
            "--rate has no effect with --slo, which searches for a number",
        ),
        (["--slo", "return=2", "--trace", "x"], "--trace has no effect with --slo"),
        (["--slo", "return=2", "--jobs", "9"], "--jobs has no effect with --slo"),
        (["--slo", "return=2", "--replica-model", "coarse"], "supports only the policy fcfs, not continuum"),
    ],
)
def test_what_cannot_be_searched_for_is_one_sentence(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _code(["simulate", *WORKLOAD, *flags]) == 2
    assert complaint in capsys.readouterr().err


def _code(command: list[str]) -> int | str | None:
    """The exit code of a command, whether it or its flags are refused."""
    try:
        return main(command)
    except SystemExit as refused:
        return refused.code


@pytest.mark.parametrize(
    ("text", "bounds_s"),
    [("tpot=50ms", {"tpot": 0.05}), ("first=2s,return=1.5", {"first": 2, "return": 1.5})],
)
def test_times_have_units(text: str, bounds_s: dict[str, float]) -> None:
    """Seconds, unless they are given as ms."""
    assert Slo.parse(text).bounds_s == pytest.approx(bounds_s)


def test_a_run_without_such_turns_has_no_verdict() -> None:
    """Nor has one that ended early, whatever its turns waited."""
    slo = Slo.parse("first=10, return=2")
    answered = run("continuum", 10.0)
    single = msgspec.structs.replace(answered, returning_ttft_s=None)
    assert "no verdict" in verdict(slo, single)
    assert "return not measured" in verdict(slo, single)
    assert "ended early, no verdict" in verdict(slo, answered, ended_early=True)
