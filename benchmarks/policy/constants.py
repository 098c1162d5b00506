"""All constants of the agent policy and its estimator: the reason for each value, and how to vary it.

Finds those that are measured at half and at double among the policy's options. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from benchmarks.policy.promises import SUBJECT
from continuum.config import ContinuumConfig
from engine.errors import ConfigError
from eval.errors import EvalError

WHY = {
    "grace_s": "a loaded API server reports tools within tens of milliseconds; a second more costs little",
    "kind_tokens": "shorter than any agent's system prompt, longer than what all chat templates begin with",
    "min_memoryfulness": "half way between an age that tells all and one that tells nothing",
    "min_ended_jobs": "of fewer lengths a correlation is noise",
    "thrashing_share": "where a tenth is recomputed, the tiers together are too small by about as much",
    "recomputed_smoothing": "a hundred returns: fewer are noise, more outlast a change of traffic",
    "reload_smoothing": "ten loads: what one waits for a step's end should not decide",
    "first_reload_share": "an 8B model over a 50 GB/s link loads fifteen times faster than it computes",
    "patience_s": "with a host tier; 10 s are as good for returning turns, 40 cost 5 % on glm",
    "search_backoff_s": "30 times what a look at a pin takes: searches take a thirtieth of all time at most",
    "unseen_return": "nothing is known: as likely as not",
    "host_share": "a fifth of the host tier holds blocks that no request will ask for",
    "return_horizon_s": "as long as anything is held: later the copies are the first to go",
    "pool_share": "what is likely to be needed counts less than in full already: all of it",
    "pool_horizon_s": "few are held for longer, so what comes later must be recomputed in any case",
    "growth_horizon_s": "jobs of eight turns last as long; at half and double returning turns wait longer",
    "small_job_share": "a question beside agents takes less; an agent's system prompt takes more",
    "pool_price": "who comes back to nothing waits for room and holds blocks meanwhile: about as much again",
    "cheap_reload_share": "a fast link needs a tenth of computing; half is a link too slow to rely on",
    "prefill_smoothing": "five steps of a size: what a step takes is nearly the same each time",
    "first_tokens_per_s": "an order of magnitude between a CPU and an H100; gone after the first turn",
    "prior_strength": "after a few calls of its own a kind speaks for itself",
    "half_life": "hundreds of calls make a curve, and tools change with what they work on",
    "half_life_s": "what was seen a week ago may be another version of everything",
    "num_bins": "a factor of 1.15 from one to the next: finer than durations repeat",
    "min_judged": "some calls for each of the strengths to be distinguished",
    "last_after_call": "who calls a tool wants its result",
    "last_after_answer": "an answer may be the end",
    "horizon_s": "between the constant holds of 10 and 60 s, either of which is best somewhere",
    "cold_horizon_s": "the shorter of the two: for a call of which nothing is known",
    "usual_share": "nine in ten: the rest is mostly what other kinds of calls lend",
    "past_usual": "so late only other kinds of calls come back; 2 and 4 cost up to 7 % of the mean",
    "fixed_ttl_s": "the shorter of the constant holds that are best somewhere",
    "work_weight": "a second of work beyond the usual counts as a second of age",
    "answer_ttl_s": "an answer is probably the end; a person who replies takes longer than any hold",
    "max_ttl_s": "no tool that hangs holds memory for more than ten minutes",
    "pin_budget": "a tenth of the pool is left to those who have nothing held",
    "pin_tenant_share": "1: a server of one tenant; one of several sets less",
    "max_wait_s": "who hears that the server lives waits as long as the jobs before take",
    "max_return_wait_s": "two minutes and less cost 1 to 4 % of the mean where many have begun",
}
"""Reasons for the values, one sentence each."""

WITH_RULE = {
    "pool_price": "price",
    "horizon_s": "median-horizon",
    "cold_horizon_s": "median-horizon",
    "usual_share": "median-horizon",
    "past_usual": "median-horizon",
    "fixed_ttl_s": "fixed",
}
"""Constants of one rule are varied, and compared, under that rule."""

BOUNDS = {
    "config.max_jobs": "memory; a simulation has fewer",
    "config.max_first_wait_s": "an operator's limit; none unless set",
    "config.max_silent_wait_s": "below the 300 s after which clients give up; a simulation's agents stream",
    "config.job_idle_s": "memory; longer than any recorded gap",
    "growth.MAX_KINDS": "memory",
    "growth.MAX_TURNS": "memory",
    "context_growth.MAX_AHEAD": "time",
    "growth.MAX_SEEN": "how soon old turns are forgotten",
    "growth.PRIOR_STRENGTH": "after a few jobs of its own a kind speaks for itself; 2 is no better",
    "growth.PERIOD_SMOOTHING": "fifty turns: fewer are noise, more outlast a change of load",
    "context_growth.SHARES": "now, half way and the end; five times are no better, two let p99 double",
    "admission.USUAL_SMOOTHING": "a gauge, no decision",
    "begin_rate.MEMORY": "twenty jobs: fewer are noise, more outlast a change of load",
    "begin_rate.MIN_INTERVALS": "a prediction from fewer is noise; no job is refused by it",
    "answer_returns.PRIOR": "Jeffreys' prior",
    "ttl.HARDLY_EVER": "known after five answers that nothing followed",
    "answer_returns.MAX_ANSWERS": "how soon old answers are forgotten",
    "kv_cost.LOAD_WINDOW_S": "several times a turn, and shorter than a load lasts",
    "revocation.SOON": "expected by then: more likely than not",
    "waiting_parents.LOOK_S": "time; a waiting job without sub-agents is held for as long in vain at most",
    "waiting_parents.SOON_S": "what a client takes from a sub-agent's answer to its parent's next turn",
    "work_forecast.MAX_KINDS": "memory",
    "work_forecast.MAX_ENDS": "how soon old jobs are forgotten; a simulation has fewer",
    "work_forecast.MAX_TURNS": "how soon old turns are forgotten",
    "work_forecast.UPDATE_SHARE": "time; how often what was learned of kinds is put together",
    "rate_belief.STRENGTHS": "a grid to choose from, by what is likeliest",
    "rate_belief.MOST_EVIDENCE": "arithmetic",
    "rate_belief.NOTHING": "arithmetic",
    "job_history.PREFILL_TOKENS": "what of work is prompts: an order of magnitude, the model learns the rest",
    "job_history.RECENT": "a feature; four and more predict as well",
    "job_history.MAX_TURNS": "memory of one job",
    "trees.MAX_NODES": "memory; ten times what the trainer makes",
    "trees.MAX_TOOLS": "likewise",
    "trees.LEAF": "format",
    "state.MAX_TOKENS": "a check of a file; a hundred times any context",
    "work_model.MODEL_VERSION": "format",
    "work_trainer.MIN_JOBS": "a model of fewer would not be believed",
    "work_trainer.NUM_TOOLS": "what a trainer tries is judged by folds before it is believed",
    "work_trainer.NUM_FOLDS": "likewise",
    "work_trainer.SIZE": "likewise",
    "boosting.STEP": "likewise",
    "boosting.SUBSAMPLE": "likewise",
    "work_trainer.MAX_TURNS": "time of a lesson",
    "duration_trainer.MIN_CALLS": "a model of fewer would not be believed",
    "duration_trainer.MIN_OF_KIND": "likewise",
    "duration_trainer.NUM_FOLDS": "what a trainer tries is judged by folds before it is believed",
    "duration_trainer.SIZE": "likewise",
    "duration_trainer.MAX_CALLS": "time of a lesson",
    "call_history.LEVELS": "format",
    "call_history.MEDIAN": "format",
    "call_history.FLOOR_S": "format; recordings have whole milliseconds",
    "call_history.PROGRAM_PARTS": "format of keys",
    "duration_model.MODEL_VERSION": "format",
    "duration_model.MAX_CORRECTION": "arithmetic; no correction of a recording is half as large",
    "duration_model.MAX_KINDS": "memory",
    "corrector.CREDIT_CALLS": "how soon a model that is wrong is believed no longer",
    "corrector.KEEP": "likewise",
    "gap_corrections.MAX_PAST_CALLS": "memory",
    "gap_corrections.MIN_NEW_CALLS": "how often a lesson is due",
    "gap_corrections.NEW_SHARE": "likewise",
    "trainer.NICENESS": "who goes first on a busy machine",
    "remaining_work.MAX_PAST_JOBS": "memory",
    "remaining_work.MIN_NEW_JOBS": "how often a lesson is due",
    "remaining_work.NEW_SHARE": "likewise",
    "remaining_work.JUDGING_JOBS": "time of one judgement",
    "remaining_work.CREDIT_JOBS": "how soon a model that is wrong is believed no longer",
    "remaining_work.KEEP": "likewise",
    "remaining_work.CHANCE": "arithmetic",
    "order.RANKED_PER_STEP": "time of one step; the others follow in the next",
    "order.BY_CHANCE": "a share of thrashing_share, which is turned",
    "home_table.CHUNK_TOKENS": "memory and time; a shorter beginning is no agent's prompt",
    "job_router.MOVE_MARGIN": "which core, not what a core does; a simulation of the policy has one",
    "job_router.MOVE_TOKENS": "likewise",
    "job_router.RETURN_SHARE": "likewise",
    "job_router.FIRST_RETURN_S": "likewise",
    "job_router.SHORTEST_RETURN_S": "likewise",
    "job_router.LONGEST_RETURN_S": "likewise",
    "job_router.RETURN_STEP": "likewise",
    "job_router.OPEN_TOKENS": "likewise",
    "job_router.MAX_CANDIDATES": "time of a decision among many cores",
    "job_router.NEW_TOKENS_SMOOTHING": "likewise",
    "job_router.LIKE_SHARE": "likewise",
    "job_router.MAX_JOBS": "memory",
    "job_status.EARLY": "a quantile that is reported; no decision uses it",
    "job_status.LATE": "likewise",
    "revocation.MANY_PINS": "time; a simulation has fewer",
    "admission.FIRST_LOOK_S": "time; how often the chance of a return is asked again",
    "admission.LATER_LOOKS": "likewise",
    "tip_index.GENERATION_PROMPT_TOKENS": "format of chat templates; recorded jobs name themselves",
    "tip_index.SEAM_TOKENS": "format of tokenizers",
    "tip_index.MAX_ANCHORS": "time of one look-up",
    "tip_index.MAX_WITH_SAME_PROMPT": "time of one look-up",
    "registry.MAX_QUESTIONS": "memory",
    "job_metrics.MAX_KEPT": "memory; metrics only",
    "job.MAX_CHILDREN": "memory of one job",
    "job.MAX_DEPTH": "time of a turn that names a parent",
    "job.MAX_TIPS": "memory of one job",
    "cut_turns.KEPT_S": "simulated clients cut nothing off; real ones ask again within seconds",
    "cut_turns.MAX_QUESTIONS": "memory",
    "cut_turns.MAX_OF_ONE": "memory",
    "stale_prefixes.POOLS_REMEMBERED": "memory; older blocks are in no cache of the device",
    "shared_prefixes.MAX_BLOCKS": "longer than any context",
    "shared_prefixes.STEP": "memory; how far too high the count of shared blocks may be",
    "program_stats.QUEUE_DELAY_WINDOW": "only the paper's rule asks; its own value is open",
    "tool_stats.SAVE_EVERY_S": "decides nothing: how much a crash forgets",
    "hint_accuracy.RETURN_S": "only after a client said that its tools have finished; learned from then on",
    "turn_history.MAX_TURNS": "memory; receipts only",
    "cost.REFIT_AFTER": "time; each step is counted at the next fit",
    "cost.COLLINEAR": "arithmetic",
    "credibility.STRENGTHS": "a grid to choose from, by what predicts best",
    "durations.TINY": "arithmetic",
    "expectation.SHORTEST_S": "only for what clients say themselves; scored by continuum estimate",
    "expectation.MAX_RATIO": "likewise",
    "expectation.BINS_PER_OCTAVE": "likewise",
    "expectation.PRIOR_SPREAD": "likewise",
    "expectation.PRIOR_LOSS_SAID": "likewise",
    "expectation.PRIOR_LOSS_KNOWN": "likewise",
    "expectation.STRENGTH": "likewise",
    "expectation.HALF_LIFE": "likewise",
    "expectation.MAX_SOURCES": "memory",
    "state.VERSION_WITHOUT_TENANTS": "format of a file",
    "tenants.LENT": "a grid to choose from, by what predicts best; recorded jobs have one tenant",
    "tenants.NUM_LENDERS_AT_FIRST": "recorded jobs have one tenant",
    "tenants.MAX_TENANTS": "memory",
    "tenants.MAX_KEYS": "memory",
    "tenants.MAX_JOB_KEYS": "memory",
    "turn_outcomes.MAX_KEYS": "memory",
    "tool_key.MAX_PARTS": "memory; tool, program and sub-command",
    "tool_key.MAX_PART_CHARS": "memory",
    "tool_key.MAX_KEY_CHARS": "memory",
    "tool_key.MAX_SHELL_CHARS": "time to read one call",
    "tool_key.LEAST_MS": "tells seconds from milliseconds in what an agent asks for",
    "shell.MAX_NESTING": "time to read one call",
    "shell.MAX_WORDS": "time to read one call",
}
"""Module and name of constants that are not varied, because no run here could show an effect: bounds, and
those that only a client's own signals bring into play."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A numeric option of the policy."""

    name: str
    value: float

    @property
    def why(self) -> str:
        return WHY.get(self.name, "not said")

    @property
    def base(self) -> str:
        """Returns the policy that the varied one is compared with."""
        rule = WITH_RULE.get(self.name, ContinuumConfig().ttl_rule)
        return SUBJECT if rule == ContinuumConfig().ttl_rule else f"{SUBJECT}:ttl_rule={rule}"

    def times(self, factor: float) -> str | None:
        """Returns the policy with ``factor`` times the value; None if that is the same or not allowed."""
        value = type(self.value)(self.value * factor)
        if value == self.value:
            return None
        try:
            ContinuumConfig(**{self.name: value})  # type: ignore[arg-type]  # a name of its fields
        except ConfigError:
            return None
        return f"{self.base}{',' if ':' in self.base else ':'}{self.name}={value!r}"


HALF = 0.5
DOUBLE = 2.0


def constants(names: Sequence[str] = ()) -> list[Constant]:
    """Returns all constants that can be varied, or those with these names; EvalError for an unknown name."""
    found = {constant.name: constant for constant in _numbers()}
    for name in names:
        if name not in found:
            raise EvalError(f"The policy has no constant {name!r}; it has {', '.join(found)}.")
    return [found[name] for name in names or found]


def _numbers() -> Iterator[Constant]:
    for field in fields(ContinuumConfig):
        value: object = field.default
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if f"config.{field.name}" not in BOUNDS:
            yield Constant(field.name, value)


def turned(chosen: Sequence[Constant]) -> list[str]:
    """Returns all policies to run for these constants, including those that they are compared with."""
    policies = [SUBJECT]
    for constant in chosen:
        policies += [constant.base, *filter(None, (constant.times(HALF), constant.times(DOUBLE)))]
    return list(dict.fromkeys(policies))
