"""The configuration of the agent policy."""

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
    "max_silent_wait_s",
    "job_idle_s",
)
_FINITE = ("cold_horizon_s", "fixed_ttl_s", "answer_ttl_s")
"""Times to live that have no upper bound otherwise; a pin must always end."""
TTL_RULES = ("price", "median-horizon", "fixed", "fork", "paper")
PUBLISHED_RULES = ("fork", "paper")
"""Published rules: they use the gaps after a tool's plain name, and ignore clients' signals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuumConfig(Tuning):
    """Options of ``--scheduling-policy continuum``; the inherited fields have no flags."""

    ttl_rule: str = "median-horizon"
    """Which rule decides how long a branch tip is retained; see ``continuum.retention.ttl``."""
    horizon_s: float = 30.0
    """``median-horizon`` rule: keep the KV while the median remaining tool time is at most this (seconds)."""
    cold_horizon_s: float = 10.0
    """``median-horizon`` rule: time to live in seconds without experience, also added to the longest call
    seen."""
    fixed_ttl_s: float = 10.0
    """``fixed`` rule: time to live of every pin, in seconds."""
    work_weight: float = 1.0
    """Weight of the predicted job length in the queue order: a job is ranked this many seconds later per
    second of work beyond the usual, and earlier if less; 0: by age only."""
    answer_ttl_s: float = 2.0
    """Time to live in seconds after a turn without tool calls, which is probably the last."""
    max_ttl_s: float = 600.0
    """Upper bound of a pin's time to live in seconds, whatever the rule."""
    pin_budget: float = 0.9
    """Maximum fraction of the KV pool that pins may hold together."""
    pin_tenant_share: float = 1.0
    """Maximum fraction of the pin budget for one tenant, even if no other tenant is waiting."""
    max_wait_s: float = 1800.0
    """Aging: a request that waited this many seconds may revoke any pin, and goes before all later ones."""
    max_return_wait_s: float = 230.0
    """Aging of the later turns of a job, in seconds; the smallest bound that applies to a request counts."""
    max_silent_wait_s: float = 230.0
    """Aging of a request whose client receives nothing before the whole answer, in seconds: below the 300 s
    after which clients give up."""
    max_first_wait_s: float | None = None
    """A new job that is expected to wait longer than this many seconds before it begins is refused at
    once; None: it waits."""
    learn_order: bool = True
    """Learn from ended jobs, in a separate process, how much work jobs still have."""
    infer_jobs: bool = True
    """Recognize the job of a turn without an id by its prompt prefix; otherwise such a turn has no job."""
    release_superseded: bool = True
    """Evict first the blocks that a job's new prompt no longer contains, after its history was edited."""
    max_jobs: int = 10_000
    """Maximum number of remembered jobs; the longest idle is forgotten first."""
    job_idle_s: float = 3600.0
    """Seconds after which an idle job is forgotten."""
    estimator_state: str | None = None
    """File that keeps the learned tool times across restarts."""

    def __post_init__(self) -> None:
        Tuning.__post_init__(self)
        if self.ttl_rule not in TTL_RULES:
            raise ConfigError(f"ttl_rule must be one of {', '.join(TTL_RULES)}, got {self.ttl_rule!r}.")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:  # NaN is refused too
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}.")
        if self.max_first_wait_s is not None and not self.max_first_wait_s >= 0:
            raise ConfigError(f"max_first_wait_s must not be negative, got {self.max_first_wait_s}.")
        for name in _FINITE:
            if getattr(self, name) == math.inf:
                raise ConfigError(f"{name} must be finite, got inf.")
        for name in ("pin_budget", "pin_tenant_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)}.")
        if self.max_jobs < 1:
            raise ConfigError(f"max_jobs must be at least 1, got {self.max_jobs}.")
