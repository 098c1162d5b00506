"""Explains one job's time in prose and numbers, for an operator who must know why it was slow.

Every second of its wall time is in exactly one line of the account, and the printed lines add up to the
printed total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from eval.trace.analysis.jobs import (
    GapLife,
    JobLife,
    Parked,
    PinDecision,
    PinLife,
    PinOutcome,
    TurnEnd,
    TurnLife,
)
from eval.trace.analysis.lives import Lives, TraceFacts
from eval.trace.analysis.phases import PHASE_NAMES, Phase, Seconds, Span
from eval.trace.analysis.pinned_tokens import pinned_tokens
from eval.trace.analysis.writing import count, milliseconds, parts_of, percent, seconds, table, wrapped
from tracing.plain_text import plain_name

_INPUTS = {
    "tool_observations": "calls of this kind seen",
    "tool_median_s": "median time to return",
    "tool_correction": "learned correction of that time, factor",
    "all_observations": "calls seen in all",
    "prefill_s": "to compute it again",
    "reload_s": "to load it again",
    "pool_share": "share of the pool",
    "last_probability": "probability that no turn follows",
    "answer_return": "share of turns without a call that another one soon followed",
    "queue_delay_s": "mean wait of returning turns without KV",
    "memoryfulness": "memoryfulness of job lengths",
    "called_tools": "it called tools",
    "tools": "calls",
    "elapsed_s": "since the turn ended",
}
_ENDS = {
    TurnEnd.ENDED: "ended",
    TurnEnd.ABORTED: "was aborted",
    TurnEnd.OPEN: "is still under way where the trace ends",
    TurnEnd.LOST: "ended while events were missing, at the latest",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """A job of a trace, and the facts about it."""

    job: JobLife
    facts: TraceFacts
    owners: Mapping[str, str]
    """Job by request, for requests that revoked its pins."""

    def render(self) -> str:
        """Returns the whole explanation as text."""
        job = self.job
        parts = [self._opening(), self._account()]
        gaps = {gap.req_id: gap for gap in job.gaps}
        pins: dict[str, list[PinLife]] = {}
        for pin in job.pins:
            pins.setdefault(pin.req_id, []).append(pin)
        for turn in job.turns:
            parts.append(self._turn(turn))
            parts[-1] += [line for pin in pins.get(turn.req_id, ()) for line in self._pin(pin)]
            if turn.req_id in gaps:
                parts[-1] += self._gap(gaps[turn.req_id])
        parts.append(self._closing())
        return "\n\n".join("\n".join(map(plain_name, part)) for part in parts if part)

    def _since(self, moment_s: float) -> str:
        """Formats a moment as seconds since the job began."""
        return f"+{milliseconds(moment_s - self.job.began_s)} s"

    # ---- the job ----

    def _opening(self) -> list[str]:
        job = self.job
        turns = "1 turn" if len(job.turns) == 1 else f"{len(job.turns)} turns"
        until = "so far" if job.is_open else "from its first arrival to its last token"
        began_s = job.began_s - self.facts.began_s
        text = f"Job {job.job_id}: {turns} in {seconds(job.wall_s)} s {until}."
        text += f" It began {seconds(began_s)} s into the trace."
        worst_name, worst_s = max(
            ((name, getattr(job.seconds, name)) for name in PHASE_NAMES), key=lambda entry: entry[1]
        )
        if job.wall_s > 0:
            share = percent(worst_s, job.wall_s)
            text += f" Most of it, {seconds(worst_s)} s ({share}), went into {PHASE_NAMES[worst_name]}."
        if job.recomputed_tokens:
            text += f" {job.recomputed_tokens:,} tokens that it had already computed were recomputed."
        if job.overlaps:
            text += (
                " Some of its turns ran in parallel: a second that several share counts for the most advanced"
                " one, so the turns' own times add up to more than the job's."
            )
        if any(not turn.arrival_told for turn in job.turns):
            text += " It had begun before the trace: what came before is not in it."
        return wrapped(text)

    def _account(self) -> list[str]:
        """Returns the table whose seconds add up."""
        job = self.job
        names = [each.name for each in fields(Seconds)]
        values = [getattr(job.seconds, name) for name in names]
        written = parts_of(values, job.wall_s)
        rows = [
            [PHASE_NAMES[name], milliseconds(part), percent(value, job.wall_s)]
            for name, value, part in zip(names, values, written, strict=True)
            if part
        ]
        rows.append(["in all", milliseconds(job.wall_s), ""])
        return table(["where its time went", "s", ""], rows)

    def _closing(self) -> list[str]:
        job = self.job
        if job.finished_s is not None:
            return wrapped(
                f"{self._since(job.finished_s)} the job was finished: none of its KV was held any longer."
            )
        if job.is_cut_in_calls:
            return wrapped("The trace was cut off while these calls ran.")
        if not job.is_open:
            return wrapped("The job was not reported as finished; the trace ends without another turn of it.")
        return []

    # ---- a turn ----

    def _turn(self, turn: TurnLife) -> list[str]:
        words = [
            f"Turn {turn.number} ({turn.req_id}) {_ENDS[turn.end]} after {milliseconds(turn.duration_s)} s."
        ]
        words += [self._prompt(turn), self._drafts(turn), self._predicted(turn)]
        if turn.diverged_at_token is not None:
            words.append(
                f"Its prompt diverges from what the job had computed at token {turn.diverged_at_token:,}."
            )
        lines = wrapped(f"{self._since(turn.arrived_s)}  " + " ".join(filter(None, words)))
        written = parts_of([span.duration_s for span in turn.spans], turn.duration_s)
        for span, part in zip(turn.spans, written, strict=True):
            told = f"{milliseconds(part):>11} s  {self._span(turn, span)}"
            lines += wrapped(told, indent=2, hang=15)
        return lines

    @staticmethod
    def _predicted(turn: TurnLife) -> str:
        if turn.predicted_excess_s is None:
            return ""
        more = "more" if turn.predicted_excess_s >= 0 else "less"
        excess = f"{seconds(abs(turn.predicted_excess_s))} s {more}"
        return f"Its job was predicted to take {excess} than a usual one."

    def _prompt(self, turn: TurnLife) -> str:
        text = f"Prompt {turn.num_prompt_tokens:,} tokens, answer {turn.num_output_tokens:,}."
        if turn.started_s is None:
            return f"{text} It never ran."
        cached = percent(turn.cached_tokens, turn.num_prompt_tokens)
        text += f" Cached when it was admitted: {turn.cached_tokens:,} ({cached})"
        if turn.loaded_tokens:
            text += f", {turn.loaded_tokens:,} of them in host memory"
            text += f" ({turn.disk_tokens:,} read from disk)" if turn.disk_tokens else ""
        text += "."
        if turn.recomputed_tokens:
            known = f"{turn.num_known_tokens:,} that its job had"
            text += f" Recomputed: {turn.recomputed_tokens:,} of the {known}."
        return text

    @staticmethod
    def _drafts(turn: TurnLife) -> str:
        drafts = turn.drafts
        if not drafts.num_drafts:
            return ""
        accepted = f"{drafts.num_accepted_tokens:,} of {drafts.num_draft_tokens:,} draft tokens"
        return f"It answered in {turn.num_output_steps:,} steps: {accepted} were accepted."

    def _span(self, turn: TurnLife, span: Span) -> str:
        told = self._wait(turn, span) if span.phase is Phase.WAIT else _PHASES[span.phase]
        if span.phase is Phase.PREFILL and turn.cached_tokens:
            told += f" ({turn.num_prompt_tokens - turn.cached_tokens:,} tokens that were not cached)"
        return told

    def _wait(self, turn: TurnLife, span: Span) -> str:
        place_s = span.duration_s - span.memory_s
        if span.memory_s <= 0:
            told = "waiting for its place in a step"
        elif place_s <= 0.0005:
            told = "waiting for memory"
        else:
            place = f"{seconds(place_s)} s for its place in a step"
            told = f"waiting: {seconds(span.memory_s)} s for memory, {place}"
        around = []
        if turn.mean_waiting is not None and turn.mean_waiting >= 1.5:
            around.append(f"on average {count(turn.mean_waiting)} requests were waiting")
        num_blocks = self.facts.header.num_blocks
        if span.memory_s > 0 and turn.mean_pinned_blocks and num_blocks:
            around.append(f"pins held {percent(turn.mean_pinned_blocks, num_blocks)} of the pool")
        if turn.parked is not None:
            around.append(_parked(turn.parked))
        return told + (f" ({', '.join(around)})" if around else "")

    # ---- between turns ----

    def _gap(self, gap: GapLife) -> list[str]:
        called = f"called {gap.called}" if gap.tools else "called nothing" if gap.tools is not None else None
        if gap.duration_s is None:
            told = "no turn continues it in this trace"
        else:
            told = f"the next turn came {seconds(gap.duration_s)} s later"
        lines = wrapped(f"It {called}; {told}." if called else f"{told[0].upper()}{told[1:]}.", indent=2)
        for said in gap.told:
            left = f", {seconds(said.remaining_s)} s left" if said.remaining_s is not None else ""
            lines += wrapped(f"{self._since(said.now)} its client said: {said.state}{left}.", indent=4)
        return lines

    def _pin(self, pin: PinLife) -> list[str]:
        num_tokens = pinned_tokens(self.facts.header, pin.num_blocks)
        size = f"{pin.num_blocks:,} blocks ({num_tokens:,} tokens)"
        if pin.outcome is PinOutcome.REFUSED:
            lines = wrapped(f"Its {size} were not held: {pin.refused_for or 'no room for it'}.", indent=2)
        else:
            lines = wrapped(f"Pin {pin.pin_id} held its {size}.", indent=2)
        for decision in pin.decisions:
            lines += self._decision(pin, decision, with_inputs=decision is pin.last_decision)
        if not pin.decisions and pin.outcome is not PinOutcome.REFUSED:
            lines += wrapped("Only until the engine knew which tools the turn had called.", indent=4)
        for shrink in pin.shrinks[:MAX_SHRINKS]:
            taken = f"{shrink.num_blocks:,} {'block' if shrink.num_blocks == 1 else 'blocks'} of it"
            told = f"{self._since(shrink.now)} {taken} went to {self._who(shrink.by)}."
            lines += wrapped(told, indent=4)
        rest = pin.shrinks[MAX_SHRINKS:]
        if rest:
            taken = f"{sum(shrink.num_blocks for shrink in rest):,} blocks"
            lines += wrapped(f"{len(rest)} more times a part of it was revoked, {taken} in all.", indent=4)
        if pin.outcome is not PinOutcome.REFUSED:
            lines += wrapped(self._pin_end(pin), indent=4)
        return lines

    def _decision(self, pin: PinLife, decision: PinDecision, *, with_inputs: bool) -> list[str]:
        """Describes a decision; the last one with all its inputs, as earlier ones differ little."""
        elapsed_s = decision.inputs.get("elapsed_s")  # an early result's pin begins later than its turn ended
        ended_s = decision.now - elapsed_s if isinstance(elapsed_s, float) else pin.began_s
        until = f"hold until {self._since(ended_s + decision.ttl_s)}, {seconds(decision.ttl_s)} s in all"
        verdict = until if decision.ttl_s > 0 else "unpin it"
        because = f": {decision.reason}" if decision.reason else ""
        lines = wrapped(f"{self._since(decision.now)} {verdict}{because}.", indent=4, hang=2)
        if with_inputs:
            inputs = [
                f"{_INPUTS.get(name, name)} {_input(name, value)}"
                for name, value in decision.inputs.items()
                if value is not None and value != ""
            ]
            lines += wrapped(
                f"Rule {decision.rule}, given: {'; '.join(inputs) or 'nothing'}.", indent=6, hang=2
            )
        return lines

    def _pin_end(self, pin: PinLife) -> str:
        when = self._since(pin.ended_s)
        held = f"after {seconds(pin.held_s)} s"
        match pin.outcome:
            case PinOutcome.HANDED_OVER:
                work = "computing" if pin.reload_s is None else "loading"
                return f"{when} it was taken over by the next turn {held}{_spared(pin, work)}."
            case PinOutcome.EXPIRED:
                return f"{when} it expired {held}: no turn had taken it over."
            case PinOutcome.REVOKED:
                return f"{when} it was revoked {held}, for {self._who(pin.revoked_by)}."
            case PinOutcome.RELEASED:
                return f"{when} it was unpinned {held}."
            case PinOutcome.SUPERSEDED:
                return f"{when} it was unpinned {held}: its job went on without it."
            case _:
                return f"It is still held where the trace ends, {held}."

    def _who(self, req_id: str | None) -> str:
        if req_id is None:
            return "another pin, as the pin budget was used up"
        job_id = self.owners.get(req_id)
        if job_id == self.job.job_id:
            return f"a turn of the same job ({req_id})"
        return f"{req_id} of job {job_id}" if job_id is not None else f"request {req_id}, which is of no job"


_PHASES = {
    Phase.GRAMMAR: "waiting for the grammar of its answer to be compiled",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
    Phase.PREEMPTED: "preempted: others needed its blocks, and it waited to run again",
    Phase.RECOMPUTE: "recomputing what it had lost",
    Phase.LOAD: "loading its KV from host memory or disk",
}
MAX_SHRINKS = 3
"""The most revocations of a pin that are listed one by one."""


def _input(name: str, value: float | int | str | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if name.endswith("_s"):
        return f"{seconds(value)} s"
    return format(value, ".2g") if abs(value) < 1 else count(round(value, 2))


def explain(facts: TraceFacts, lives: Lives, owners: Mapping[str, str]) -> Explanation | None:
    """Explains the one job that was read; None if it has no turn."""
    jobs: Sequence[JobLife] = lives.jobs()
    if not jobs:
        return None
    return Explanation(replace(jobs[0], trace_was_cut=facts.report.end is None), facts, owners)


def _spared(pin: PinLife, work: str) -> str:
    """Returns what a pin saved the turn that took it over, as the end of a sentence."""
    if pin.needed_blocks is None:
        return ""
    if not pin.needed_blocks:
        return ": its blocks would have stayed cached without it"
    kept = f", which kept {pin.needed_blocks} blocks from being evicted"
    return f"{kept} and spared {seconds(pin.spared_s)} s of {work}" if pin.spared_s is not None else kept


def _parked(parked: Parked) -> str:
    """Why the job could not begin."""
    begun = f"jobs that had begun were likely to need {parked.needed_blocks:,} blocks"
    if parked.own_blocks:
        ahead = f" {seconds(parked.ahead_s)} s later" if parked.ahead_s else ""
        begun += f"{ahead}, this one {parked.own_blocks:,}"
    return f"{begun}; all may need {parked.allowed_blocks:,}"
