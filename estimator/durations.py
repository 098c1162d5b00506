"""Learns how long tool calls take, per kind of call and per job; some durations are censored.

Maps keys and seconds to survival curves; does not know engine or policy. Follows scikit-learn's conventions:
the constructor only stores parameters, learned attributes have a trailing underscore. One thread only.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, ItemsView, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from estimator.credibility import MIN_JUDGED, Credibility, losses_of
from estimator.plain_math import geometric, halved
from estimator.survival import NOTHING_KNOWN, SurvivalCurve, max_of
from estimator.tool_key import ToolKey

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DurationEstimator", "DurationHistogram", "SurvivalCurve", "max_of"]

K = TypeVar("K")

PRIOR_STRENGTH = 4.0
HALF_LIFE = 500.0
HALF_LIFE_S = 604800.0
NUM_BINS = 120
"""See ``DurationEstimator``."""
TINY = 1e-300
"""Replaces a zero weight in a denominator."""


class Belief:
    """The belief about one key: the probability of each bin, and the number of observations."""

    __slots__ = ("_curve", "masses", "tail", "weight")

    def __init__(self, masses: list[float], tail: float, weight: float) -> None:
        self.masses = masses
        """Probabilities of the bins, shape [num_bins]; with the tail they sum to 1."""
        self.tail = tail
        """Probability that a call takes longer than the longest call that was seen to end."""
        self.weight = weight
        self._curve: SurvivalCurve | None = None

    def curve(self, edges_s: Sequence[float]) -> SurvivalCurve:
        if self._curve is None:
            ended_by = [min(mass, 1.0) for mass in accumulate(self.masses, initial=0.0)]
            if not self.tail:  # a rounding error must not leave a chance that it never ends
                ended_by = [mass / ended_by[-1] for mass in ended_by]
            self._curve = SurvivalCurve(edges_s, ended_by, self.weight)
        return self._curve


NO_BELIEF = Belief([], 1.0, 0.0)


class Lender(Protocol):
    """A source of beliefs about kinds of calls, for keys with few observations."""

    def of(self, parts: tuple[str, ...]) -> tuple[Belief, float]:
        """Returns the belief about one kind of call, and how many observations of it are lent; 0 for none."""


class DurationHistogram:
    """Observations of one key: weights per bin of calls that ended and of censored ones."""

    __slots__ = ("_belief", "_borrowed", "censored", "ended", "of_jobs", "seen_s")

    def __init__(self, num_bins: int) -> None:
        self.ended = [0.0] * num_bins
        self.censored: list[float] | None = None
        """None until a call was censored: most keys have none, which saves most of the work."""
        self.seen_s = 0.0
        """The estimator's clock at its last observation."""
        self.of_jobs: Credibility | None = None
        """The credibility of a job's own calls of the key; None until a job repeated one."""
        self._belief: Belief | None = None
        self._borrowed: tuple[Belief, Belief, float] | None = None
        """The other inputs of the cached belief: the parent's belief, and what was lent."""

    def add(self, index: int, censored: bool, keep: float) -> None:
        """Adds one observation; all earlier ones count ``keep`` times as much as before."""
        self.ended = [weight * keep for weight in self.ended]
        if self.censored is not None:
            self.censored = [weight * keep for weight in self.censored]
        elif censored:
            self.censored = [0.0] * len(self.ended)
        (self.censored if censored and self.censored is not None else self.ended)[index] += 1.0
        self._belief = None

    def belief(self, parent: Belief, strength: float, lent: Belief = NO_BELIEF, num: float = 0.0) -> Belief:
        """The belief from these observations, with up to ``strength`` borrowed from the parent and ``num``
        lent by others."""
        if self._belief is None or not self._rests_on(parent, lent, num):
            borrowed = min(strength, parent.weight)
            ended = self.ended
            if borrowed:
                ended = [own + borrowed * mass for own, mass in zip(ended, parent.masses, strict=True)]
            outlasting = borrowed * parent.tail
            if num:
                ended = [own + num * mass for own, mass in zip(ended, lent.masses, strict=True)]
                outlasting += num * lent.tail
            if self.censored is None:
                weight = max(math.fsum(ended) + outlasting, TINY)
                self._belief = Belief([each / weight for each in ended], outlasting / weight, weight)
            else:
                self._belief = _product_limit(ended, self.censored, outlasting)
            self._borrowed = parent, lent, num
        return self._belief

    def _rests_on(self, parent: Belief, lent: Belief, num: float) -> bool:
        known = self._borrowed
        return known is not None and known[0] is parent and known[1] is lent and known[2] == num


def _product_limit(ended: list[float], censored: list[float], outlasting: float) -> Belief:
    """Kaplan and Meier's estimate (J. Am. Stat. Assoc. 53, 1958) over the bins, all in weights.

    A call censored in a bin counts half there, as in a life table: neither as if it had outlasted the bin nor
    as if it had never entered it. Beyond the last observation the hazard is unknown and taken as 0.
    """
    both = [here + cut for here, cut in zip(ended, censored, strict=True)]
    entered = [*accumulate(reversed(both))][::-1]
    masses = []
    survival = 1.0
    beyond = outlasting or TINY
    for here, cut, count in zip(ended, censored, entered, strict=True):
        hazard = here / (count + beyond - 0.5 * cut)
        masses.append(hazard * survival)
        survival *= 1.0 - hazard
    return Belief(masses, max(0.0, survival), entered[0] + beyond)


class DurationEstimator:
    """Survival curves of tool calls by key; a key with few observations borrows from its parents.

    The calls of one job form one more level below the key: the same tests in the same repository take about
    as long as they took last time. How well that predicts is learned too. Observations of kinds of calls
    survive a restart; those of jobs do not.

    Parameters
    ----------
    prior_strength: this many observations make a key as credible as its parent, and a job as credible as its
        key, before that is learned.
    half_life: after this many later observations of its key, an observation counts half.
    half_life_s: an observation counts half after this many seconds, measured between observations of its key.
    max_keys: maximum number of keys; beyond it, the least recently seen are forgotten.
    max_job_keys: the same maximum for the keys of jobs.
    min_s, max_s, num_bins: range and number of the bins of durations, evenly spaced in log(duration).
    min_judged: after this many scored predictions, the credibility of a job's own calls of a kind is learned.
    """

    edges_: tuple[float, ...]
    """Bounds of the bins, num_bins + 1, from 0."""
    histograms_: OrderedDict[tuple[str, ...], DurationHistogram]
    """Histograms by the parts of the key, the least recently seen first; a parent comes after
    its children."""
    job_histograms_: OrderedDict[tuple[str, tuple[str, ...]], DurationHistogram]
    """Histograms by job and the parts of the whole key, the least recently seen first."""
    clock_s_: float
    """Latest time seen, counted from the first one ever; it does not advance while no estimator runs."""
    _clock_start_s: float | None
    """The caller's time at which ``clock_s_`` was 0; None until a time was given."""

    def __init__(
        self,
        prior_strength: float = PRIOR_STRENGTH,
        half_life: float = HALF_LIFE,
        half_life_s: float = HALF_LIFE_S,
        max_keys: int = 1024,
        max_job_keys: int = 2048,
        min_s: float = 0.001,
        max_s: float = 21600.0,
        num_bins: int = NUM_BINS,
        min_judged: float = MIN_JUDGED,
    ) -> None:
        self.prior_strength = prior_strength
        self.half_life = half_life
        self.half_life_s = half_life_s
        self.max_keys = max_keys
        self.max_job_keys = max_job_keys
        self.min_s = min_s
        self.max_s = max_s
        self.num_bins = num_bins
        self.min_judged = min_judged

    # -- learning --------------------------------------------------------------------------------------

    def fit(
        self, keys: Sequence[ToolKey], durations_s: Iterable[float], censored: Iterable[bool] | None = None
    ) -> Self:
        """Forgets everything, then learns these durations, oldest first."""
        self.start()
        return self.partial_fit(keys, durations_s, censored)

    def partial_fit(
        self, keys: Sequence[ToolKey], durations_s: Iterable[float], censored: Iterable[bool] | None = None
    ) -> Self:
        """Learns these durations too, oldest first. ``censored``: the call lasted at least this long."""
        cut_off = [False] * len(keys) if censored is None else censored
        for key, duration_s, was_cut_off in zip(keys, durations_s, cut_off, strict=True):
            self.observe(key, duration_s, was_cut_off)
        return self

    def observe(
        self,
        key: ToolKey,
        duration_s: float,
        censored: bool = False,
        *,
        job: str | None = None,
        now: float | None = None,
    ) -> None:
        """Learns one duration, for the key, all its parents and the job's own calls of the key.

        A call that lasted until its own limit counts as censored there. ``now``: seconds on any clock that
        does not run backwards; without it no time has passed.
        """
        if not duration_s >= 0:
            raise ValueError(f"a duration must be at least 0 s, not {duration_s}")
        if key.limit_s is not None and duration_s >= key.limit_s:
            duration_s = key.limit_s
            censored = True
        if not self._is_started:
            self.start()
        if now is not None:
            self._advance(now)
        index = self.bin_of(duration_s)
        if job is not None and not censored:
            self._score(key.parts, job, index)
        for depth in range(len(key.parts), -1, -1):
            self._learn(self.histograms_, key.parts[:depth], index, censored)
        _forget(self.histograms_, self.max_keys)
        if job is not None:
            self._learn(self.job_histograms_, (job, key.parts), index, censored)
            _forget(self.job_histograms_, self.max_job_keys)

    def bin_of(self, duration_s: float) -> int:
        """The bin of a duration. Bin i covers (edge i, edge i + 1]; a duration of 0 is in the first, one
        above max_s in the last."""
        return min(max(bisect_left(self.edges_, duration_s) - 1, 0), self.num_bins - 1)

    def _score(self, parts: tuple[str, ...], job: str, index: int) -> None:
        """Scores how well the job's own calls predict a call, before the call is learned."""
        of_job = self.job_histograms_.get((job, parts))
        if of_job is None or of_job.censored is not None:
            return
        belief, _ = self._of_kind(parts, None)
        losses = losses_of(of_job.ended, belief.masses, belief.weight, index)
        for depth in range(len(parts) + 1):
            histogram = self.histograms_.get(parts[:depth])
            if histogram is not None:
                histogram.of_jobs = histogram.of_jobs or Credibility()
                histogram.of_jobs.add(losses, halved(1 / self.half_life))

    def _learn(
        self, histograms: OrderedDict[K, DurationHistogram], place: K, index: int, censored: bool
    ) -> None:
        histogram = histograms.get(place)
        if histogram is None:
            histogram = histograms[place] = DurationHistogram(self.num_bins)
            histogram.seen_s = self.clock_s_
        halvings = 1 / self.half_life + (self.clock_s_ - histogram.seen_s) / self.half_life_s
        histogram.add(index, censored, halved(halvings))
        histogram.seen_s = self.clock_s_
        histograms.move_to_end(place)

    def _advance(self, now: float) -> None:
        if self._clock_start_s is None:
            self._clock_start_s = now - self.clock_s_
        self.clock_s_ = max(self.clock_s_, now - self._clock_start_s)

    def start(self) -> None:
        """Checks the parameters and resets what was learned."""
        limits = {"prior_strength": 0.01, "half_life": 1.0, "half_life_s": 1.0, "max_keys": 8}
        limits |= {"max_job_keys": 0, "min_s": 1e-9, "num_bins": 2}
        for name, least in limits.items():
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least {least}, not {getattr(self, name)}")
        if not self.min_s < self.max_s < math.inf:
            raise ValueError(f"max_s must be finite and above min_s ({self.min_s}), not {self.max_s}")
        self.edges_ = (0.0, *geometric(self.min_s, self.max_s, self.num_bins))
        self.histograms_ = OrderedDict()
        self.job_histograms_ = OrderedDict()
        self.clock_s_ = 0.0
        self._clock_start_s = None

    @property
    def _is_started(self) -> bool:
        """As in scikit-learn, learned attributes do not exist before the start."""
        return hasattr(self, "histograms_")

    # -- learned state ---------------------------------------------------------------------------------

    def items(self) -> ItemsView[tuple[str, ...], DurationHistogram]:
        """The items of ``histograms_``, in their order; none before the start."""
        return (self.histograms_ if self._is_started else {}).items()

    @property
    def kinds(self) -> Container[tuple[str, ...]]:
        """Parts of the keys that have observations."""
        return self.histograms_ if self._is_started else ()

    def ended(self, parts: tuple[str, ...]) -> Sequence[float] | None:
        """Weights of the calls of a key that ended, by bin; None if unknown or some were censored."""
        histogram = self.histograms_.get(parts) if self._is_started else None
        return None if histogram is None or histogram.censored is not None else histogram.ended

    def belief(self, parts: tuple[str, ...]) -> Belief:
        """The belief about a key, or about its nearest known parent."""
        return self._of_kind(parts, None)[0] if self._is_started else NO_BELIEF

    @property
    def clock_s(self) -> float:
        """``clock_s_``, 0 before the start."""
        return self.clock_s_ if self._is_started else 0.0

    # -- predictions -----------------------------------------------------------------------------------

    def survival(self, key: ToolKey, job: str | None = None, lender: Lender | None = None) -> SurvivalCurve:
        """The curve of a key, for a job if one is named. A key without observations gets that of its nearest
        known parent, with fewer observations. A call with a limit has ended by then. ``lender`` may add
        beliefs about the kind."""
        if not self.items() and lender is None:
            return NOTHING_KNOWN
        if not self._is_started:
            self.start()
        curve = self._curve(key.parts, job, lender)
        return curve if key.limit_s is None or curve is NOTHING_KNOWN else curve.ended_by(key.limit_s)

    def _curve(self, parts: tuple[str, ...], job: str | None, lender: Lender | None) -> SurvivalCurve:
        belief, is_own = self._of_kind(parts, lender)
        if not belief.weight:
            return NOTHING_KNOWN
        of_job = self.job_histograms_.get((job, parts)) if job is not None else None
        if of_job is not None:
            return of_job.belief(belief, self._job_strength(parts)).curve(self.edges_)
        curve = belief.curve(self.edges_)
        return curve if is_own else curve.resting_on(min(self.prior_strength, belief.weight))

    def _of_kind(self, parts: tuple[str, ...], lender: Lender | None) -> tuple[Belief, bool]:
        """Returns the belief about a key or its nearest known parent, and whether it is the key's own."""
        belief = NO_BELIEF
        for depth in range(len(parts) + 1):
            histogram = self.histograms_.get(parts[:depth])
            lent, num = (NO_BELIEF, 0.0) if lender is None else lender.of(parts[:depth])
            if histogram is None and not num:
                return belief, False
            if histogram is None:
                histogram = DurationHistogram(self.num_bins)
            belief = histogram.belief(belief, self.prior_strength, lent, num)
        return belief, True

    def _job_strength(self, parts: tuple[str, ...]) -> float:
        """The weight of the belief about all jobs, in observations of the job, as learned for the key or a
        parent with enough scored predictions."""
        for depth in range(len(parts), -1, -1):
            histogram = self.histograms_.get(parts[:depth])
            if histogram is None or histogram.of_jobs is None:
                continue
            strength = histogram.of_jobs.strength(self.min_judged)
            if strength is not None:
                return strength
        return self.prior_strength

    def predict(self, keys: Sequence[ToolKey]) -> NDArray[np.float64]:
        """Median seconds of each key; inf where it is unknown."""
        return self.predict_quantile(keys, 0.5)

    def predict_quantile(self, keys: Sequence[ToolKey], q: float) -> NDArray[np.float64]:
        """The q-quantile of each key in seconds; inf where it is unknown."""
        import numpy as np  # for the shape of the result only; no computation

        return np.array([self.survival(key).quantile(q) for key in keys], dtype=np.float64)

    # -- scikit-learn's parameter access, without importing it -----------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Changes parameters; those of the bins take effect with the next ``fit``."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"DurationEstimator has no parameter {name!r}; it has {', '.join(known)}")
            setattr(self, name, value)
        return self


def _forget(histograms: OrderedDict[K, DurationHistogram], most: int) -> None:
    while len(histograms) > most:
        histograms.popitem(last=False)
