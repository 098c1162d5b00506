"""A trace as tables, written to files while it is read, so that memory does not grow with the trace.

The only module that knows how a record becomes a row; ``docs/trace-tables.md`` is generated from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, Self, TypeVar

import polars as pl
import polars.selectors as cs

from eval.trace.analysis.jobs import GapLife, PinLife, TurnLife
from eval.trace.analysis.lives import TraceFacts, read_lives
from eval.trace.analysis.phases import Phase, Seconds, Span, job_seconds
from eval.trace.analysis.pool import StepLife
from eval.trace.analysis.trace_totals import TraceTotals
from tracing.plain_text import FORMULA

CHUNK_ROWS = 1 << 15
"""Rows of a table in memory before they are written."""
SECONDS = tuple(each.name for each in fields(Seconds))
_BY_ITSELF = pl.coalesce("job_id", "req_id").alias("job_id")
"""The key of a request without a job, like ``job_of``."""

Record = TypeVar("Record")
Cell = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table and its description."""

    name: str
    dtype: type[pl.DataType]
    told: str
    path: str = ""
    """Its path in a record; by default the column's name."""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A span and its owner."""

    of: TurnLife | GapLife
    span: Span


_TOLD_SECONDS = {
    "queue_s": "waiting for the step in flight, the token budget, a free batch slot or the policy's consent",
    "memory_s": "waiting for memory: for its own, or until others ahead of it have theirs",
    "grammar_s": "its grammar being compiled, before it joined the queue",
    "load_s": "its KV on its way from host memory or disk, and up to the step after",
    "prefill_s": "its prompt being computed, up to the first token",
    "decode_s": "its answer being made",
    "preempted_s": "it had lost its blocks and waited to run again",
    "recompute_s": "recomputing what a preemption threw away",
    "tool_s": "between two turns, while calls run or seem to run",
    "client_s": "between two turns, without calls, or without a report of calls",
}

STEPS: tuple[Column, ...] = (
    Column("step", pl.Int64, "number of the step, from 0"),
    Column("now", pl.Float64, "when it was planned, s on the engine's clock"),
    Column("until_s", pl.Float64, "when the next one was, or the trace ends"),
    Column("num_running", pl.Int32, "requests running before the decision"),
    Column("num_waiting", pl.Int32, "requests in the queue"),
    Column("num_loading", pl.Int32, "requests whose KV is on its way from host memory or disk"),
    Column("running_blocks", pl.Int64, "blocks of requests that run or load and no pin holds"),
    Column("pinned_blocks", pl.Int64, "blocks that pins hold"),
    Column("free_blocks", pl.Int64, "free blocks, cached ones included"),
    Column("empty_blocks", pl.Int64, "of those: without a cached prefix; null if not known"),
    Column("total_blocks", pl.Int64, "blocks of the pool"),
    Column("num_pins", pl.Int32, "pins"),
    Column("host_blocks", pl.Int64, "copies in host memory"),
    Column("token_budget", pl.Int32, "tokens that the step might schedule"),
    Column("tokens", pl.Int32, "tokens that it scheduled"),
    Column("num_scheduled", pl.Int32, "requests that got them"),
    Column("num_admitted", pl.Int32, "requests that began to run"),
    Column("num_resumed", pl.Int32, "requests that began to run again"),
    Column("num_preempted", pl.Int32, "requests that lost their blocks"),
    Column("loaded_blocks", pl.Int32, "blocks that begin to be loaded from host memory"),
    Column("stored_blocks", pl.Int32, "blocks that are copied to host memory"),
)

TURNS: tuple[Column, ...] = (
    Column("job_id", pl.String, "null: a request of no job"),
    Column("req_id", pl.String, "the request, as the engine names it"),
    Column("turn", pl.Int32, "1 for the job's first; a retry repeats a number", "number"),
    Column("arrived_s", pl.Float64, "s on the engine's clock"),
    Column(
        "arrival_told", pl.Boolean, "false: it was under way when the trace began, and is first seen then"
    ),
    Column("started_s", pl.Float64, "when it first joined the batch; null if it never did"),
    Column("first_token_s", pl.Float64, "null: none came, or it came before the trace"),
    Column("ended_s", pl.Float64, "of an open one: where the trace ends"),
    Column(
        "end",
        pl.String,
        "ended | aborted | open (where the trace ends) | lost (its end was not written)",
        "end.value",
    ),
    Column("ttft_s", pl.Float64, "from arrival to first token"),
    Column("duration_s", pl.Float64, "from arrival to end"),
    Column("num_prompt_tokens", pl.Int64, "tokens of the prompt"),
    Column("num_output_tokens", pl.Int64, "tokens of the answer"),
    Column("num_known_tokens", pl.Int64, "of the prompt: computed by the turn it continues, in full blocks"),
    Column("cached_tokens", pl.Int64, "of the prompt: found when it was first admitted"),
    Column("loaded_tokens", pl.Int64, "of those: from host memory or disk"),
    Column("disk_tokens", pl.Int64, "of those: read from disk"),
    Column("recomputed_tokens", pl.Int64, "known, and recomputed"),
    Column("num_preemptions", pl.Int32, "times that it lost its blocks"),
    Column("drafted_tokens", pl.Int64, "draft tokens that were verified", "drafts.num_draft_tokens"),
    Column("accepted_tokens", pl.Int64, "draft tokens that were accepted", "drafts.num_accepted_tokens"),
    Column("gap_s", pl.Float64, "since the end of the turn that it continues; null: it continues none"),
    Column("diverged_at_token", pl.Int64, "where its prompt diverges from what its job had computed"),
    Column("mean_waiting", pl.Float64, "requests in the queue while it waited"),
    Column("mean_pinned_blocks", pl.Float64, "blocks that pins held while it waited"),
    *(
        Column(name, pl.Float64, told, f"seconds.{name}")
        for name, told in _TOLD_SECONDS.items()
        if name not in ("tool_s", "client_s")
    ),
)

SPANS: tuple[Column, ...] = (
    Column("job_id", pl.String, "null: of a request of no job", "of.job_id"),
    Column("req_id", pl.String, "the turn, or the one before the gap", "of.req_id"),
    Column("turn", pl.Int32, "its number", "of.number"),
    Column("phase", pl.String, " | ".join(phase.value for phase in Phase), "span.phase.value"),
    Column("start_s", pl.Float64, "s on the engine's clock", "span.start_s"),
    Column("end_s", pl.Float64, "the same", "span.end_s"),
    Column("memory_s", pl.Float64, "of a wait: the part of it for memory", "span.memory_s"),
)

GAPS: tuple[Column, ...] = (
    Column("job_id", pl.String, "the job"),
    Column("req_id", pl.String, "the turn that ended"),
    Column("turn", pl.Int32, "its number", "number"),
    Column("started_s", pl.Float64, "when it ended"),
    Column("ended_s", pl.Float64, "when the turn arrived that continues it; null: none has"),
    Column("duration_s", pl.Float64, "between the two"),
    Column("next_req_id", pl.String, "that turn"),
    Column(
        "tools",
        pl.String,
        "keys of the calls, separated by blanks; empty: no call; null: not known",
        "called",
    ),
    Column("num_told", pl.Int32, "what its client said of the calls, times", "num_told"),
)

PINS: tuple[Column, ...] = (
    Column("pin_id", pl.Int64, "null: it was refused"),
    Column("job_id", pl.String, "the job"),
    Column("req_id", pl.String, "the turn that left it"),
    Column("began_s", pl.Float64, "s on the engine's clock"),
    Column("ended_s", pl.Float64, "of an open one: where the trace ends"),
    Column("held_s", pl.Float64, "between the two"),
    Column(
        "outcome", pl.String, "handed_over | expired | revoked | released | refused | open", "outcome.value"
    ),
    Column("revoked_by", pl.String, "request for which it was revoked"),
    Column("num_blocks", pl.Int64, "blocks at first"),
    Column("blocks_at_end", pl.Int64, "blocks at its end"),
    Column("num_shrinks", pl.Int32, "times that a part of it was revoked"),
    Column("block_s", pl.Float64, "blocks times seconds that it held"),
    Column("vain_block_s", pl.Float64, "of that: blocks that no turn took over"),
    Column("granted_s", pl.Float64, "for how long the last decision would hold it, from the turn's end"),
    Column("deadline_s", pl.Float64, "the last deadline that it had"),
    Column("num_decisions", pl.Int32, "decisions about it"),
    Column("rule", pl.String, "rule of the last decision"),
    Column("reason", pl.String, "reason of the last decision"),
    Column(
        "expected_s",
        pl.Float64,
        "median of the time to return, as the last decision saw it; null: nothing learned",
    ),
    Column("again_s", pl.Float64, "to load all of it again, or compute it: the policy's estimate"),
    Column(
        "needed_blocks",
        pl.Int64,
        "blocks that would have been evicted without the pin; null: not in the trace",
    ),
    Column("spared_s", pl.Float64, "of again_s: for those blocks, if a turn took the pin over"),
)

JOBS: tuple[Column, ...] = (
    Column("job_id", pl.String, "the job; of a request of no job, which is one by itself, the request"),
    Column("named", pl.Boolean, "false: a request of no job"),
    Column("began_s", pl.Float64, "arrival of its first turn, s on the engine's clock"),
    Column("ended_s", pl.Float64, "end of its last turn"),
    Column("wall_s", pl.Float64, "between the two: its completion time"),
    Column(
        "open", pl.Boolean, "a turn was under way where the trace ends or, where it was cut off, its calls"
    ),
    Column("num_turns", pl.Int32, "requests, retries included"),
    Column("num_aborted", pl.Int32, "of those: aborted"),
    Column("num_prompt_tokens", pl.Int64, "of all turns"),
    Column("num_output_tokens", pl.Int64, "of all turns"),
    Column("cached_tokens", pl.Int64, "of all turns"),
    Column("recomputed_tokens", pl.Int64, "of all turns"),
    Column("num_preemptions", pl.Int32, "of all turns"),
    Column("drafted_tokens", pl.Int64, "of all turns"),
    Column("accepted_tokens", pl.Int64, "of all turns"),
    Column("mean_ttft_s", pl.Float64, "over its turns"),
    Column("pins", pl.Int32, "branch tips that were held, or refused"),
    Column("pins_handed_over", pl.Int32, "of those: taken over by the turn they were held for"),
    Column("pins_lost", pl.Int32, "of those: expired, revoked or refused"),
    *(Column(name, pl.Float64, f"of its wall time: {told}") for name, told in _TOLD_SECONDS.items()),
)


TABLES: dict[str, tuple[str, Sequence[Column]]] = {
    "turns": ("A row per request, in the order of their ends.", TURNS),
    "jobs": ("A row per job, in the order of arrival. The last columns add up to `wall_s`.", JOBS),
    "gaps": ("A row per gap between two turns of a job, and per turn that no turn continues.", GAPS),
    "pins": ("A row per branch tip that was held or refused, in the order of their ends.", PINS),
    "spans": ("A row per stretch of a turn's life in one phase, and per gap that was closed.", SPANS),
    "steps": ("A row per step of the scheduler; the state is the one before its decision.", STEPS),
}
"""Tables by name, each with a description of its rows."""


class _Table(Generic[Record]):
    """Buffers rows and writes them to files."""

    def __init__(self, folder: Path, columns: Sequence[Column]) -> None:
        self._folder = folder
        folder.mkdir()
        self._schema = {column.name: column.dtype for column in columns}
        self._cells_of = attrgetter(*(column.path or column.name for column in columns))
        self._rows: list[tuple[Cell, ...]] = []
        self._num_files = 0

    def add(self, record: Record) -> None:
        self._rows.append(self._cells_of(record))
        if len(self._rows) >= CHUNK_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes the rows; also an empty file if there is none yet, so that there is a file to read."""
        if not self._rows and self._num_files:
            return
        columns = zip(*self._rows, strict=True) if self._rows else ([] for _ in self._schema)
        data = dict(zip(self._schema, columns, strict=True))
        pl.DataFrame(data, schema=self._schema).write_parquet(self._folder / f"{self._num_files:06d}.parquet")
        self._num_files += 1
        self._rows.clear()

    def scan(self) -> pl.LazyFrame:
        return pl.scan_parquet(self._folder / "*.parquet")


@dataclass(slots=True)
class TraceTables:
    """A trace's tables, in a folder that is deleted on ``close``; a ``LifeSink``."""

    facts: TraceFacts = field(init=False)
    finished_s: dict[str, float] = field(init=False, default_factory=dict)
    _folder: TemporaryDirectory[str] = field(init=False)
    _steps: _Table[StepLife] = field(init=False)
    _turns: _Table[TurnLife] = field(init=False)
    _spans: _Table[PhaseRow] = field(init=False)
    _gaps: _Table[GapLife] = field(init=False)
    _pins: _Table[PinLife] = field(init=False)
    _jobs: pl.DataFrame | None = field(init=False, default=None)
    totals: TraceTotals = field(init=False, default_factory=TraceTotals)

    def __post_init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="continuum-trace-")
        folder = Path(self._folder.name)
        self._steps = _Table(folder / "steps", STEPS)
        self._turns = _Table(folder / "turns", TURNS)
        self._spans = _Table(folder / "spans", SPANS)
        self._gaps = _Table(folder / "gaps", GAPS)
        self._pins = _Table(folder / "pins", PINS)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a whole trace. TraceError if it is not a trace."""
        tables = cls()
        try:
            tables.facts = read_lives(path, tables)
            for table in (tables._steps, tables._turns, tables._spans, tables._gaps, tables._pins):
                table.flush()
            tables.totals.close()
        except BaseException:
            tables.close()
            raise
        return tables

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._folder.cleanup()

    # ---- a LifeSink ----

    def turn(self, turn: TurnLife) -> None:
        self.totals.turn(turn)
        self._turns.add(turn)
        for span in turn.spans:
            self._spans.add(PhaseRow(turn, span))

    def gap(self, gap: GapLife) -> None:
        self._gaps.add(gap)
        if gap.span is not None:
            self._spans.add(PhaseRow(gap, gap.span))

    def pin(self, pin: PinLife) -> None:
        self.totals.pin(pin)
        self._pins.add(pin)

    def step(self, step: StepLife) -> None:
        self.totals.step(step)
        self._steps.add(step)

    def finished(self, job_id: str, now: float) -> None:
        self.finished_s[job_id] = now

    # ---- the tables ----

    def table(self, name: str) -> pl.LazyFrame:
        """Returns one of ``TABLES``."""
        frame: pl.LazyFrame = self.jobs.lazy() if name == "jobs" else getattr(self, name)
        return frame

    def for_spreadsheets(self, name: str) -> pl.LazyFrame:
        """Returns the table with escaped texts: names from requests may begin like formulas."""
        texts = cs.string()
        safe = pl.when(texts.str.contains(FORMULA)).then("'" + texts).otherwise(texts)
        return self.table(name).with_columns(safe.name.keep())

    def num_rows(self, name: str) -> int:
        return int(self.table(name).select(pl.len()).collect().item())

    @property
    def steps(self) -> pl.LazyFrame:
        return self._steps.scan()

    @property
    def turns(self) -> pl.LazyFrame:
        return self._turns.scan()

    @property
    def spans(self) -> pl.LazyFrame:
        return self._spans.scan()

    @property
    def gaps(self) -> pl.LazyFrame:
        return self._gaps.scan()

    @property
    def pins(self) -> pl.LazyFrame:
        return self._pins.scan()

    @property
    def jobs(self) -> pl.DataFrame:
        """A row per job, in the order of their arrival."""
        if self._jobs is None:
            self._jobs = self._make_jobs()
        return self._jobs

    def _make_jobs(self) -> pl.DataFrame:
        turns = (
            self.turns.with_columns(_BY_ITSELF, named=pl.col("job_id").is_not_null())
            .group_by("job_id")
            .agg(
                named=pl.col("named").all(),
                began_s=pl.col("arrived_s").min(),
                ended_s=pl.col("ended_s").max(),
                wall_s=pl.col("ended_s").max() - pl.col("arrived_s").min(),
                open=(pl.col("end") == "open").any(),
                num_turns=pl.len().cast(pl.Int32),
                num_aborted=(pl.col("end") == "aborted").sum().cast(pl.Int32),
                num_prompt_tokens=pl.col("num_prompt_tokens").sum(),
                num_output_tokens=pl.col("num_output_tokens").sum(),
                cached_tokens=pl.col("cached_tokens").sum(),
                recomputed_tokens=pl.col("recomputed_tokens").sum(),
                num_preemptions=pl.col("num_preemptions").sum().cast(pl.Int32),
                drafted_tokens=pl.col("drafted_tokens").sum(),
                accepted_tokens=pl.col("accepted_tokens").sum(),
                mean_ttft_s=pl.col("ttft_s").mean(),
            )
        )
        lost = pl.col("outcome").is_in(["expired", "revoked", "refused"])
        pins = self.pins.group_by("job_id").agg(
            pins=pl.len().cast(pl.Int32),
            pins_handed_over=(pl.col("outcome") == "handed_over").sum().cast(pl.Int32),
            pins_lost=lost.sum().cast(pl.Int32),
        )
        # The gap after the job's last turn is the last of its gaps.
        awaits = pl.col("ended_s").is_null() & (pl.col("tools").fill_null("") != "")
        last_gaps = self.gaps.group_by("job_id").agg(
            last_gap_s=pl.col("started_s").max(), awaits=awaits.sort_by("started_s").last()
        )
        rows = list(self._job_seconds())
        schema = {"job_id": pl.String, **dict.fromkeys(SECONDS, pl.Float64)}
        seconds = pl.LazyFrame(rows, schema=schema, orient="row")
        return (
            turns.join(pins, on="job_id", how="left")
            .join(last_gaps, on="job_id", how="left")
            .with_columns(open=pl.col("open") | self._cut_in_calls())
            .join(seconds, on="job_id", how="left")
            .with_columns(
                pl.col("pins", "pins_handed_over", "pins_lost").fill_null(0), pl.col(SECONDS).fill_null(0.0)
            )
            .sort("began_s", "job_id")
            .select(column.name for column in JOBS)
            .collect()
        )

    def _cut_in_calls(self) -> pl.Expr:
        """Like ``JobLife.is_cut_in_calls``."""
        if self.facts.report.end is not None:
            return pl.lit(False)
        last = (pl.col("last_gap_s") >= pl.col("ended_s")) & pl.col("awaits")
        return last.fill_null(False) & ~pl.col("job_id").is_in(list(self.finished_s))

    def _job_seconds(self) -> Iterator[tuple[str, *tuple[float, ...]]]:
        """Yields each job's wall time by phase: every moment counts for one phase."""
        spans = (
            self.spans.select(_BY_ITSELF, "phase", "start_s", "end_s", "memory_s")
            .sort("job_id", "start_s")
            .collect(engine="streaming")
        )
        for job_id, rows in groupby(spans.iter_rows(), key=lambda row: row[0]):
            seconds = job_seconds(
                [Span(Phase(phase), start, end, memory) for _, phase, start, end, memory in rows]
            )
            yield (job_id, *(getattr(seconds, name) for name in SECONDS))


def describe_tables() -> str:
    """Returns ``docs/trace-tables.md``."""
    parts = [_ABOUT]
    for name, (about, columns) in TABLES.items():
        parts.append(f"\n## {name}\n\n{about}\n\n| column | type | what it says |\n|---|---|---|\n")
        for column in columns:
            told = column.told.replace("|", "\\|")
            parts.append(f"| `{column.name}` | {column.dtype.__name__} | {told} |\n")
    return "".join(parts)


_ABOUT = """\
# Tables of a trace

What `continuum trace export FILE --format csv|parquet --out FOLDER` writes: one file per table.
Times are seconds on the engine's clock (monotonic); `monotonic_s` and `wall_time_s` of the header
of the trace ([trace.md](trace.md)) tie them to the calendar. An empty cell (CSV) or null (Parquet)
says that it is not known, or was not. In CSV a text that a spreadsheet would take for a formula has
an apostrophe before it.
"""
