"""The figures of the docs that a seed determines.

``python -m tests.readme_tables`` (``make readme-tables``) runs the docs' commands and inserts their current
output: two minutes on two cores.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from continuum.cli.main import main
from eval.report.intervals import ratio_interval
from eval.report.results import ResultFile, read_results
from eval.report.tables import ratio

REPOSITORY = Path(__file__).resolve().parents[1]
TUTORIAL = REPOSITORY / "docs" / "simulator.md"
MEASUREMENTS = REPOSITORY / "docs" / "lab" / "measurements.md"
ELIDED = "..."
_BLOCK = re.compile(r"```sh\n(?P<command>(?:(?!```).)*)```\n```\n(?P<output>(?:(?!```).)*)```", re.DOTALL)


def commands(block: str) -> Iterator[list[str]]:
    """Yields our commands in a shell block, without comments."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["continuum"]:
            yield words[1:]


def block(command: str) -> re.Match[str]:
    """The tutorial's only command that begins with ``command``, with its printed output."""
    found = [
        each for each in _BLOCK.finditer(TUTORIAL.read_text("utf-8")) if each["command"].startswith(command)
    ]
    assert len(found) == 1, f"The tutorial has {len(found)} outputs of {command}"
    return found[0]


POLICIES = ("fcfs", "fixed-ttl:10", "continuum")
RATE = 0.1
SIMULATE = "continuum simulate --workload swe-bench --jobs 40"
WORKLOAD = "continuum workload swe-bench"


def printed(arguments: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(arguments) == 0
    return out.getvalue()


def table_of(output: str) -> str:
    """The table alone, without the lines on measured and assumed values that follow."""
    lines = output.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("policy "))
    end = next(number for number, line in enumerate(lines) if number > first and re.match(r"[-!*] ", line))
    while not lines[end - 1].strip("-"):
        end -= 1
    return "".join(f"{line.rstrip()}\n" for line in lines[first:end])


def write(folder: Path) -> None:
    """Runs the deterministic commands and corrects the docs. A person checks words that judge a number."""
    found = block(SIMULATE)
    (command,) = commands(found["command"])
    today, host = folder / "today.json", folder / "host.json"
    kept = _without(command, "--json", "--html")
    output = printed([*kept, "--json", str(today)])
    printed([*kept, "--host-kv-tokens", "1000000", "--json", str(host)])
    figures = Figures(read_results(today), read_results(host))
    text = TUTORIAL.read_text("utf-8").replace(found["output"], table_of(output))
    TUTORIAL.write_text(in_prose(text, figures), "utf-8")
    MEASUREMENTS.write_text(in_table(MEASUREMENTS.read_text("utf-8"), figures), "utf-8")


def _without(command: list[str], *flags: str) -> list[str]:
    """The command without these flags and their values."""
    return [
        word
        for number, word in enumerate(command)
        if word not in flags and (not number or command[number - 1] not in flags)
    ]


class Figures:
    """Job completion at the higher rate, without and with host memory."""

    def __init__(self, today: ResultFile, host: ResultFile) -> None:
        self._values = {place: _completion_s(file) for place, file in (("today", today), ("host", host))}

    def mean(self, place: str, policy: str) -> str:
        values = self._values[place][policy].values()
        return f"{math.fsum(values) / len(values):.1f}"

    def ratio(self, place: str, policy: str, to_place: str, to_policy: str) -> str:
        """The ratio of two results, with its interval."""
        before, after = self._values[to_place][to_policy], self._values[place][policy]
        return ratio(ratio_interval([(before[seed], after[seed]) for seed in before]))


def _completion_s(file: ResultFile) -> dict[str, dict[int | None, float]]:
    """Mean job completion by policy and seed."""
    by_policy: dict[str, dict[int | None, float]] = {}
    for run in file.runs:
        if run.setting.jobs_per_s == RATE:
            assert run.job_completion_s is not None
            by_policy.setdefault(run.setting.name, {})[run.setting.seed] = run.job_completion_s.mean
    return by_policy


def in_prose(text: str, figures: Figures) -> str:
    """Corrects the tutorial's sentences about its table and about host memory."""
    gained = {policy: figures.ratio("host", policy, "today", policy).split()[0] for policy in POLICIES}
    left = figures.ratio("host", "continuum", "host", "fcfs")
    share = figures.ratio("today", "continuum", "today", "fcfs").split("x")[0]
    for pattern, now in (
        (r"jobs take [\d.]+ of the time", f"jobs take {share} of the time"),
        (r"the most from it \([\d.]+x\)", f"the most from it ({gained['fcfs']})"),
        (r"`continuum` nothing \([\d.]+x\)", f"`continuum` nothing ({gained['continuum']})"),
        (r"left between them \([^)]*\)", f"left between them ({left})"),
    ):
        text, count = re.subn(pattern.replace(" ", r"\s+"), now, text)
        assert count == 1, f"The tutorial lacks a sentence like {pattern}"
    return text


def in_table(text: str, figures: Figures) -> str:
    """Corrects the table of ``docs/lab/measurements.md``."""
    rows = [
        f"| `{policy}` | {figures.mean('today', policy)} | {figures.mean('host', policy)} "
        f"| {figures.ratio('host', policy, 'today', policy)} |"
        for policy in POLICIES
    ]
    parts = [figures.ratio(place, "continuum", place, "fcfs") for place in ("today", "host")]
    rows.append(f"| `continuum` / `fcfs` | {parts[0]} | {parts[1]} | |")
    head = "| job completion, mean s | no host memory |"
    place = text.index("\n", text.index("\n", text.index(head)) + 1) + 1
    end = text.index("\n\n", place)
    return text[:place] + "\n".join(rows) + text[end:]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        write(Path(folder))
