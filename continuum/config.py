"""What the agent policy is told at start-up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from continuum.tuning import Tuning
from engine.errors import ConfigError

_NOT_NEGATIVE = (
    "horizon_s",
    "cold_horizon_s",
    "fixed_ttl_s",
    "work_weight",
    "answer_ttl_s",
    "max_ttl_s",
    "max_wait_s",
    "max_return_wait_s",
    "job_idle_s",
)
_FINITE = ("cold_horizon_s", "fixed_ttl_s", "answer_ttl_s")
"""How long something is held: a pin has an end."""
TTL_RULES = ("price", "median-horizon", "fixed", "fork", "paper")
PUBLISHED_RULES = ("fork", "paper")
"""Of these: as they were published, by the gaps after a tool's plain name and deaf to clients' signals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuumConfig(Tuning):
    """Options of ``--scheduling-policy continuum``; what it inherits has no flag."""

    ttl_rule: str = "median-horizon"
    """Which rule decides how long a frontier is held; see ``continuum.ttl``."""
    horizon_s: float = 30.0
    """median-horizon: hold while the call's remaining time is at most this at the median."""
    cold_horizon_s: float = 10.0
    """median-horizon: hold this long while nothing is learned, and beyond what was ever seen."""
    fixed_ttl_s: float = 10.0
    """fixed: hold this long."""
    work_weight: float = 1.0
    """So many seconds later is a job ranked per second that those of its kind are more work than usual ones,
    and earlier if less; 0: by age alone."""
    answer_ttl_s: float = 2.0
    """Hold this long after a turn that called no tool, which is probably the last."""
    max_ttl_s: float = 600.0
    """No rule holds longer."""
    pin_budget: float = 0.9
    """Largest share of the pool that pins may hold together."""
    pin_tenant_share: float = 1.0
    """Largest share of the pin budget that one tenant may hold, also while no other wants any."""
    max_wait_s: float = 230.0
    """Any request that has waited so long may break any pin, and nobody who came later starts before it."""
    max_return_wait_s: float = 230.0
    """The same of a turn whose job has begun, if that is less. Both are below the 300 s after which coding
    agents drop a silent stream."""
    infer_jobs: bool = True
    """Recognise turns that nobody names by what their prompts continue; if not, they are of no job."""
    release_superseded: bool = True
    """Let go at once of what a job goes on without: a history that was summarised, rewound or changed."""
    max_jobs: int = 10_000
    """Jobs remembered; beyond, the one idle longest is forgotten."""
    job_idle_s: float = 3600.0
    """A job idle for so long is forgotten."""
    estimator_state: str | None = None
    """Where what was learned about tools survives a restart."""

    def __post_init__(self) -> None:
        Tuning.__post_init__(self)
        if self.ttl_rule not in TTL_RULES:
            raise ConfigError(f"ttl_rule must be one of {', '.join(TTL_RULES)}, got {self.ttl_rule!r}.")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:  # NaN is refused too
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}.")
        for name in _FINITE:
            if getattr(self, name) == math.inf:
                raise ConfigError(f"{name} must be finite, got inf.")
        for name in ("pin_budget", "pin_tenant_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)}.")
        if self.max_jobs < 1:
            raise ConfigError(f"max_jobs must be at least 1, got {self.max_jobs}.")
