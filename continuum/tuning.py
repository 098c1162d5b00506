"""Numbers that decisions rest on, and that nobody who runs a server should have to turn.

No flag sets them. ``python -m benchmarks.policy --constants`` shows what each does at half and at double.
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
    """Each is above 0, the grace at least 0. Those that the estimator has of its own begin as it has them."""

    grace_s: float = 1.0
    """Any turn's KV is held so long: the API server reads the tool calls within milliseconds of its end."""
    kind_tokens: int = 128
    """Agents whose prompts begin with the same tokens, so many, are of one kind: less than any system
    prompt."""
    telling: float = 0.5
    """Memoryfulness above which age tells more of what is left than it leaves open."""
    min_ended_jobs: int = 20
    """So many jobs must have ended before what their lengths say counts there."""
    thrashing_share: float = 0.1
    """Of the tokens that come back: if so many must be recomputed, age counts in full."""
    recomputed_smoothing: float = 0.01
    """Weight of a new return against those before, in that share."""
    reload_smoothing: float = 0.1
    """Weight of a new load from host memory against those before, in what a load costs."""
    first_reload_share: float = 0.1
    """Of the time to compute it, that loading KV back is taken to need before any load was seen: it is about
    fifteen times faster for an 8B model over a 50 GB/s link."""
    pool_price: float = 0.5
    """price: seconds of the device that a second of the whole pool is worth. A return that finds its KV
    spares about twice what computing it takes: it waits for no room, and holds no blocks until then."""
    cheap_reload_share: float = 0.5
    """Of the time to compute KV: where loading its copy takes less, nothing is held."""
    usual_share: float = 0.9
    """median-horizon: when so many of such calls are back, nearly all are."""
    past_usual: float = 16.0
    """median-horizon: nothing is held for more than so many times as long as that takes."""
    search_backoff_s: float = 1e-4
    """For each pin that was looked at in vain: a search takes a thirtieth of it, so no more of all time."""
    unseen_return: float = 0.5
    """Probability that a turn is back before its pin's deadline, while none was seen to return."""
    host_share: float = 0.8
    """Of the host tier that may be needed: copies of what nobody will ask for stand among the others."""
    return_horizon_s: float = 600.0
    """Who is not back so soon counts as one who may stay away: its copies are the oldest by then."""
    pool_share: float = 1.0
    """Of the pool that may be needed where there is no host tier."""
    pool_horizon_s: float = 50.0
    """The same there: who is away for longer finds nothing held."""
    small_job_share: float = 0.01
    """Of the pool: a new job whose first prompt is smaller is not kept waiting."""
    prefill_smoothing: float = SMOOTHING
    """Weight of a new step against those of its size before, in what computing KV costs."""
    first_tokens_per_s: float = DEFAULT_TOKENS_PER_S
    """Computed in a prefill, until one was seen."""
    prior_strength: float = PRIOR_STRENGTH
    """So many observations of its own make a kind of call as credible as the more general one above it."""
    half_life: float = HALF_LIFE
    """After so many later observations of its kind an observation counts half."""
    half_life_s: float = HALF_LIFE_S
    """The same in seconds."""
    num_bins: int = NUM_BINS
    """Durations are told apart in so many bins."""
    min_judged: float = MIN_JUDGED
    """So many predicted calls say how much a job's own calls tell of its next one."""
    last_after_call: float = LAST_AFTER_CALL
    """Probability that no turn follows one that called a tool, before any was seen."""
    last_after_answer: float = LAST_AFTER_ANSWER
    """The same of one that called none."""

    def __post_init__(self) -> None:
        for field in fields(Tuning):
            value = getattr(self, field.name)
            if not (value > 0 or (value == 0 and field.name in _MAY_BE_ZERO)):  # NaN is refused too
                raise ConfigError(f"{field.name} must be above 0, got {value}.")
