"""The promise of ``make bench-watch``: each round measures each state of the trace against off; and what
``make bench-trace`` and ``make bench-watch`` refuse."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from benchmarks.tracing import trace_overhead, trace_steps
from benchmarks.tracing.trace_overhead import verdict
from eval.report.intervals import Estimate


@pytest.mark.slow
@pytest.mark.long
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The output has throughput and CPU time of all five states, ratios with intervals, and event rates."""
    short = ["--rounds", "2", "--seconds", "0.4", "--streams", "4", "--tokens", "40"]
    assert trace_overhead.main(["--model", "nothing", *short]) == 0
    said = capsys.readouterr().out
    ratio = r"\d+\.\d{4} \(\d+\.\d{4} to \d+\.\d{4}\)"
    for state in ("on", "on, compressed", "watched", "off again"):
        assert len(re.findall(rf"^    {state} +[\d,]+   {ratio}$", said, re.MULTILINE)) == 2, said
    assert len(re.findall(r"^    off +[\d,]+ +$", said, re.MULTILINE)) == 2
    events = re.findall(
        r"^  (on.*): ([\d,]+) events and \d+\.\d\d MB a second, 0 dropped$", said, re.MULTILINE
    )
    assert [state for state, _ in events] == ["on", "on, compressed"]
    assert all(int(count.replace(",", "")) > 10 for _, count in events)


def test_the_verdict() -> None:
    """The whole interval decides; an interval that spans the goal decides nothing."""
    assert verdict(Estimate(0.99, 0.985, 0.995)) == "is 1.0 % less: within 2 %"
    assert verdict(Estimate(0.95, 0.94, 0.96)) == "is 5.0 % less: TOO MUCH"
    assert "cannot tell" in verdict(Estimate(0.99, 0.97, 1.01))


@pytest.mark.parametrize(
    ("main", "wrong"),
    [
        *((trace_overhead.main, [flag, "0"]) for flag in ("--rounds", "--seconds", "--streams")),
        *((trace_steps.main, [flag, "0"]) for flag in ("--blocks", "--streams", "--tokens")),
    ],
)
def test_arguments_that_measure_nothing(main: Callable[[list[str]], int], wrong: list[str]) -> None:
    """Counts and durations of 0 are refused."""
    with pytest.raises(SystemExit):
        main(wrong)


@pytest.mark.parametrize("main", [trace_overhead.main, trace_steps.main])
def test_a_model_that_is_not_there(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing model is refused with one sentence that names it."""
    assert main(["--model", "no/such/folder"]) == 1
    told = capsys.readouterr().err
    assert "no/such/folder" in told
    assert "Traceback" not in told
