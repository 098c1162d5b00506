"""Studies whether the pins paid: what they saved against what they held, by what had been called; pins held
in vain and pins ended too early; and how the granted time compares with the actual time.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import polars as pl

from eval.trace.analysis.distribution import Distribution
from eval.trace.analysis.pinned_tokens import pinned_tokens
from eval.trace.analysis.tables import TraceTables
from eval.trace.analysis.writing import NOTHING, count, percent, seconds, table, wrapped

NO_CALL = "(no call)"
UNTOLD = "(not told)"
ALL = "all"

Row = TypeVar("Row")


class OutcomeTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Pins with the same outcome."""

    outcome: str
    count: int
    block_s: float
    """Blocks times seconds that they held."""
    mean_held_s: float
    spared_s: float
    """Seconds of computing, or of loading if there are copies, that they saved: the policy's estimate for the
    blocks that would have been evicted without them."""
    untold: int
    """Pins for which the trace does not record ``spared_s``."""


class ToolPins(msgspec.Struct, frozen=True, kw_only=True):
    """The pins of turns with the same calls."""

    tools: str
    """Keys of the called tools."""
    count: int
    handed_over: int
    spared_s: float
    block_s: float
    in_vain: int
    """Pins that no turn took over: the next turn did not come, or came too late."""
    in_vain_block_s: float
    """Blocks x seconds retained that no turn took over, including revoked parts."""
    too_early: int
    """Pins that ended, or were refused, before the next turn, which then recomputed or reloaded."""
    too_early_s: float
    """Seconds of computing or loading that this cost, by the policy's estimate."""


class ToolTtl(msgspec.Struct, frozen=True, kw_only=True):
    """The time granted to pins, compared with the time until the next turn."""

    tools: str
    granted_s: Distribution
    gap_s: Distribution
    covered: float
    """Share of the gaps that were no longer than the granted time."""
    expected: int
    """Gaps for which a median had been learned."""
    below_expected: float | None
    """Share of these that were no longer than that median: one half, if it is right."""


class PinStudy(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``continuum trace pins --json``."""

    outcomes: list[OutcomeTotals]
    tools: list[ToolPins]
    """Sorted by block-seconds, the most first; then the total."""
    ttl: list[ToolTtl]
    """Decisions to retain whose next turn came, by kind of calls, the most frequent first; then the total."""
    pool_block_s: float
    """All blocks of the pool times the trace's duration."""


def study_pins(tables: TraceTables) -> PinStudy:
    """Returns the figures of all pins in a trace."""
    pins = _with_returns(tables)
    facts = tables.facts
    return PinStudy(
        outcomes=[
            OutcomeTotals(**row)
            for row in pins.group_by("outcome")
            .agg(
                count=pl.len(),
                block_s=pl.col("block_s").sum(),
                mean_held_s=pl.col("held_s").mean(),
                spared_s=pl.col("spared_s").sum(),
                untold=pl.col("spared_s").is_null().sum(),
            )
            .sort(["count", "outcome"], descending=[True, False])
            .iter_rows(named=True)
        ],
        tools=_by_tools(pins),
        ttl=_ttl_by_tools(pins),
        pool_block_s=facts.duration_s * facts.header.num_blocks,
    )


def _with_returns(tables: TraceTables) -> pl.DataFrame:
    """Returns a row per pin, with its turn's calls, when the next turn came, and what that recomputed."""
    header = tables.facts.header
    gaps = tables.gaps.select("req_id", "tools", "duration_s", "next_req_id", came_s="ended_s")
    lost_tokens = pl.col("recomputed_tokens") + pl.col("loaded_tokens")
    returns = tables.turns.select(next_req_id="req_id", again_tokens=lost_tokens)
    held_tokens = (pl.col("num_blocks") * header.block_size).clip(lower_bound=1)
    if header.kv_group_windows or header.num_states:
        num_tokens = pl.col("num_blocks").map_elements(
            lambda num_blocks: pinned_tokens(header, num_blocks), return_dtype=pl.Int64
        )
        held_tokens = num_tokens.clip(lower_bound=1)
    again = (pl.col("again_tokens") / held_tokens).clip(upper_bound=1.0).fill_null(0.0)
    lost = pl.col("outcome").is_in(["expired", "revoked", "released", "superseded", "refused"])
    came = pl.col("came_s").is_not_null()
    return (
        tables.pins.join(gaps, on="req_id", how="left")
        .join(returns, on="next_req_id", how="left")
        .with_columns(
            tools=pl.when(pl.col("tools") == "")
            .then(pl.lit(NO_CALL))
            .otherwise(pl.col("tools").fill_null(UNTOLD)),
            too_early=lost & came & (pl.col("again_tokens") > 0),
            again_cost_s=again * pl.col("again_s").fill_null(0.0),
        )
        .with_columns(in_vain=lost & (pl.col("block_s") > 0))
        .collect()
    )


def _by_tools(pins: pl.DataFrame) -> list[ToolPins]:
    totals = {
        "count": pl.len(),
        "handed_over": (pl.col("outcome") == "handed_over").sum(),
        "spared_s": pl.col("spared_s").sum(),
        "block_s": pl.col("block_s").sum(),
        "in_vain": pl.col("in_vain").sum(),
        "in_vain_block_s": pl.col("vain_block_s").sum(),
        "too_early": pl.col("too_early").sum(),
        "too_early_s": pl.col("again_cost_s").filter(pl.col("too_early")).sum(),
    }
    by_tools = pins.group_by("tools").agg(**totals).sort(["block_s", "tools"], descending=[True, False])
    rows = list(by_tools.iter_rows(named=True))
    if len(rows) != 1:
        rows += pins.select(**totals).with_columns(tools=pl.lit(ALL)).iter_rows(named=True)
    return [ToolPins(**row) for row in rows if row["count"]]


def _ttl_by_tools(pins: pl.DataFrame) -> list[ToolTtl]:
    held = pins.filter((pl.col("granted_s") > 0) & pl.col("duration_s").is_not_null())
    by_tools = held.partition_by("tools", as_dict=True)
    ordered = sorted(by_tools.items(), key=lambda entry: (-len(entry[1]), str(entry[0][0])))
    studied = [_ttl(str(tools), frame) for (tools,), frame in ordered]
    if len(ordered) > 1:
        studied.append(_ttl(ALL, held))
    return studied


def _ttl(tools: str, frame: pl.DataFrame) -> ToolTtl:
    granted, gaps = (Distribution.of(frame[name].drop_nulls()) for name in ("granted_s", "duration_s"))
    assert granted is not None and gaps is not None, "a group has rows"  # noqa: PT018
    covered = int((frame["duration_s"] <= frame["granted_s"]).sum())
    expected = frame.filter(pl.col("expected_s").is_not_null())
    below = int((expected["duration_s"] <= expected["expected_s"]).sum())
    return ToolTtl(
        tools=tools,
        granted_s=granted,
        gap_s=gaps,
        covered=covered / len(frame),
        expected=len(expected),
        below_expected=below / len(expected) if len(expected) else None,
    )


def render(study: PinStudy, limit: int) -> str:
    """Formats the study for a screen; ``limit``: the most kinds of calls."""
    if not study.outcomes:
        return "The trace has no pins: its policy has none, or does not record them."
    parts = [_render_outcomes(study), _render_tools(study.tools, limit), _render_ttl(study.ttl, limit)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _render_outcomes(study: PinStudy) -> list[str]:
    total_s = sum(each.block_s for each in study.outcomes)
    rows = [
        [
            each.outcome.replace("_", " "),
            count(each.count),
            seconds(each.mean_held_s),
            count(round(each.block_s)),
            percent(each.block_s, total_s),
            percent(each.block_s, study.pool_block_s),
            seconds(each.spared_s),
        ]
        for each in study.outcomes
    ]
    lines = table(["outcome", "pins", "held s", "block-s", "of pins", "of pool", "spared s"], rows)
    spared = sum(each.spared_s for each in study.outcomes)
    untold = sum(each.untold for each in study.outcomes)
    text = f"Pins held {percent(total_s, study.pool_block_s)} of the pool over time"
    text += f" and spared {seconds(spared)} s of computing or loading what would have been evicted"
    if spared > 0:
        text += f": {count(total_s / spared)} block-seconds for each second"
    if untold:
        text += f" (not known for {count(untold)} pins)"
    text += "; trace replay --policy fcfs shows what that cost others"
    return [*lines, *wrapped(text + ".")]


def _render_tools(tools: list[ToolPins], limit: int) -> list[str]:
    rows = [
        [
            each.tools,
            count(each.count),
            percent(each.handed_over, each.count),
            seconds(each.spared_s),
            count(round(each.block_s)),
            count(each.in_vain),
            count(round(each.in_vain_block_s)),
            count(each.too_early),
            seconds(each.too_early_s),
        ]
        for each in _shown(tools, limit)
    ]
    head = [
        "called",
        "pins",
        "taken over",
        "spared s",
        "block-s",
        "wasted",
        "block-s",
        "too early",
        "cost s",
    ]
    return [*table(head, rows), *_more(tools, limit), *wrapped(_ABOUT_REGRET)]


def _render_ttl(ttl: list[ToolTtl], limit: int) -> list[str]:
    if not ttl:
        return []
    rows = [
        [
            each.tools,
            count(each.gap_s.count),
            *(seconds(getattr(each.granted_s, name)) for name in ("p50", "p95")),
            *(seconds(getattr(each.gap_s, name)) for name in ("p50", "p95", "max")),
            percent(each.covered, 1),
            percent(each.below_expected, 1) if each.below_expected is not None else NOTHING,
        ]
        for each in _shown(ttl, limit)
    ]
    head = ["called", "gaps", "granted p50", "p95", "gap p50", "p95", "max", "covered", "below median"]
    return [*table(head, rows), *_more(ttl, limit), *wrapped(_ABOUT_TTL)]


def _shown(rows: list[Row], limit: int) -> list[Row]:
    """Returns the first rows, and the last, which is the sum."""
    return rows if len(rows) <= limit + 1 else [*rows[:limit], rows[-1]]


def _more(rows: list[ToolPins] | list[ToolTtl], limit: int) -> list[str]:
    hidden = len(rows) - limit - 1
    return [f"{hidden:,} more kinds of calls are in {ALL}"] if hidden > 0 else []


_ABOUT_REGRET = """\
Wasted: pinned, and no turn took it over. Too early: the pin ended or was refused before the next turn came,
which then recomputed or reloaded what was lost. Seconds spared and seconds that this cost are the policy's
estimates for computing, or for loading where copies are kept; they leave out the wait of a returning turn
without KV.
"""
_ABOUT_TTL = """\
Time granted and time needed, of turns that were to be held and were continued. Covered: gaps no longer than
the time granted. Below median: gaps no longer than the learned median; one half if that is right.
"""
