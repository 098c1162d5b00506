"""``continuum reproduce``: the paper's settings in simulation, our results next to the published ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from continuum.cli.main import main
from engine.config.engine_config import SchedulerConfig
from eval.load.records import EngineCounters
from eval.report.intervals import Estimate
from eval.report.results import read_results
from eval.reproduction.experiment import Experiment, Point, plan_of
from eval.reproduction.observed_rule import Decision, RetentionTimes
from eval.reproduction.published import FIGURES, Measure, PaperFigure, Published, Setting
from eval.reproduction.table import figure_table, summary
from eval.reproduction.verdict import Verdict, outcome, verdict_of
from tests.eval.hand_made import run

# agent-serving.md 1.5, copied by hand: figure, place, model, GPUs, jobs/s, then vLLM, Continuum, Autellix,
# InferCept in seconds.
SECONDS = """
fig8-swe   0 70b 4xb200    0.11 2760 1630 4820  -
fig8-swe   1 8b  1xb200    0.13 2020 1220 3690  -
fig8-swe   2 8b  1xa100-80 0.09 5190 3330 13200 -
fig8-bfcl  0 70b 4xb200    5    428  372  412   -
fig8-bfcl  1 8b  1xb200    5    317  213  293   -
fig8-bfcl  2 8b  1xa100-80 2    645  490  660   -
fig9       0 8b  1xh100    0.03 4000 1240 5530  -
fig9       1 8b  1xh100    0.05 5060 1700 6700  -
fig9       2 8b  1xh100    0.05 8950 3200 12400 -
fig10-swe  0 70b 4xb200    0.11 2850 1700 5000  2830
fig10-swe  1 8b  1xb200    0.13 1810 1130 1880  1640
fig10-swe  2 8b  1xa100-80 0.09 5180 2950 5650  4330
fig10-swe  3 8b  1xb200    0.13 2850 1790 -     2620
fig10-bfcl 0 70b 4xb200    5    453  437  468   452
fig10-bfcl 1 8b  1xb200    5    239  225  258   243
fig10-bfcl 2 8b  1xa100-80 2    610  480  548   612
bfcl-short 1 8b  1xb200    5    317  213  293   -
bfcl-short 4 8b  1xb200    5    239  225  258   243
"""


ABLATION_STEPS = (("fixed-ttl:2", "program-fcfs", 1640 / 1180), ("paper", "fixed-ttl:2", 1180 / 1165))


def setting(name: str, place: int) -> Setting:
    """The setting of a figure, by its place there."""
    return next(figure for figure in FIGURES if figure.name == name).settings[place]


def seconds(one: Setting, policy: str) -> float | None:
    return next((system.seconds for system in one.published if system.policy == policy), None)


@pytest.mark.parametrize("row", SECONDS.strip().splitlines())
def test_the_published_delays_are_the_papers(row: str) -> None:
    """Each number is at its place in the paper's plot."""
    name, place, model, gpus, rate, *delays = row.split()
    found = setting(name, int(place))
    assert found.model == f"llama-3.1-{model}"
    assert f"{found.tensor_parallel}x{found.gpu}" == gpus
    assert found.jobs_per_s == float(rate)
    policies = ("fcfs", "paper", "plas", "infercept")
    assert [seconds(found, policy) for policy in policies] == [
        None if delay == "-" else float(delay) for delay in delays
    ]


def test_multiples_follow_from_the_delays_or_are_the_printed_ones() -> None:
    """The multiples are section 1.5's: 1.65x and 1.04x, 3.7x at 50.6 turns, the ablation's, the preview's."""
    expected = [
        ("fig8-swe", 1, "paper", 1.65),
        ("fig8-swe", 2, "paper", 1.55),
        ("fig9", 0, "paper", 3.2),
        ("fig10-swe", 2, "paper", 1.75),
        ("fig10-bfcl", 0, "paper", 1.04),
        ("fig10-bfcl", 1, "paper", 1.06),
        ("fig14", 0, "paper", 1.6),
        ("fig14", 1, "paper", 3.7),
        ("fig14", 1, "plas", 3.7 / 2.5),
        ("fig14", 1, "infercept", 3.7 / 2.2),
        ("fig16", 0, "program-fcfs", 1950 / 1640),
        ("fig16", 0, "fixed-ttl:2", 1950 / 1180),
        ("fig16", 0, "paper", 1950 / 1165),
        ("fig16", 1, "program-fcfs", 311 / 270),
        ("fig16", 1, "fixed-ttl:2", 311 / 226),
        ("fig16", 1, "paper", 311 / 209),
        ("preview", 0, "fork", 2.16),
        ("low-load", 0, "paper", 1.0),
    ]
    steps = [("program-fcfs", "fcfs", 1950 / 1640), *ABLATION_STEPS]
    for policy, base, multiple in steps:
        assert setting("fig16", 0).multiple(policy, base) == pytest.approx(multiple, rel=0.01)
    for name, place, policy, multiple in expected:
        assert setting(name, place).multiple(policy) == pytest.approx(multiple, rel=0.01)
        assert setting(name, place).multiple("fcfs") is None
        assert setting(name, place).multiple("continuum") is None


def test_host_memory_becomes_tokens_of_kv() -> None:
    """200 GB per B200 and 100 GB per A100, at 128 KiB a token of the 8B model and 320 KiB of the 70B."""
    tokens = [plan_of(setting("fig10-swe", place), 100).host_kv_tokens for place in (0, 1, 2)]
    assert tokens == [800 * 10**9 // 327_680, 200 * 10**9 // 131_072, 100 * 10**9 // 131_072]
    plan = plan_of(setting("fig8-swe", 0), 100)
    assert (plan.host_kv_tokens, plan.num_jobs, plan.hardware.tensor_parallel) == (0, 100, 4)
    assert plan.scheduler == SchedulerConfig(max_num_batched_tokens=2048)


@pytest.mark.parametrize(
    ("published", "ours", "low", "high", "verdict"),
    [
        (1.65, 1.65, None, None, Verdict.REPRODUCED),
        (1.65, 1.65 * 1.19, None, None, Verdict.REPRODUCED),
        (1.65, 1.65 / 1.19, None, None, Verdict.REPRODUCED),
        (1.65, 1.65 * 1.21, None, None, Verdict.MORE),
        (1.65, 1.65 / 1.21, None, None, Verdict.LESS),
        (1.65, 1.3, 1.0, 1.7, Verdict.UNDECIDED),
        (1.65, 1.3, 1.2, 1.4, Verdict.LESS),
        (1.15, 1.0, None, None, Verdict.LESS),  # Within 20 %, but without the gain.
        (1.15, 1.08, None, None, Verdict.REPRODUCED),
        (1.04, 1.0, None, None, Verdict.REPRODUCED),  # Almost no gain was published.
        (1.04, 0.85, None, None, Verdict.LESS),
        (0.85, 1.0, None, None, Verdict.MORE),  # Without the loss.
        (0.57, 0.6, None, None, Verdict.REPRODUCED),
        (1.0, 1.0, None, None, Verdict.REPRODUCED),
    ],
)
def test_a_multiple_comes_out_near_the_published_one(
    published: float, ours: float, low: float | None, high: float | None, verdict: Verdict
) -> None:
    """A multiple must be within 20 % and have half of the difference; else the interval may leave it open."""
    assert verdict_of(published, Estimate(ours, low, high), tolerance=1.2) is verdict


def point(
    policy: str,
    completion_s: float,
    cached: tuple[int, int],
    *,
    pins: dict[str, int] | None = None,
    held: RetentionTimes | None = None,
) -> Point:
    """A point where fcfs takes 30 s; published are 200 s for it and 100 s for ``policy``. Of 100 reusable
    tokens, ``cached`` were cached under each."""
    counters = EngineCounters(block_size=16, num_blocks=100, pins_ended=pins or {})
    published = (
        Published(system="vLLM", policy="fcfs", seconds=200.0),
        Published(system="it", policy=policy, seconds=100.0),
    )
    where = Setting(model="m", gpu="g", workload="w", jobs_per_s=1.0, published=published)
    runs = {
        "fcfs": [run("fcfs", 30.0, cached_tokens=cached[0])],
        policy: [run(policy, completion_s, cached_tokens=cached[1], counters=counters)],
    }
    return Point(where, 1, runs, held)


NOT_SHORT = "memory is not short here: fcfs recomputes 0% of prompt tokens"
LETS_GO_TOLD = (
    "unpins at once after 50% of tool calls (mean time to live 0.50 s, from a prefill or reload of 0.50 s "
    "and a queue delay of 0.5 s)"
)
SPARES = (
    "paper recomputes or loads back 40% of all prompt tokens less than fcfs (no such share is published); "
    "fcfs recomputes 40% of prompt tokens, the mean TTFT of returning turns is 1.0 s; paper recomputes 0%"
)
PINS_END = "pins end before the turn comes back"
LETS_GO = RetentionTimes.of([Decision(0.0, 0.5, 0.25), Decision(1.0, 0.5, 0.75)])


@pytest.mark.parametrize(
    ("of", "policy", "verdict", "told"),
    [
        (
            point("paper", 30.0, (100, 100)),
            "paper",
            Verdict.LESS,
            "memory is not short here: fcfs recomputes 0%",
        ),
        (
            point("paper", 28.0, (20, 30), pins={"expired": 9, "handed_over": 1}, held=LETS_GO),
            "paper",
            Verdict.LESS,
            LETS_GO_TOLD,
        ),
        (
            point("paper", 28.0, (20, 30), pins={"revoked": 3, "handed_over": 1}),
            "paper",
            Verdict.LESS,
            f"75% of paper's {PINS_END} (25% handed over, 75% revoked; 50% of turns are the last of a job)",
        ),
        (
            point("fork", 28.0, (20, 30), pins={"expired": 3, "handed_over": 1}),
            "fork",
            Verdict.LESS,
            f"75% of fork's {PINS_END} (75% expired, 25% handed over; ",
        ),
        (
            point("fork", 28.0, (20, 30), pins={"expired": 1, "handed_over": 3}),
            "fork",
            Verdict.LESS,
            f"no policy here gains as much; fork gains the most, 1.07x; 25% of fork's {PINS_END} (25% ",
        ),
        (
            point("program-fcfs", 28.0, (20, 30)),
            "program-fcfs",
            Verdict.LESS,
            "program-fcfs recomputes or loads back 5% of all prompt tokens less than fcfs; ",
        ),
        (
            point("program-fcfs", 28.0, (20, 20)),
            "program-fcfs",
            Verdict.LESS,
            "program-fcfs recomputes no fewer prompt tokens than fcfs: only its order makes a difference; ",
        ),
        (
            point("infercept", 10.0, (20, 100), pins={"handed_over": 1}),
            "infercept",
            Verdict.MORE,
            "infercept keeps a program's place in the queue",
        ),
        (
            point("paper", 10.0, (20, 100)),
            "paper",
            Verdict.MORE,
            SPARES,
        ),
    ],
)
def test_what_does_not_come_out_is_explained_by_the_runs(
    of: Point, policy: str, verdict: Verdict, told: str
) -> None:
    """Reasons are memory that is not short, a rule that pins nothing, or pins that end early."""
    found = outcome(of, policy, tolerance=1.2)
    assert found is not None
    assert found.verdict is verdict
    assert told in (found.reason or "")


def test_a_reason_sets_the_fuller_machine_beside_the_published_one() -> None:
    """Delays show how loaded each machine was; the pool's samples show how full ours was."""
    found = outcome(point("paper", 30.0, (100, 100)), "paper", tolerance=1.2)
    assert found is not None
    assert "running requests use 30% of the pool (60% at most), so no policy" in (found.reason or "")
    assert (found.reason or "").endswith("; fcfs takes 30.00 s here, vLLM took 200 s")


def test_what_the_order_alone_gains_is_told_where_more_comes_out() -> None:
    """Order alone gives 2.50x of 3.00x: the difference is not due to pins."""
    more = replace(point("paper", 10.0, (20, 100)), order_alone=run("program-fcfs", 12.0))
    found = outcome(more, "paper", tolerance=1.2)
    assert found is not None
    assert found.verdict is Verdict.MORE
    told = "the order of programs alone gains 2.50x, paper 3.00x with the first seed; paper recomputes"
    assert (found.reason or "").startswith(told)


def test_each_step_of_the_ablation_is_judged_by_itself() -> None:
    """Both are near their published multiple of vLLM, but the full rule loses what it should add to a static
    TTL. With seeds too far apart to show any gain, the summary says so."""
    ablation = setting("fig16", 0)
    delays = {
        "fcfs": (195.0, 195.0),
        "program-fcfs": (110.0, 240.0),
        "fixed-ttl:2": (116.0, 116.0),
        "paper": (139.0, 139.0),
    }
    runs = {
        policy: [run(policy, delay_s, seed=seed) for seed, delay_s in enumerate(pair)]
        for policy, pair in delays.items()
    }
    point = Point(ablation, 1, runs, None)
    figure = PaperFigure(name="figure", title="a plot", source="by hand", settings=(ablation,))
    lines = [line.split() for line in figure_table(figure, [point]).splitlines()]
    full = next(line for line in lines if line[:1] == ["full"])
    assert (full[3], full[5], full[-1]) == ("1.67x", "1.40x", "reproduced")
    step = next(line for line in lines if line[:2] == ["by", "full"])
    assert step[2:7] == ["paper/fixed-ttl:2", "-", "1.01x", "-", "0.83x"]
    assert step[-2:] == ["less", "[1]"]
    assert " ".join(summary([(figure, [point])]).split()) == (
        "At the published loads: 4 of 5 multiples reproduced; in 2 of these the interval also contains 1 "
        "(1 less)."
    )


def test_what_comes_out_needs_no_reason_and_our_own_policy_no_verdict() -> None:
    """No result was published for our own policy."""
    good = point("paper", 15.0, (20, 90))
    found = outcome(good, "paper", tolerance=1.2)
    assert found is not None
    assert (found.verdict, found.reason) == (Verdict.REPRODUCED, None)
    assert outcome(good, "continuum", tolerance=1.2) is None
    assert outcome(good, "fcfs", tolerance=1.2) is None


@pytest.mark.slow
def test_at_the_lowest_load_all_curves_coincide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a tenth of the published load the delay is the same for all policies, so 1.00x is reproduced."""
    out = tmp_path / "out.json"
    flags = ["--quick", "--only", "low-load", "--jobs", "4", "--processes", "1"]
    assert main(["reproduce", *flags, "--json", str(out)]) == 0
    written = capsys.readouterr()
    assert "running llama-3.1-8b on b200, swe-bench, 0.013 jobs/s" in written.err
    told = written.out.splitlines()
    ours = [line.split() for line in told if line.startswith("  Continuum")]
    assert [line[-4:] for line in ours] == [["1.00x", "1", "seed", "reproduced"]] * 3
    assert "At the published loads: 3 of 3 multiples reproduced." in told
    assert any(line.startswith("- Gemma-3 12B") for line in told)
    results = read_results(out)
    assert results.command == "continuum reproduce --quick --only low-load --jobs 4"
    for gpu, workload in (("b200", "swe-bench"), ("a100-80", "swe-bench"), ("b200", "bfcl")):
        of_workload = [each for each in results.runs if each.setting.workload == workload]
        runs = [each for each in of_workload if (each.setting.hardware or "").endswith(gpu)]
        assert [each.name for each in runs] == ["fcfs", "paper", "continuum"]
        means = [each.job_completion_s.mean for each in runs if each.job_completion_s is not None]
        assert means == pytest.approx([means[0]] * 3, rel=0.005)


@pytest.mark.slow
def test_where_memory_is_not_short_the_load_is_raised_until_it_is() -> None:
    """Eight jobs of 35,000 tokens in a pool of 97,000 seldom overlap at 0.02 jobs/s, but do at four times
    that rate. One seed is enough for the first load, and the table names both loads and the reason."""
    published = (
        Published(system="vLLM", policy="fcfs", seconds=300.0),
        Published(system="Continuum", policy="paper", seconds=100.0),
        Published(system="Autellix", policy="plas", seconds=400.0),
    )
    lonely = Setting(
        model="llama-3.1-70b",
        gpu="b200",
        workload="swe-bench:tokens=0.5",
        jobs_per_s=0.02,
        published=published,
    )
    told: list[str] = []
    experiment = Experiment(8, range(2), 1, told.append)
    points = experiment.points(lonely, needs_pressure=True)
    assert [point.factor for point in points] == [1, 4]
    assert [point.setting.jobs_per_s for point in points] == [0.02, 0.08]
    assert [len(point.runs["paper"]) for point in points] == [1, 2]
    assert [len(point.runs["plas"]) for point in points] == [1, 2]
    assert [point.behaviour("fcfs").is_pressed for point in points] == [False, True]
    assert points[0].multiple("paper").value == pytest.approx(1.0, abs=0.03)
    assert points[1].retention_times is not None
    assert points[1].retention_times.num_decisions > 50
    assert points[1].order_alone is not None
    assert points[1].order_alone.name == "program-fcfs"
    figure = PaperFigure(name="figure", title="a plot", source="by hand", settings=(lonely,))
    table = figure_table(figure, points).splitlines()
    at = table.index("llama-3.1-70b on b200, swe-bench:tokens=0.5, 0.08 jobs/s (4 times the published load)")
    first, second = ([line for line in part if "Continuum" in line] for part in (table[:at], table[at:]))
    assert first[0].split()[:4] == ["Continuum", "paper", "100≈", "3.00x"]
    assert first[0].split()[-2:] == ["less", "[1]"]
    assert "-" in second[0].split()[6]  # an interval
    reason = next(line for line in table if line.startswith("[1] "))
    assert reason.startswith("[1] memory is not short here: fcfs recomputes 4% of prompt tokens, ")
    assert told == [points[0].setting.title, points[1].setting.title]


def test_an_unknown_figure_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """The error gives exit code 2 and lists the figures."""
    assert main(["reproduce", "--only", "fig8-swe,fig99"]) == 2
    told = capsys.readouterr().err
    assert "--only: unknown figure 'fig99'; choose from low-load, fig8-swe, " in told


def test_p95_settings_share_the_runs_of_the_mean() -> None:
    """They differ only in the statistic that is read from a run."""
    for name, mean, tail in (("fig9", 1, 2), ("fig10-swe", 1, 3)):
        assert setting(name, tail).measure is Measure.P95
        assert plan_of(setting(name, mean), 100) == plan_of(setting(name, tail), 100)


def test_results_that_cannot_be_written_are_told_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unwritable output is reported before the first run, not an hour later."""
    assert main(["reproduce", "--quick", "--only", "low-load", "--json", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"continuum: Cannot write the result {tmp_path}: ")
    assert "running" not in told


def test_pages_that_have_no_folder_are_told_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is checked first, as pages are written last, an hour after the first run."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["reproduce", "--quick", "--only", "low-load", "--html", str(folder)]) == 1
        assert capsys.readouterr().err == f"continuum: Cannot write to {folder}: not a folder.\n"


@pytest.mark.slow
@pytest.mark.parametrize(("place", "vllm_s"), [(0, 9.01), (1, 68.9), (2, 244.0)])
def test_an_independent_study_is_within_a_fifth(place: int, vllm_s: float) -> None:
    """The seconds of vLLM with eight turns, by the study's own step times; ours wait no longer than under the
    preview's rule."""
    study = setting("eight-turns", place)
    assert seconds(study, "fcfs") == vllm_s
    (point,) = Experiment(100, [0], 1, print).points(study, needs_pressure=False)
    assert point.runs["fcfs"][0].num_jobs == 45 * (study.jobs_per_s or 0)
    assert point.seconds("fcfs").value == pytest.approx(vllm_s, rel=0.2)
    assert point.seconds("continuum").value < 1.01 * point.seconds("fork").value


def test_host_memory_is_what_an_independent_study_saw_of_lmcache() -> None:
    """The seconds of vLLM with LMCache at a load at which memory is short without it; ours wait no longer."""
    study = setting("eight-turns-dram", 1)
    assert seconds(study, "fcfs") == 27.5
    (point,) = Experiment(100, [0], 1, print).points(study, needs_pressure=False)
    assert point.seconds("fcfs").value == pytest.approx(27.5, rel=0.1)
    assert point.seconds("continuum").value < point.seconds("fcfs").value
