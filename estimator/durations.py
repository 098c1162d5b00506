"""Learns how long tool calls take, per kind of call, from durations some of which were cut off (censored).

Knows nothing of engine or policy: keys and seconds in, survival curves out. scikit-learn's conventions: the
constructor only stores parameters, what was learned has a trailing underscore. One thread only.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from estimator.survival import NOTHING_KNOWN, SurvivalCurve, max_of
from estimator.tool_key import ToolKey

__all__ = ["DurationEstimator", "DurationHistogram", "SurvivalCurve", "max_of"]

FloatArray = NDArray[np.float64]


class Belief:
    """What is believed of one key: P(D > edge) for each edge, and how many observations it rests on."""

    __slots__ = ("_curve", "masses", "survival", "weight")

    def __init__(self, survival: FloatArray, weight: float) -> None:
        self.survival = survival
        """[num_bins + 1], from 1; the last is the unknown tail."""
        self.masses = survival[:-1] - survival[1:]
        self.weight = weight
        self._curve: SurvivalCurve | None = None

    def curve(self, edges_s: Sequence[float]) -> SurvivalCurve:
        if self._curve is None:
            self._curve = SurvivalCurve(edges_s, (1.0 - self.survival).tolist(), self.weight)
        return self._curve


NO_BELIEF = Belief(np.ones(1), 0.0)


class DurationHistogram:
    """What was seen of one key: weights of durations per bin, of those that ended and those cut off."""

    __slots__ = ("_belief", "_parent", "censored", "ended")

    def __init__(self, num_bins: int) -> None:
        self.ended: FloatArray = np.zeros(num_bins)
        self.censored: FloatArray = np.zeros(num_bins)
        self._belief: Belief | None = None
        self._parent: Belief | None = None

    def add(self, index: int, censored: bool, keep: float) -> None:
        """One observation more; all earlier ones count ``keep`` times as much as before."""
        self.ended *= keep
        self.censored *= keep
        (self.censored if censored else self.ended)[index] += 1.0
        self._belief = None

    def belief(self, parent: Belief, strength: float) -> Belief:
        """What these observations say together with up to ``strength`` that are borrowed from the parent."""
        if self._belief is None or self._parent is not parent:
            self._belief = self._learn(parent, min(strength, parent.weight))
            self._parent = parent
        return self._belief

    def _learn(self, parent: Belief, borrowed: float) -> Belief:
        """Kaplan-Meier over the bins. What was cut off in a bin counts half there, as in a life table:
        neither as if it had outlasted the bin nor as if it had never entered it."""
        ended, outlasting = self.ended, 0.0
        if borrowed > 0:
            ended = ended + borrowed * parent.masses
            outlasting = borrowed * float(parent.survival[-1])
        entered = np.cumsum((ended + self.censored)[::-1])[::-1] + outlasting
        at_risk = entered - 0.5 * self.censored
        hazards = np.zeros_like(ended)  # where nothing came it stays unknown, that is 0
        np.divide(ended, at_risk, out=hazards, where=at_risk > 0.0)
        survival = np.ones(len(ended) + 1)
        np.cumprod(1.0 - np.minimum(hazards, 1.0), out=survival[1:])
        return Belief(survival, float(entered[0]))


class DurationEstimator:
    """Survival curves of tool calls by key; a key seen little leans on its parents.

    Parameters
    ----------
    prior_strength: how many observations of its own make a key as credible as its parent.
    half_life: after so many later observations of its key an observation counts half.
    max_keys: the keys not seen for longest are forgotten beyond this.
    min_s, max_s, num_bins: durations are told apart in so many bins, evenly in log(duration).
    """

    edges_: tuple[float, ...]
    """Bounds of the bins, num_bins + 1, from 0."""
    histograms_: OrderedDict[tuple[str, ...], DurationHistogram]
    """By the parts of the key, the one seen least recently first; a parent always after its children."""

    def __init__(
        self,
        prior_strength: float = 4.0,
        half_life: float = 500.0,
        max_keys: int = 1024,
        min_s: float = 0.001,
        max_s: float = 21600.0,
        num_bins: int = 120,
    ) -> None:
        self.prior_strength = prior_strength
        self.half_life = half_life
        self.max_keys = max_keys
        self.min_s = min_s
        self.max_s = max_s
        self.num_bins = num_bins

    # -- learning --------------------------------------------------------------------------------------

    def fit(
        self, keys: Sequence[ToolKey], durations_s: Iterable[float], censored: Iterable[bool] | None = None
    ) -> Self:
        """Forget everything, then learn these, oldest first."""
        self.start()
        return self.partial_fit(keys, durations_s, censored)

    def partial_fit(
        self, keys: Sequence[ToolKey], durations_s: Iterable[float], censored: Iterable[bool] | None = None
    ) -> Self:
        """Learn these too, oldest first. ``censored``: it had lasted so long when it was last seen."""
        cut_off = [False] * len(keys) if censored is None else censored
        for key, duration_s, was_cut_off in zip(keys, durations_s, cut_off, strict=True):
            self.observe(key, duration_s, was_cut_off)
        return self

    def observe(self, key: ToolKey, duration_s: float, censored: bool = False) -> None:
        """Learn one duration, for the key and all its parents."""
        if not duration_s >= 0:
            raise ValueError(f"a duration must be at least 0 s, not {duration_s}")
        if not hasattr(self, "histograms_"):
            self.start()
        # Bin i covers (edge i, edge i + 1]; a duration of 0 belongs to the first, one past max_s to the last.
        index = min(max(bisect_left(self.edges_, duration_s) - 1, 0), self.num_bins - 1)
        keep = 0.5 ** (1 / self.half_life)
        for depth in range(len(key.parts), -1, -1):
            parts = key.parts[:depth]
            histogram = self.histograms_.get(parts)
            if histogram is None:
                histogram = self.histograms_[parts] = DurationHistogram(self.num_bins)
            histogram.add(index, censored, keep)
            self.histograms_.move_to_end(parts)
        while len(self.histograms_) > self.max_keys:
            self.histograms_.popitem(last=False)

    def start(self) -> None:
        """Check the parameters and begin with nothing learned."""
        limits = {"prior_strength": 0.01, "half_life": 1.0, "max_keys": 8, "min_s": 1e-9, "num_bins": 2}
        for name, least in limits.items():
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least {least}, not {getattr(self, name)}")
        if not self.min_s < self.max_s < math.inf:
            raise ValueError(f"max_s must be finite and above min_s ({self.min_s}), not {self.max_s}")
        self.edges_ = (0.0, *np.geomspace(self.min_s, self.max_s, self.num_bins).tolist())
        self.histograms_ = OrderedDict()

    # -- answers ---------------------------------------------------------------------------------------

    def survival(self, key: ToolKey) -> SurvivalCurve:
        """The curve of a key; of its nearest known parent, trusted less, if it was never seen."""
        belief, strength = NO_BELIEF, self.prior_strength
        if not getattr(self, "histograms_", None):
            return NOTHING_KNOWN
        for depth in range(len(key.parts) + 1):
            histogram = self.histograms_.get(key.parts[:depth])
            if histogram is None:
                return belief.curve(self.edges_).resting_on(min(strength, belief.weight))
            belief = histogram.belief(belief, strength)
        return belief.curve(self.edges_)

    def predict(self, keys: Sequence[ToolKey]) -> FloatArray:
        """Median seconds of each key; inf where it is not known."""
        return self.predict_quantile(keys, 0.5)

    def predict_quantile(self, keys: Sequence[ToolKey], q: float) -> FloatArray:
        """The q-quantile of each key in seconds; inf where it is not known."""
        return np.array([self.survival(key).quantile(q) for key in keys], dtype=np.float64)

    # -- scikit-learn's parameter access, without importing it -----------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change parameters; those of the bins take effect with the next ``fit``."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"DurationEstimator has no parameter {name!r}; it has {', '.join(known)}")
            setattr(self, name, value)
        return self
