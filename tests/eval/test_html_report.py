"""The page of ``--html``: self-contained, with every policy and plot, readable in light and dark mode."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from continuum.cli.main import main
from eval.load.records import EngineCounters
from eval.report.metrics import RunResult
from eval.report.results import ResultFile, write_results
from tests.eval.hand_made import run

POLICIES = (("fcfs", 20.0), ("fork", 15.0), ("continuum", 10.0))
PINS = EngineCounters(
    block_size=16,
    num_blocks=100,
    pins_ended={"handed_over": 7, "expired": 2},
    pin_block_s={"handed_over": 90.0, "expired": 30.0},
)


class _Page(HTMLParser):
    """Collects elements, text outside of scripts, and the figures, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.figures: list[tuple[str, dict[str, Any]]] = []
        self._script: str | None = None
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        self.ids += [given["id"] or ""] if "id" in given else []
        if tag in ("script", "style"):
            self._inside.append(tag)
            self._script = given.get("data-plot")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside.pop()
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.figures.append((self._script, msgspec.json.decode(data)))
        elif not self._inside:
            self.text += data


def _runs(loads: tuple[float | None, ...] = (0.5, 2.0), seeds: int = 2) -> list[RunResult]:
    return [
        run(name, mean_s * (load or 1.0) + seed, seed=seed, jobs_per_s=load, counters=PINS)
        for load in loads
        for name, mean_s in POLICIES
        for seed in range(seeds)
    ]


def _written(folder: Path, runs: list[RunResult], **fields: Any) -> _Page:
    """Writes the page through the command line, as a user does."""
    results, out = folder / "result.json", folder / "deep" / "report.html"
    write_results(results, ResultFile(runs=runs, **fields))
    assert main(["compare", str(results), "--html", str(out)]) == 0
    return _Page(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """No script, style, image or font is fetched, and no button uploads the data."""
    page = _written(tmp_path, _runs())
    assert page.addresses == ["data:,"]
    text = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    assert "modeBarButtons" in text.rsplit("<script>", 1)[1]


def test_every_plot_is_there_with_every_policy(tmp_path: Path) -> None:
    """Completion against load, distribution, timeline, pool and pins exist, with a line or a choice per
    policy."""
    page = _written(tmp_path, _runs())
    plots = ("completion", "distribution", "jobs", "pool", "pins")
    assert tuple(dict.fromkeys(key for key, _ in page.figures)) == plots
    assert [each for each in page.ids if each.endswith("-plot")] == [f"{key}-plot" for key in plots]
    for key in ("completion", "distribution"):
        figure = next(figure for name, figure in page.figures if name == key)
        assert [trace["name"] for trace in figure["data"] if "name" in trace] == [
            name for name, _ in POLICIES
        ]
    # Two loads, and two policies besides the baseline.
    assert [name for name, _ in page.figures].count("jobs") == 4
    assert "continuum and fcfs, 2 jobs/s" in page.text
    for name, _ in POLICIES:
        assert name in page.text


def test_plots_show_the_runs_numbers(tmp_path: Path) -> None:
    """A line has the means over seeds at each rate, a band their interval, and areas add up to the pool."""
    page = _written(tmp_path, _runs())
    figures = dict(reversed(page.figures))
    lines = {trace.get("name"): trace for trace in figures["completion"]["data"]}
    assert (lines["fcfs"]["x"], lines["fcfs"]["y"]) == ([0.5, 2.0], [10.5, 40.5])
    band = figures["completion"]["data"][0]
    assert band["y"][0] == pytest.approx(10.5 + 12.7062 * 0.5, abs=1e-3)
    areas = figures["pool"]["data"][:4]
    assert [trace["name"] for trace in areas] == ["running", "pinned", "cached", "free"]
    assert [sum(values) for values in zip(*(trace["y"] for trace in areas), strict=True)] == [100.0] * 3
    assert figures["pool"]["layout"]["yaxis"]["title"]["text"] == "blocks of the pool, %"
    (handed, expired) = figures["pins"]["data"]
    assert (handed["name"], handed["x"], expired["x"]) == ("handed over", [7, 7, 7], [2, 2, 2])


def test_a_timeline_is_waiting_running_and_tool_calls(tmp_path: Path) -> None:
    """The job of 20 s waits 1 s and runs 1 s in each of two turns, with 16 s for the tool in between."""
    page = _written(tmp_path, [run("fcfs", 20.0, num_jobs=1)])
    figure = dict(page.figures)["jobs"]
    stretches = {trace["name"]: (trace["base"], trace["x"]) for trace in figure["data"]}
    assert stretches == {
        "waiting": ([0, 18], [1, 1]),
        "running": ([1, 19], [1, 1]),
        "tool call": ([2], [16]),
    }
    assert "waiting 10.0 %, running 10.0 %, tool call 80.0 %" in page.text


def test_the_numbers_are_in_the_text(tmp_path: Path) -> None:
    """Without scripts a reader still has the table, the ratios with intervals and the headline."""
    page = _written(tmp_path, _runs())
    told = " ".join(page.text.split())
    assert "continuum, at 2 jobs/s: mean job completion 20.50 ±6.35 s against 40.50 ±6.35 s of fcfs" in told
    assert "0.51x" in told
    assert "simulated, model m, workload w.jsonl; 12 runs" in told
    assert "Half and 95 % of the jobs are done within: fcfs 40.50 s" in told
    for heading in ("Policies at each load", "All figures", "JCT, s mean", "preemptions"):
        assert heading in told


def test_what_is_measured_and_assumed_comes_before_the_plots(tmp_path: Path) -> None:
    """Notes, definitions and the command precede plots, with a box if runs differ in more than the policy."""
    runs = [*_runs(), run("other", 9.0, jobs_per_s=2.0, model="n")]
    page = _written(tmp_path, runs, title="Pins", notes=["cost: a roofline"], command="continuum simulate")
    told = " ".join(page.text.split())
    assert told.index("tool times: 5 ASSUMED") < told.index("Job completion time against load")
    assert "cost: a roofline" in told
    assert "Made by continuum simulate" in told
    assert told.index("other compared with fcfs: another model (n, not m)") < told.index(
        "Policies at each load"
    )
    assert page.ids.index("notes") < page.ids.index("completion")


def test_one_load_is_bars_and_a_lone_run_is_drawn_alone(tmp_path: Path) -> None:
    """A single run has no ratio, choice or interval, but everything that was measured."""
    page = _written(tmp_path, [run("fcfs", 20.0)])
    figures = dict(page.figures)
    assert figures["completion"]["data"][0]["type"] == "bar"
    assert "pins" not in figures
    assert "fcfs, at all jobs at once: mean job completion 20.00 s." in page.text


@pytest.mark.parametrize("rates", [(1.0,), (1.0, 2.0)])
def test_runs_in_which_no_job_ended_have_a_page(tmp_path: Path, rates: tuple[float, ...]) -> None:
    """If no job ended, as with a server that refuses every turn, the page has no plots of jobs."""
    runs = [run("result", 9.0, jobs_per_s=rate) for rate in rates]
    for result in runs:
        result.job_completion_s, result.jobs, result.num_completed_jobs = None, [], 0
    page = _written(tmp_path, runs)
    assert "jobs did not end" in page.text
    assert "completion" not in page.ids
    assert "pool" in page.ids


def test_light_and_dark_have_their_colors(tmp_path: Path) -> None:
    """The page follows the reader's color scheme, and the plots follow the page."""
    page = _written(tmp_path, _runs((None,), 1))
    text = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    assert "@media (prefers-color-scheme: dark)" in text
    assert 'name="color-scheme" content="light dark"' in text
    colors = re.findall(r"--ground: (#\w+)", text)
    assert len(set(colors)) == 2
    for _, figure in page.figures:
        assert figure["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)"
        assert "font" not in figure["layout"]


@pytest.mark.slow
def test_the_same_results_leave_the_same_bytes(tmp_path: Path) -> None:
    """The page contains no clock time and nothing random."""
    pages = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        _written(tmp_path / name, _runs())
        pages.append((tmp_path / name / "deep" / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_names_from_files_are_text_and_not_markup(tmp_path: Path) -> None:
    """A job or policy named like a tag breaks neither the page nor its scripts."""
    page = _written(tmp_path, [run("<i>a</i></script>", 9.0, counters=PINS)], title="<b>")
    assert "<i>a</i></script>" in page.text
    assert len(page.figures) == 5


@pytest.mark.slow
def test_without_plotly_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    """Plotly is an extra; nothing else of the command needs it."""
    write_results(tmp_path / "a.json", ResultFile(runs=[run("a", 9.0)]))
    without = "import sys; sys.modules['plotly'] = None; "
    code = without + "from continuum.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "compare", str(tmp_path / "a.json")]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (plain.returncode, plain.stderr) == (0, "")
    html = subprocess.run(
        [*command, "--html", str(tmp_path / "a.html")], capture_output=True, text=True, check=False
    )
    assert html.returncode == 1
    assert "pip install 'continuum-engine[report]'" in html.stderr
    assert len(html.stderr.splitlines()) == 1


def test_a_page_of_nothing_or_nowhere_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without runs, or with an unwritable path, there is exit code 1 and the file's name."""
    empty, full = tmp_path / "empty.json", tmp_path / "full.json"
    write_results(empty, ResultFile())
    write_results(full, ResultFile(runs=[run("a", 9.0)]))
    assert main(["compare", str(empty), "--html", str(tmp_path / "x.html")]) == 1
    assert f"{empty} holds no runs." in capsys.readouterr().err
    assert main(["compare", str(full), "--html", str(full / "x.html")]) == 1
    assert "Cannot write the report" in capsys.readouterr().err
