"""Prints results, in one column or side by side. ``python -m eval.report FILE FILE`` compares files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from eval.errors import EvalError, WorkloadError
from eval.metrics import BenchResult, Distribution

Value = float | int | None


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    value: Callable[[BenchResult], Value]
    form: str
    """How a value is written."""


def _of(name: str, statistic: str) -> Callable[[BenchResult], Value]:
    """A getter of one statistic of one distribution; None where nothing was measured."""

    def get(result: BenchResult) -> Value:
        distribution: Distribution | None = getattr(result, name)
        return None if distribution is None else getattr(distribution, statistic)

    return get


def _share_cached(result: BenchResult) -> Value:
    return 100 * result.cached_tokens / result.prompt_tokens if result.prompt_tokens else None


def _kv_usage_at_end(result: BenchResult) -> Value:
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


def render(results: Sequence[BenchResult]) -> str:
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


def _pin_rows(results: Sequence[BenchResult]) -> list[_Row]:
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


def _notes(result: BenchResult) -> list[str]:
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


def read_result(path: Path) -> BenchResult:
    """A result as ``continuum bench --json`` wrote it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except OSError as error:
        raise WorkloadError(f"Cannot read the result {path}: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise WorkloadError(f"{path} is not a result of `continuum bench --json`: {error}.") from error


def write_result(path: Path, result: BenchResult) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Print results of ``continuum bench --json`` side by side."""
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a result of `bench --json FILE`")
    arguments = parser.parse_args(argv)
    try:
        print(render([read_result(path) for path in arguments.files]))
    except EvalError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
