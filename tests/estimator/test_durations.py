"""Durations are learned per kind of call: censored ones count, rare kinds use their parents, old ones
fade."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone

from estimator.durations import DurationEstimator
from estimator.state import restore, snapshot
from estimator.tenants import Learned
from estimator.tool_key import ToolKey, tool_key

ANY = ToolKey(())
BASH = ToolKey(("bash",))
PYTEST = tool_key("bash", "pytest")
LS = tool_key("bash", "ls")
RATIO = 1.16
"""The ratio of a bin's upper to its lower bound: the precision of an answer."""


def test_nothing_learned() -> None:
    """An estimator without data reports so and predicts nothing."""
    for estimator in (DurationEstimator(), DurationEstimator().fit([], [])):
        assert estimator.survival(PYTEST).num_observations == 0
        assert estimator.predict([PYTEST]).tolist() == [math.inf]


def test_quantiles_of_what_was_seen() -> None:
    """With enough data a key's quantiles are those of the data, with the precision of the bins."""
    durations = np.random.default_rng(1).lognormal(0.0, 1.5, 400)
    estimator = DurationEstimator(half_life=1e9).fit([PYTEST] * 400, durations)
    for q in (0.1, 0.25, 0.5, 0.75, 0.9):
        ratio = estimator.predict_quantile([PYTEST], q)[0] / np.quantile(durations, q)
        assert 1 / RATIO < ratio < RATIO
    assert estimator.survival(PYTEST).expected_min(math.inf) == pytest.approx(durations.mean(), rel=0.05)


def test_censored_calls_count() -> None:
    """Calls cut off while running count: without them the median would be far too low."""
    rng = np.random.default_rng(2)
    true_s, given_up_s = rng.exponential(10.0, 2000), rng.exponential(10.0, 2000)
    seen_s, censored = np.minimum(true_s, given_up_s), true_s > given_up_s
    keys = [PYTEST] * 2000
    estimator = DurationEstimator(half_life=1e9).fit(keys, seen_s, censored)
    assert estimator.predict([PYTEST])[0] == pytest.approx(10 * math.log(2), rel=0.1)
    ended_only = DurationEstimator(half_life=1e9).fit(keys[: int((~censored).sum())], seen_s[~censored])
    assert ended_only.predict([PYTEST])[0] < 0.6 * 10 * math.log(2)


def test_a_calls_own_limit() -> None:
    """A call with a time limit is expected to end by then; being stopped counts as censored."""
    estimator = DurationEstimator().fit([PYTEST] * 20, [100.0] * 20)
    limited = tool_key("bash", "timeout 30 pytest")
    assert estimator.survival(PYTEST).cdf(60) < 0.1
    assert estimator.survival(limited).cdf(30 / RATIO) < 0.1
    assert estimator.survival(limited).quantile(0.9) == pytest.approx(30, rel=RATIO - 1)
    for _ in range(20):
        estimator.observe(limited, 30.2)
    assert estimator.predict([PYTEST])[0] == pytest.approx(100, rel=0.2)


def test_only_censored() -> None:
    """A call that was only ever cut off has no known upper bound."""
    estimator = DurationEstimator().fit([PYTEST] * 3, [60.0, 60.0, 60.0], [True] * 3)
    curve = estimator.survival(PYTEST)
    assert curve.num_observations > 0
    assert curve.cdf(1e6) == 0
    assert curve.median_remaining(0) == math.inf


def test_rare_keys_lean_on_their_parents() -> None:
    """An unseen kind of call uses its parent; its own observations take over gradually."""
    estimator = DurationEstimator().fit([PYTEST] * 50, [10.0] * 50)
    new = ToolKey(("bash", "new", "thing"))
    assert estimator.predict([new])[0] == pytest.approx(10, rel=0.2)
    assert estimator.survival(new).num_observations == estimator.prior_strength
    probabilities = []
    for _ in range(20):
        estimator.observe(new, 0.1)
        probabilities.append(estimator.survival(new).cdf(1.0))
    assert 0.1 < probabilities[0] < 0.7
    assert probabilities == sorted(probabilities)
    assert probabilities[-1] > 0.9


def test_keys_are_told_apart() -> None:
    """``cd x && pytest`` is learned as pytest, not as cd: a fast ``cd x && ls`` does not change it."""
    slow, fast = tool_key("bash", "cd x && pytest"), tool_key("bash", "cd x && ls")
    estimator = DurationEstimator().fit([slow, fast] * 30, [20.0, 0.05] * 30)
    assert slow == PYTEST
    assert estimator.predict([slow])[0] == pytest.approx(20, rel=0.2)
    assert estimator.predict([fast])[0] == pytest.approx(0.05, rel=0.2)


def test_old_observations_fade() -> None:
    """When a tool becomes slower the estimate follows within a few half-lives."""
    estimator = DurationEstimator(half_life=20).fit([PYTEST] * 200, [1.0] * 200)
    estimator.partial_fit([PYTEST] * 60, [30.0] * 60)
    assert estimator.predict([PYTEST])[0] == pytest.approx(30, rel=0.2)
    assert estimator.survival(PYTEST).num_observations < 20 / math.log(2) + estimator.prior_strength + 1


def test_old_observations_fade_with_time() -> None:
    """Observations of weeks ago count less than recent ones, however few came between. No time passes for a
    key without newer observations, nor between a stop and a start."""
    estimator = DurationEstimator(half_life=1e9, half_life_s=3600.0)
    for _ in range(100):
        estimator.observe(PYTEST, 1.0, now=50.0)
    estimator.observe(LS, 0.1, now=50.0 + 10 * 3600)
    assert estimator.predict([PYTEST])[0] == pytest.approx(1, rel=0.2)
    estimator.observe(PYTEST, 30.0, now=50.0 + 10 * 3600)
    assert estimator.survival(PYTEST).cdf(2.0) < 0.5
    restarted = restore(snapshot(Learned(estimator))).durations
    restarted.observe(PYTEST, 30.0, now=7.0)  # The clock of the new process.
    assert restarted.survival(PYTEST).num_observations == pytest.approx(2.1 + 4, abs=0.1)


def test_a_jobs_own_calls_come_first() -> None:
    """If tests took a minute in this job, they are expected to do so again, though they are quick elsewhere;
    other kinds and other jobs are unaffected."""
    estimator = DurationEstimator().fit([PYTEST, LS] * 50, [1.0, 0.1] * 50)
    expected = []
    for _ in range(8):
        estimator.observe(PYTEST, 60.0, job="slow")
        expected.append(estimator.survival(PYTEST, "slow").quantile(0.5))
    assert expected == sorted(expected)
    assert expected[-1] == pytest.approx(60, rel=0.2)
    assert estimator.survival(PYTEST, "other").quantile(0.5) == pytest.approx(1, rel=0.2)
    assert estimator.survival(LS, "slow").quantile(0.5) == pytest.approx(0.1, rel=0.2)


def test_what_a_job_tells_is_learned() -> None:
    """If durations repeat within jobs, one call predicts the next of its job; if each is independent, even
    several equal ones do not."""
    telling, idle = DurationEstimator(), DurationEstimator()
    rng = np.random.default_rng(4)
    for job in range(60):
        of_job_s = rng.lognormal(1.0, 1.5)
        for _ in range(5):
            telling.observe(PYTEST, of_job_s, job=f"job{job}")
            idle.observe(PYTEST, rng.lognormal(1.0, 1.5), job=f"job{job}")
    for estimator, num_calls in ((telling, 1), (idle, 3)):
        for _ in range(num_calls):
            estimator.observe(PYTEST, 100.0, job="new")
    usual_s = idle.survival(PYTEST).quantile(0.5)
    assert telling.survival(PYTEST, "new").quantile(0.5) == pytest.approx(100, rel=0.2)
    assert idle.survival(PYTEST, "new").quantile(0.5) == pytest.approx(usual_s, rel=0.1)


def test_memory_is_bounded() -> None:
    """Beyond ``max_keys`` kinds those unseen for longest are forgotten, never a parent of a kept one."""
    estimator = DurationEstimator(max_keys=16, max_job_keys=10)
    for number in range(100):
        estimator.observe(ToolKey(("bash", f"program{number}", "x")), 1.0, job=f"job{number}")
        kept = estimator.histograms_
        assert len(kept) <= 16
        assert all(parts[:-1] in kept for parts in kept)
    assert estimator.survival(ToolKey(("bash", "program99"))).num_observations > 1
    assert [job for job, _ in estimator.job_histograms_] == [f"job{number}" for number in range(90, 100)]


def test_scikit_learn_conventions() -> None:
    """scikit-learn can clone it; parameters are read and set by name and validated when fitting starts."""
    estimator = DurationEstimator(half_life=7).fit([LS], [1.0])
    fresh = clone(estimator)
    assert fresh.get_params() == estimator.get_params()
    assert not hasattr(fresh, "histograms_")
    assert fresh.set_params(prior_strength=1.0).prior_strength == 1.0
    with pytest.raises(ValueError, match="no parameter 'half_live'"):
        fresh.set_params(half_live=3)
    with pytest.raises(ValueError, match="half_life must be"):
        DurationEstimator(half_life=0).fit([], [])
    with pytest.raises(ValueError, match="max_s must be"):
        DurationEstimator(min_s=5, max_s=1).fit([], [])
    with pytest.raises(ValueError, match="at least 0 s"):
        fresh.observe(LS, math.nan)


OBSERVATIONS = st.lists(
    st.tuples(
        st.sampled_from([PYTEST, LS, BASH, ANY, ToolKey(("read",))]),
        st.sampled_from([0.0, 1e-4, 0.02, 1.0, 60.0, 7200.0, 1e6, math.inf]) | st.floats(0, 100),
        st.booleans(),
        st.none() | st.sampled_from(["a", "b"]),
    ),
    max_size=30,
)


@given(observations=OBSERVATIONS, strength=st.sampled_from([0.5, 4.0]))
def test_any_history_gives_legal_curves(
    observations: list[tuple[ToolKey, float, bool, str | None]], strength: float
) -> None:
    """For any observations every curve is a distribution function, and reading curves changes nothing."""
    asked, silent = (DurationEstimator(prior_strength=strength, half_life=3, max_keys=8) for _ in range(2))
    for key, duration_s, censored, job in observations:
        asked.observe(key, duration_s, censored, job=job)
        asked.survival(PYTEST, "a")
        silent.observe(key, duration_s, censored, job=job)
    for key, job in itertools.product((PYTEST, LS, BASH, ANY), (None, "a")):
        curve = asked.survival(key, job)
        p = list(curve.probabilities)
        assert p[0] == 0
        assert p == sorted(p)
        assert p[-1] <= 1
        assert p == list(silent.survival(key, job).probabilities)
        assert list(asked.survival(key, job).probabilities) == p
        assert (curve.num_observations == 0) == (not observations)
        if observations and not any(censored for _, _, censored, _ in observations):
            assert p[-1] == 1
