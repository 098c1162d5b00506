"""Prints results, in one column or side by side. ``python -m eval.report FILE FILE`` compares files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.errors import EvalError
from eval.metrics import Distribution, RunResult
from eval.results import read_results

Value = float | int | None


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    value: Callable[[RunResult], Value]
    form: str
    """How a value is written."""


def _of(name: str, statistic: str) -> Callable[[RunResult], Value]:
    """A getter of one statistic of one distribution; None where nothing was measured."""

    def get(result: RunResult) -> Value:
        distribution: Distribution | None = getattr(result, name)
        return None if distribution is None else getattr(distribution, statistic)

    return get


def _share_cached(result: RunResult) -> Value:
    return None if result.hit_rate is None else 100 * result.hit_rate


def _kv_usage_at_end(result: RunResult) -> Value:
    return None if result.kv_usage_at_end is None else 100 * result.kv_usage_at_end


_RECOMPUTED = (
    "recomputed: prompt tokens that the job's previous turn had and the cache did not give back "
    "(by the server's usage counts); up to one KV block a turn counts in any case"
)
_SECONDS = ",.2f"
_COUNT = ",.0f"
_ROWS = (
    _Row("jobs completed", lambda r: r.num_completed_jobs, _COUNT),
    _Row("turns answered", lambda r: r.num_turns, _COUNT),
    _Row("errors", lambda r: r.num_errors, _COUNT),
    _Row("wall time, s", lambda r: r.wall_s, _SECONDS),
    _Row("job completion, mean s", _of("job_completion_s", "mean"), _SECONDS),
    _Row("  p50", _of("job_completion_s", "p50"), _SECONDS),
    _Row("  p95", _of("job_completion_s", "p95"), _SECONDS),
    _Row("  max", _of("job_completion_s", "max"), _SECONDS),
    _Row("TTFT first turn, mean s", _of("first_ttft_s", "mean"), _SECONDS),
    _Row("  p50", _of("first_ttft_s", "p50"), _SECONDS),
    _Row("  p99", _of("first_ttft_s", "p99"), _SECONDS),
    _Row("TTFT returning turn, mean s", _of("returning_ttft_s", "mean"), _SECONDS),
    _Row("  p50", _of("returning_ttft_s", "p50"), _SECONDS),
    _Row("  p99", _of("returning_ttft_s", "p99"), _SECONDS),
    _Row("prompt tokens", lambda r: r.prompt_tokens, _COUNT),
    _Row("  from cache", lambda r: r.cached_tokens, _COUNT),
    _Row("  from cache, %", _share_cached, ".1f"),
    _Row("  recomputed", lambda r: r.recomputed_tokens, _COUNT),
    _Row("output tokens", lambda r: r.output_tokens, _COUNT),
    _Row("preemptions", lambda r: r.num_preemptions, _COUNT),
    _Row("KV pool in use at the end, %", _kv_usage_at_end, ".1f"),
    _Row("turns pinned (receipts)", lambda r: r.num_pinned_turns, _COUNT),
)


def render(results: Sequence[RunResult]) -> str:
    """A table with a column per result, and for two results their ratio; then the notes."""
    rows = [*_ROWS, *_pin_rows(results)]
    heads = [result.name for result in results]
    if len(results) == 2:
        heads.append(f"{heads[1]} / {heads[0]}")
    lines = [["", *heads]]
    for row in rows:
        values = [row.value(result) for result in results]
        cells = ["-" if value is None else format(value, row.form) for value in values]
        if len(results) == 2:
            cells.append(_ratio(values[0], values[1]))
        lines.append([row.label, *cells])
    notes = dict.fromkeys(note for result in results for note in _notes(result))
    return _aligned(lines) + "".join(f"\n* {note}" for note in notes)


def _pin_rows(results: Sequence[RunResult]) -> list[_Row]:
    """One row for every way in which a pin ended in any of the results."""
    causes = sorted({cause for result in results for cause in result.pins_ended})
    return [
        _Row(f"  pins {cause.replace('_', ' ')}", lambda r, c=cause: r.pins_ended.get(c, 0), _COUNT)  # type: ignore[misc]
        for cause in causes
    ]


def _ratio(before: Value, after: Value) -> str:
    return f"{after / before:.2f}x" if before and after is not None else "-"


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    text = [
        line[0].ljust(widths[0])
        + "".join("  " + c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))
        for line in lines
    ]
    return "\n".join([text[0].rstrip(), rule, *text[1:]])


def _notes(result: RunResult) -> list[str]:
    """What a reader must know before quoting the numbers."""
    notes = [_RECOMPUTED, *result.notes]
    if result.num_cut_jobs:
        notes.append(
            f"{result.num_cut_jobs} of {result.num_jobs} jobs were cut at the last turn within the limits"
        )
    if result.num_unlike_recording:
        notes.append(
            f"{result.name}: {result.num_unlike_recording} answers differ from the recording "
            "(tokens were not forced), so later prompts share less with earlier turns"
        )
    return notes


def main(argv: Sequence[str] | None = None) -> int:
    """Print results of ``continuum bench --json`` side by side."""
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a result of `bench --json FILE`")
    arguments = parser.parse_args(argv)
    try:
        print(render([run for path in arguments.files for run in read_results(path).runs]))
    except EvalError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
