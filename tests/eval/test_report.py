"""The terminal report: figures side by side or a line per policy, ratios and assumptions."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from eval.load.records import EngineCounters
from eval.report.comparison import Comparison
from eval.report.figures import JOB_COMPLETION, count, seconds, tokens
from eval.report.intervals import Estimate, mean_interval, ratio_interval, student_t
from eval.report.results import ResultFile
from eval.report.tables import MAX_WIDTH, render, render_comparison
from tests.eval.hand_made import run


def _row(table: str, label: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(label)]
    return line.removeprefix(label).split()


def _unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_two_policies_stand_side_by_side_with_their_ratio() -> None:
    """Each number is in its column, the ratio of second to first is last, and unknown values are dashes."""
    pinning = EngineCounters(pins_ended={"handed_over": 12, "expired": 3})
    table = render([run("fcfs", 20.0), run("continuum", 10.0, cached_tokens=75, counters=pinning)])
    assert table.splitlines()[:2] == ["at all jobs at once (1 seed)", table.splitlines()[1]]
    assert table.splitlines()[1].split() == ["fcfs", "continuum", "continuum", "/", "fcfs"]
    assert _row(table, "job completion, mean s") == ["20.00", "10.00", "0.50x"]
    assert _row(table, "  recomputed") == ["400", "100", "0.25x"]
    assert _row(table, "  pins handed over") == ["0", "12", "-"]
    assert _row(table, "preemptions") == ["0", "-", "-"]
    assert "one seed each: no confidence intervals" in table


def test_a_figure_over_seeds_is_a_mean_with_its_interval() -> None:
    """The mean of 10, 12 and 14 s is 12 ± t(2)·2/√3, as in scipy; ratios are per seed, here all equal."""
    before = [run("fcfs", seconds_, seed=seed) for seed, seconds_ in enumerate((10.0, 12.0, 14.0))]
    after = [run("oracle", seconds_ / 2, seed=seed) for seed, seconds_ in enumerate((10.0, 12.0, 14.0))]
    table = render([*before, *after])
    half = stats.t.ppf(0.975, 2) * 2 / math.sqrt(3)
    assert _row(table, "job completion, mean s") == [
        *("12.00", f"±{half:.2f}", "6.00", f"±{half / 2:.2f}", "0.50x", "0.50-0.50"),
    ]
    assert "95 % confidence interval over seeds (Student's t" in _unwrapped(table)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 8, 29, 100])
def test_the_quantile_is_students(degrees: int) -> None:
    """Even and odd degrees of freedom have different series; both agree with scipy."""
    assert student_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)


def test_a_mean_agrees_with_scipys_interval_and_one_value_has_none() -> None:
    """An independent implementation gives the same interval."""
    values = [3.1, 4.7, 4.4, 5.2, 2.9]
    found = mean_interval(values)
    low, high = stats.t.interval(0.95, 4, loc=found.value, scale=stats.sem(values))
    assert found.low == pytest.approx(low)
    assert found.high == pytest.approx(high)
    assert found.value == pytest.approx(4.06)
    assert mean_interval([3.0]) == Estimate(3.0)


def test_pairs_take_out_what_seeds_differ_in() -> None:
    """For seeds of 10 and 1000 s, both halved, the ratio is exactly 0.5, though the means hardly overlap."""
    found = ratio_interval([(10.0, 5.0), (1000.0, 500.0), (90.0, 45.0)])
    assert found is not None
    for value in (found.value, found.low, found.high):
        assert value == pytest.approx(0.5)
    uneven = ratio_interval([(1.0, 2.0), (1.0, 8.0)])
    half = stats.t.ppf(0.975, 1) * math.log(2)
    assert uneven is not None
    assert uneven.low is not None
    assert [uneven.value, math.log(uneven.low)] == pytest.approx([4.0, math.log(4) - half])
    assert ratio_interval([]) is None
    assert ratio_interval([(0.0, 1.0)]) is None


def test_many_runs_are_a_line_per_policy_within_the_terminals_width() -> None:
    """A block per load from light to heavy, the best of each starred, ratios to the first policy."""
    policies = (("fcfs", 1000.0), ("program-fcfs", 800.0), ("fixed-ttl", 900.0), ("oracle", 500.0))
    runs = [
        run(name, mean_s * rate + 37 * seed, seed=seed, jobs_per_s=rate)
        for rate in (2.0, 0.5)
        for name, mean_s in policies
        for seed in range(3)
    ]
    table = render(runs)
    lines = table.splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    assert lines.index("0.5 jobs/s (3 seeds)") < lines.index("2 jobs/s (3 seeds)")
    light, heavy = [line for line in lines if line.startswith("  oracle")]
    assert light.split()[1:3] == ["287.0", "±91.9*"]
    assert heavy.split()[1:3] == ["1,037", "±92*"]
    assert heavy.split()[3] == "0.51x"
    fcfs = next(line for line in lines if line.startswith("  fcfs"))
    assert fcfs.split()[3] == "-"
    assert "*" not in fcfs
    assert "ratios: to fcfs" in table


def test_equal_values_are_not_called_best() -> None:
    """If all values are equal as printed, none has a star."""
    runs = [run(name, 9.0, jobs_per_s=rate) for rate in (1.0, 2.0) for name in ("a", "b")]
    assert "*" not in render(runs).split("marks the best")[0].rstrip("* \n")


def test_a_policy_that_did_not_run_at_a_load_is_said_and_not_invented() -> None:
    """The line is left out there, and a sentence says so."""
    runs = [run("a", 9.0, jobs_per_s=1.0), run("a", 9.0, jobs_per_s=2.0), run("b", 8.0, jobs_per_s=1.0)]
    table = render(runs)
    assert sum(line.startswith("  b ") for line in table.splitlines()) == 1
    assert "b compared with a: no run of its own (at 2 jobs/s)" in table


def test_runs_without_a_common_seed_have_a_ratio_without_an_interval() -> None:
    """Without pairs only the means are compared; a sentence says why."""
    runs = [run("a", 10.0, seed=1), run("a", 30.0, seed=2), run("b", 10.0, seed=3), run("b", 20.0, seed=4)]
    table = render(runs)
    assert _row(table, "job completion, mean s")[-1] == "0.75x"
    assert "b compared with a: seeds 3, 4, not 1, 2; ratios are by the seeds that both have" in _unwrapped(
        table
    )
    comparison = Comparison([ResultFile(runs=runs)])
    ratio = comparison.ratio(comparison.series[1], comparison.loads[0], JOB_COMPLETION)
    assert ratio == Estimate(0.75)


def test_runs_of_one_seed_that_are_repeated_pair_in_their_order() -> None:
    """A server measured twice with one seed gives two values, not one."""
    runs = [run("a", 10.0), run("a", 20.0), run("b", 5.0), run("b", 10.0)]
    assert _row(render(runs), "job completion, mean s")[4:] == ["0.50x", "0.50-0.50"]


def test_what_else_differs_is_said_in_words() -> None:
    """The report states differences in workload, model, hardware, replicas, and simulation or measurement."""
    other = run(
        "b",
        9.0,
        num_jobs=5,
        model="n",
        workload="v.jsonl",
        hardware="h100",
        num_replicas=2,
        simulated=False,
    )
    told = _unwrapped(render([run("a", 9.0), other]))
    for sentence in (
        "b compared with a: another workload (v.jsonl, not w.jsonl), so the ratios compare different work",
        "b compared with a: another model (n, not m)",
        "b compared with a: other hardware (h100; there: not named)",
        "b compared with a: 2 replicas, not 1",
        "b compared with a: measured, not simulated",
        "b compared with a: 5 jobs, not 4 (at all jobs at once)",
    ):
        assert sentence in told, sentence


def test_assumptions_are_printed_once_and_name_whose_they_are() -> None:
    """A reader who quotes a number sees what was assumed."""
    first, second = run("a", 9.0), run("b", 9.0)
    second.notes.append("no job ids were sent")
    table = render([first, second])
    assert table.count("tool times: 5 ASSUMED") == 1
    assert "- b: no job ids were sent" in table
    assert "up to one KV block a turn" in _unwrapped(table)


def test_notes_that_differ_only_in_numbers_are_one() -> None:
    """Each seed and load has its own counts; a name with digits in it is not a number."""
    runs = [run("a", 9.0, seed=seed, jobs_per_s=1.0 + seed) for seed in range(3)]
    for result, number in zip(runs, ("98", "1,110", "111"), strict=True):
        result.notes = [f"llama-3.1-8b on h100: {number} tool times ASSUMED, 0.5 per s"]
    runs[0].notes.append("llama-3.1-70b on h100: 3 tool times ASSUMED, 0.5 per s")
    table = _unwrapped(render(runs))
    assert "- llama-3.1-8b on h100: 98 to 1,110 tool times ASSUMED, 0.5 per s" in table
    assert "- llama-3.1-70b on h100: 3 tool times ASSUMED, 0.5 per s" in table


def test_failures_unlike_answers_and_cut_jobs_come_first() -> None:
    """Ignored forced tokens, and jobs that did not fit or failed, are reported first."""
    result = run("other", 9.0)
    result.num_unlike_recording, result.num_cut_jobs, result.num_errors, result.num_completed_jobs = (
        7,
        2,
        1,
        3,
    )
    told = _unwrapped(render([result]))
    assert "! other: 7 answers differ from the recording" in told
    assert "! other: 2 of 4 jobs were cut" in told
    assert "! other: 1 turns failed and 1 of 4 jobs did not end" in told


def test_policies_of_one_name_are_told_apart_by_what_differs() -> None:
    """Policies of one name get the model if it differs, else the file; each is compared with its namesake."""
    small, large = run("fcfs", 8.0, model="8b"), run("fcfs", 70.0, model="70b")
    assert [one.label for one in Comparison([ResultFile(runs=[small, large])]).series] == [
        *("fcfs (8b)", "fcfs (70b)"),
    ]
    files = [ResultFile(runs=[run("fcfs", a), run("oracle", b)]) for a, b in ((10.0, 8.0), (5.0, 2.0))]
    comparison = Comparison(files, ["old", "new"])
    assert [one.label for one in comparison.series] == [
        *("fcfs (old)", "oracle (old)", "fcfs (new)", "oracle (new)"),
    ]
    assert comparison.baseline(comparison.series[3]) is comparison.series[1]
    ratio = comparison.ratio(comparison.series[3], comparison.loads[0], JOB_COMPLETION)
    assert ratio is not None
    assert ratio.value == pytest.approx(0.25)
    assert ratio.low is None
    assert "oracle (new) to oracle (old)" in _unwrapped(render_comparison(comparison))


def test_numbers_have_about_four_digits() -> None:
    """Columns stay narrow, and an interval has as many decimals as its value."""
    assert [seconds(x) for x in (1.234, 99.99, 123.45, 1234.5)] == ["1.23", "99.99", "123.5", "1,234"]
    assert seconds(0.123, like=1234.0) == "0"
    assert [count(x) for x in (3.0, 3.25, 1234.5)] == ["3", "3.2", "1,234"]
    assert [tokens(x) for x in (99_999, 123_456, 1.5e8)] == ["99,999", "123 k", "150 M"]


def test_no_runs_are_said() -> None:
    """An empty result gives a sentence, not an empty table."""
    assert render([]) == "No runs."
