"""Keeps what a DurationEstimator learned across restarts, in one file that is always whole.

Of the engine it knows nothing; whether a bad file stops the program is the caller's choice.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from estimator.durations import DurationEstimator, DurationHistogram, FloatArray

STATE_VERSION = 1

Index = Annotated[int, msgspec.Meta(ge=0)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class EstimatorStateError(Exception):
    """The file holds no state that this version can read; its text is one sentence for the user."""


class _Head(msgspec.Struct):
    """As much of a state file as every version has."""

    format: Literal["tool-durations"]
    version: int


class _KeyState(msgspec.Struct, array_like=True):
    """One key: the bins in which something was seen, and the weights there."""

    parts: tuple[str, ...]
    bins: list[Index]
    ended: list[Weight]
    censored: list[Weight]


class _State(msgspec.Struct):
    prior_strength: float
    half_life: float
    max_keys: int
    min_s: float
    max_s: float
    num_bins: Annotated[int, msgspec.Meta(le=100_000)]
    keys: list[_KeyState]
    """In the order of ``DurationEstimator.histograms_``."""
    format: str = "tool-durations"
    version: int = STATE_VERSION


def snapshot(estimator: DurationEstimator) -> bytes:
    """All that ``restore`` needs, as JSON. Quick: a loop takes it and leaves ``write_state`` to a thread."""
    histograms = getattr(estimator, "histograms_", {})
    keys = [_key_state(parts, histogram) for parts, histogram in histograms.items()]
    return msgspec.json.encode(_State(keys=keys, **estimator.get_params()))


def restore(data: bytes) -> DurationEstimator:
    """An estimator that answers as the one that was saved; EstimatorStateError if ``data`` is not that."""
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version != STATE_VERSION:
            raise EstimatorStateError(f"it has version {version}, this program reads version {STATE_VERSION}")
        state = msgspec.json.decode(data, type=_State)
        estimator = DurationEstimator(
            **{name: getattr(state, name) for name in DurationEstimator().get_params()}
        )
        estimator.start()
        for key in state.keys:
            estimator.histograms_[key.parts] = _histogram(key, estimator.num_bins)
        if estimator.histograms_ and next(reversed(estimator.histograms_)) != ():
            raise EstimatorStateError("it does not end with the key of all calls")
    except (ValueError, IndexError, RecursionError) as error:
        raise EstimatorStateError(f"it is damaged or of another program: {error}") from error
    return estimator


def save_estimator(estimator: DurationEstimator, path: str | Path) -> None:
    """Write the state; a reader, or a restart after a crash, sees the old file or the new one, whole."""
    write_state(snapshot(estimator), path)


def load_estimator(path: str | Path) -> DurationEstimator:
    """What was saved at ``path``, a fresh one if there is no such file; EstimatorStateError if not ours."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return DurationEstimator()
    except OSError as error:
        raise EstimatorStateError(f"The estimator state {path} cannot be read: {error.strerror}.") from error
    try:
        return restore(data)
    except EstimatorStateError as error:
        raise EstimatorStateError(f"The estimator state {path} cannot be used: {error}.") from error


def write_state(data: bytes, path: str | Path) -> None:
    """Replace the file at ``path`` in one step. OSError if that fails; the old file is then untouched."""
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(target.parent)


def _key_state(parts: tuple[str, ...], histogram: DurationHistogram) -> _KeyState:
    bins = np.flatnonzero(histogram.ended + histogram.censored)
    return _KeyState(parts, bins.tolist(), histogram.ended[bins].tolist(), histogram.censored[bins].tolist())


def _histogram(key: _KeyState, num_bins: int) -> DurationHistogram:
    if not len(key.bins) == len(key.ended) == len(key.censored):
        raise EstimatorStateError(f"the weights of {'/'.join(key.parts) or '*'} do not match its bins")
    histogram = DurationHistogram(num_bins)
    _fill(histogram.ended, key.bins, key.ended)
    _fill(histogram.censored, key.bins, key.censored)
    return histogram


def _fill(weights: FloatArray, bins: list[int], values: list[float]) -> None:
    weights[np.array(bins, dtype=np.intp)] = values


def _sync_directory(path: Path) -> None:
    """Make the new name itself survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
