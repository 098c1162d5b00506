"""A step's time from a profile measured on a real engine. Knows neither the model nor the hardware.

    step = a + b·[more than one token] + c·new tokens + d·pairs + e·decodes + f·tokens that decodes read

New tokens and (query-key) pairs are those of prefills: n tokens after P others make n·(P + n/2) pairs, so
that a prefill is quadratic in n, as in the profile of the Continuum paper (arXiv 2511.02230). A step of one
token has a separate constant: a CPU multiplies a matrix with one vector differently than with several.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from eval.errors import UNREADABLE, CostModelError
from eval.sim.cost_model import StepWork
from eval.sim.step_samples import StepSample

FloatArray = NDArray[np.float64]

SCHEMA_VERSION = 1
NUM_COEFFICIENTS = 6
MIN_KINDS = 8
"""Fewest kinds of steps that a fit needs."""
OUTLIER = 3.0
REWEIGHTINGS = 5
SMALL_ERROR = 0.02
"""Relative error; smaller errors have the same weight."""


class CostProfile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Costs of one model measured on one machine; does not describe the machine."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "cost_profile"
    model: str
    dtype: str
    date: str | None = None
    """Date of the measurement, as the user gave it."""
    kv_bytes_per_token: int
    step_tokens: int
    """Token budget of a step: longer prefills take several."""
    step_s: float
    """The constant a."""
    batch_s: float
    """Extra time if the step computes more than one token. The following fields are per unit."""
    new_token_s: float
    pair_s: float
    decode_s: float
    context_token_s: float
    arrival_s: float | None = None
    """Time from sending a request to its first step, in an idle server; None if not measured."""
    reply_s: float | None = None
    """Time from the end of a request's last step until its client has the answer."""
    copy_bytes_per_s: float | None = None
    """Rate between two places in host memory; the rate to an accelerator is not measured."""
    num_steps: int
    num_kinds: int
    """Number of kinds of steps, by size, which have equal weight in the fit."""
    median_error: float
    """Relative error, over the steps."""
    p95_error: float
    max_decodes: int
    """Largest measured value; the fit is extrapolated linearly beyond it."""
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class StepFit:
    """Coefficients, and how well they describe the fitted steps."""

    coefficients: list[float]
    num_steps: int
    num_kinds: int
    median_error: float
    p95_error: float
    max_decodes: int
    max_context_tokens: int

    def profile(self, *, model: str, dtype: str, kv_bytes_per_token: int, step_tokens: int) -> CostProfile:
        """Makes a profile of steps only: time around the engine and of transfers is not measured."""
        step_s, batch_s, new_token_s, pair_s, decode_s, context_token_s = self.coefficients
        return CostProfile(
            model=model,
            dtype=dtype,
            kv_bytes_per_token=kv_bytes_per_token,
            step_tokens=step_tokens,
            step_s=step_s,
            batch_s=batch_s,
            new_token_s=new_token_s,
            pair_s=pair_s,
            decode_s=decode_s,
            context_token_s=context_token_s,
            num_steps=self.num_steps,
            num_kinds=self.num_kinds,
            median_error=self.median_error,
            p95_error=self.p95_error,
            max_decodes=self.max_decodes,
            max_context_tokens=self.max_context_tokens,
        )


class FittedCost:
    """The StepCost of a measured profile."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.kv_bytes_per_token = profile.kv_bytes_per_token
        self.step_overhead_s = profile.step_s
        self.arrival_overhead_s = profile.arrival_s or 0.0
        self.reply_overhead_s = profile.reply_s or 0.0
        # Separate attributes: a simulation requests millions of steps.
        self._batch_s = profile.batch_s
        self._new_token_s = profile.new_token_s
        self._pair_s = profile.pair_s
        self._decode_s = profile.decode_s
        self._context_token_s = profile.context_token_s

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step, including its overhead."""
        seconds = self.step_overhead_s
        if work.num_decodes > 1 or work.prefills:
            seconds += self._batch_s
        seconds += self._decode_s * work.num_decodes + self._context_token_s * work.decode_context_tokens
        for new_tokens, context_tokens in work.prefills:
            pairs = new_tokens * (context_tokens + new_tokens / 2)
            seconds += self._new_token_s * new_tokens + self._pair_s * pairs
        return seconds

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """Seconds to compute ``num_tokens`` after ``context_tokens`` in steps of the usual size, alone."""
        if num_tokens <= 0:
            return 0.0
        num_steps = -(-num_tokens // self.profile.step_tokens)
        work = StepWork(prefills=[(num_tokens, context_tokens)])
        return (num_steps - 1) * (self.step_overhead_s + self._batch_s) + self.step_s(work)

    def copy_s(self, num_tokens: int) -> float:
        """Seconds to copy the KV of ``num_tokens`` within host memory; 0 if that was not measured."""
        speed = self.profile.copy_bytes_per_s
        return 0.0 if speed is None else num_tokens * self.kv_bytes_per_token / speed

    def notes(self) -> list[str]:
        """What is measured and what is assumed, a sentence each, for the report."""
        p = self.profile
        when = "" if p.date is None else f" on {p.date}"
        fitted = f"{p.num_steps:,} steps (error: median {p.median_error:.0%}, p95 {p.p95_error:.0%})"
        largest = f"{p.max_decodes} decodes and {p.max_context_tokens:,} tokens of context"
        notes = [
            f"step times: MEASURED{when} for {p.model} in {p.dtype}, fitted to {fitted}",
            f"measured up to {largest}; ASSUMED to go on linearly beyond",
        ]
        if p.arrival_s is None or p.reply_s is None:
            notes.append("ASSUMED: nothing is lost between client and engine")
        if p.copy_bytes_per_s is None:
            notes.append("ASSUMED: copies of KV take no time")
        else:
            notes.append("copies of KV: measured in host memory; ASSUMED the same for a device")
        return notes


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
    """Fits coefficients to the steps with a known time; CostModelError if they are too few or too alike.

    Every kind of step has the same weight, relative to its time, so that a few long steps count like many
    short ones. Then all coefficients are scaled so that the sum of all steps' times is right.
    """
    timed = [sample for sample in samples if sample.seconds is not None]
    kinds = Counter(_size(sample.work) for sample in timed)
    if len(kinds) < MIN_KINDS:
        raise CostModelError(
            f"There are steps of {len(kinds)} different sizes; a fit needs at least {MIN_KINDS}: "
            "let the engine serve short and long prompts, alone and together."
        )
    work = np.array([_row(sample.work) for sample in timed])
    seconds = np.array([sample.seconds for sample in timed])
    weights = np.array([1.0 / kinds[_size(sample.work)] for sample in timed])
    coefficients = _unbiased(_fit(work / seconds[:, None], weights), work, seconds)
    errors = np.abs(work @ coefficients / seconds - 1.0)
    return StepFit(
        coefficients=coefficients.tolist(),
        num_steps=len(timed),
        num_kinds=len(kinds),
        median_error=float(np.median(errors)),
        p95_error=float(np.quantile(errors, 0.95)),
        max_decodes=max(sample.work.num_decodes for sample in timed),
        max_context_tokens=max(_longest_context(sample.work) for sample in timed),
    )


def _row(work: StepWork) -> list[float]:
    """[1, more than one token, new tokens, pairs, decodes, context tokens]"""
    new = sum(num_new for num_new, _ in work.prefills)
    pairs = sum(num_new * (context + num_new / 2) for num_new, context in work.prefills)
    many = new + work.num_decodes > 1
    return [1.0, float(many), new, pairs, work.num_decodes, work.decode_context_tokens]


def _size(work: StepWork) -> tuple[int, ...]:
    """Returns the key of a kind of steps: each quantity to a factor of two, decodes more exactly."""
    _, _, new, pairs, decodes, context = _row(work)
    return (_octave(new), _octave(pairs), round(2 * math.log2(1 + decodes)), _octave(context))


def _octave(amount: float) -> int:
    return int(amount).bit_length()


def _longest_context(work: StepWork) -> int:
    prefills = max((new + context for new, context in work.prefills), default=0)
    decodes = work.decode_context_tokens // work.num_decodes if work.num_decodes else 0
    return max(prefills, decodes)


def _fit(relative: FloatArray, weights: FloatArray) -> FloatArray:
    """Non-negative coefficients [6] that bring ``relative`` [num_steps, 6], work over time, close to 1: those
    with the least weighted sum of absolute errors, which a few disturbed steps hardly change.

    Found by least squares, reweighted by the errors of the previous round.
    """
    coefficients = _least_squares(relative, weights)
    for _ in range(REWEIGHTINGS):
        errors = np.abs(relative @ coefficients - 1.0)
        coefficients = _least_squares(relative, weights / np.maximum(errors, SMALL_ERROR))
    return coefficients


def _least_squares(relative: FloatArray, weights: FloatArray) -> FloatArray:
    """Non-negative coefficients with the least weighted sum of squared errors; with so few columns every
    subset of them is tried, and the best without a negative coefficient is the optimum."""
    root = np.sqrt(weights)
    best = np.zeros(NUM_COEFFICIENTS)
    best_error = math.inf
    for count in range(1, NUM_COEFFICIENTS + 1):
        for chosen in combinations(range(NUM_COEFFICIENTS), count):
            columns = list(chosen)
            scale = relative[:, columns].max(axis=0)
            if not scale.all():
                continue
            scaled = relative[:, columns] / scale * root[:, None]
            solution = np.linalg.lstsq(scaled, root, rcond=None)[0]
            error = float(((scaled @ solution - root) ** 2).sum())
            if (solution >= 0).all() and error < best_error * (1 - 1e-9):
                best = np.zeros(NUM_COEFFICIENTS)
                best[columns] = solution / scale
                best_error = error
    return best


def _unbiased(coefficients: FloatArray, work: FloatArray, seconds: FloatArray) -> FloatArray:
    """Scales the coefficients so that the sum of all steps' times is right: jitter is part of a step's cost.
    A step that waited for another program counts for at most OUTLIER times the usual."""
    usual = work @ coefficients
    return np.asarray(coefficients * np.minimum(seconds, OUTLIER * usual).sum() / usual.sum())


def write_profile(path: Path, profile: CostProfile) -> None:
    """Writes the profile as JSON; CostModelError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    except OSError as error:
        raise CostModelError(f"Cannot write the profile {path}: {error.strerror or error}.") from error


def read_profile(path: Path) -> FittedCost:
    """Returns the cost model of a profile; CostModelError names the file and what is wrong with it."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=CostProfile)
    except OSError as error:
        raise CostModelError(f"Cannot read the profile {path}: {error.strerror or error}.") from error
    except UNREADABLE as error:
        raise CostModelError(f"{path} is not a cost profile: {error}.") from error
    if profile.schema_version != SCHEMA_VERSION:
        raise CostModelError(
            f"{path} has schema version {profile.schema_version}; this program reads {SCHEMA_VERSION}."
        )
    bad = next((name for name in _COEFFICIENTS if not 0 <= getattr(profile, name) < math.inf), None)
    if bad is not None or profile.step_tokens < 1:
        raise CostModelError(f"{path}: {bad or 'step_tokens'} must be {'0 or' if bad else '1 or'} more.")
    return FittedCost(profile)


_COEFFICIENTS = ("step_s", "batch_s", "new_token_s", "pair_s", "decode_s", "context_token_s")
