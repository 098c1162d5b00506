"""Constants that decisions use and that no user of a server should have to set.

They have no flags. ``python -m benchmarks.policy --constants`` shows the effect of half and double of each
value.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.errors import ConfigError
from estimator.cost import DEFAULT_TOKENS_PER_S, SMOOTHING
from estimator.credibility import MIN_JUDGED
from estimator.durations import HALF_LIFE, HALF_LIFE_S, NUM_BINS, PRIOR_STRENGTH
from estimator.turn_outcomes import LAST_AFTER_ANSWER, LAST_AFTER_CALL

_MAY_BE_ZERO = ("grace_s",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Each value is above 0, the grace at least 0. Values that the estimator shares have its defaults."""

    grace_s: float = 1.0
    """Minimum time for which the KV of any turn is kept: the API server parses the tool calls within
    milliseconds of the turn's end."""
    kind_tokens: int = 128
    """Agents whose prompts begin with this many equal tokens are of one kind; any system prompt is longer."""
    min_memoryfulness: float = 0.5
    """Memoryfulness above which a job's age predicts most of its remaining turns."""
    min_ended_jobs: int = 20
    """This many jobs must have ended before memoryfulness is used."""
    thrashing_share: float = 0.1
    """If this share of the tokens of returning turns must be recomputed, age counts in full."""
    recomputed_smoothing: float = 0.01
    """Weight of a new return against earlier ones in that share."""
    reload_smoothing: float = 0.1
    """Weight of a new load from host memory against earlier ones in the estimated cost of a load."""
    first_reload_share: float = 0.1
    """Time to load KV back, as a share of the time to recompute it, before any load was observed. Loading is
    about fifteen times faster for an 8B model over a 50 GB/s link."""
    pool_price: float = 0.5
    """``price`` rule: the worth of a second of the whole pool, in seconds of the device.

    A return that finds its KV saves about twice its own recomputation: it does not wait for free blocks, and
    it does not hold blocks while it would wait.
    """
    cheap_reload_share: float = 0.5
    """If loading the offloaded copy takes less than this share of the recomputation, nothing is pinned."""
    usual_share: float = 0.9
    """``median-horizon`` rule: the quantile of call durations by which nearly all such calls have
    returned."""
    past_usual: float = 16.0
    """``median-horizon`` rule: nothing is pinned for more than this many times that quantile."""
    patience_s: float = 20.0
    """With a host tier: a later turn of a job that has waited this long is ordered with turns whose KV is
    retained. Serving turns in order of arrival loses nothing then: their copies are loaded back."""
    search_backoff_s: float = 1e-4
    """Pause after a search that found too few blocks, in seconds per pin that it examined: a search takes a
    thirtieth of this, so at most that share of all time."""
    unseen_return: float = 0.5
    """Probability that a turn returns before its pin's deadline, before any was seen to return."""
    host_share: float = 0.8
    """Share of the host tier that may be needed: the rest holds offloaded blocks that no turn will
    request."""
    return_horizon_s: float = 600.0
    """A turn that is not back within this many seconds may stay away: by then its offloaded blocks are the
    oldest."""
    pool_share: float = 1.0
    """Share of the pool that may be needed where there is no host tier."""
    pool_horizon_s: float = 50.0
    """The horizon in seconds if there is no host tier: a turn that is away for longer finds nothing
    retained."""
    growth_horizon_s: float = 25.0
    """How far ahead the growth of contexts counts when a job may begin, in seconds: by the time that a job
    grows later, others have ended."""
    small_job_share: float = 0.01
    """A new job that is expected to need less than this share of the pool is not kept waiting."""
    prefill_smoothing: float = SMOOTHING
    """Weight of a new step against earlier ones of its size in the estimated cost of a prefill."""
    first_tokens_per_s: float = DEFAULT_TOKENS_PER_S
    """Prefill speed in tokens per second, until a prefill was seen."""
    prior_strength: float = PRIOR_STRENGTH
    """This many of its own observations make a kind of call as credible as the more general kind above it."""
    half_life: float = HALF_LIFE
    """After this many later observations of its kind, an observation counts half."""
    half_life_s: float = HALF_LIFE_S
    """An observation counts half after this many seconds, too."""
    num_bins: int = NUM_BINS
    """Number of bins of the durations of calls."""
    min_judged: float = MIN_JUDGED
    """After this many scored predictions, the weight of a job's own calls is learned for their kind."""
    last_after_call: float = LAST_AFTER_CALL
    """Probability that no turn follows one that called a tool, before any was seen."""
    last_after_answer: float = LAST_AFTER_ANSWER
    """Probability that no turn follows one that called no tool, before any was seen."""

    def __post_init__(self) -> None:
        for field in fields(Tuning):
            value = getattr(self, field.name)
            if not (value > 0 or (value == 0 and field.name in _MAY_BE_ZERO)):  # NaN is refused too
                raise ConfigError(f"{field.name} must be above 0, got {value}.")
