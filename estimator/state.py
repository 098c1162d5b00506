"""Keeps what was learned about tool calls and turns across restarts, in one file that is always complete.

It does not know the engine; the caller decides whether a bad file stops the program.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from estimator.credibility import MIN_JUDGED, STRENGTHS, Credibility
from estimator.durations import DurationEstimator, DurationHistogram
from estimator.growth import MAX_KINDS, MAX_TURNS, Counts, Growth, TurnCounts
from estimator.kinds import Kind
from estimator.learned.duration_model import DurationModel, check_durations
from estimator.learned.work_model import WorkModel, check_model
from estimator.tenants import LENT, Learned, Tenants
from estimator.turn_outcomes import TurnOutcomes, TurnTally

STATE_VERSION = 4
MAX_TOKENS = 100_000_000
"""The most tokens that turns add on average; more is no context."""
VERSION_WITHOUT_TENANTS = 3
"""Version that is written while no tenant has a name; it can be read too."""

Index = Annotated[int, msgspec.Meta(ge=0)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
TurnNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_TURNS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class EstimatorStateError(Exception):
    """The file has no state that this version can read. The message is one sentence for the user."""


class _Head(msgspec.Struct):
    """The part of a state file that all versions share."""

    format: Literal["tool-durations"]
    version: int


class _KeyState(msgspec.Struct, array_like=True):
    """One key: the bins with observations and their weights, then how well jobs' own calls predicted."""

    parts: tuple[str, ...]
    bins: list[Index]
    ended: list[Weight]
    censored: list[Weight] | None
    seen_s: Seconds
    num_judged: Weight
    job_losses: list[Weight]
    """Empty if no prediction was scored."""


class _TurnState(msgspec.Struct, array_like=True):
    """One kind of end of a turn: the fields of its ``TurnTally``."""

    parts: tuple[str, ...]
    num_turns: Weight
    num_last: Weight
    num_followed: Weight
    growth_tokens: Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class _TenantState(msgspec.Struct):
    """The learned state of one tenant."""

    name: str
    keys: list[_KeyState]
    turns: list[_TurnState]


class _CreditState(msgspec.Struct, array_like=True):
    """How well the beliefs lent by other tenants predicted the calls of a kind."""

    parts: tuple[str, ...]
    num_judged: Weight
    losses: list[Weight]


class _GrowthState(msgspec.Struct, array_like=True):
    """How contexts of a kind grow: for each number of a turn the fields of its ``TurnCounts``."""

    tenant: str | None
    beginning: bytes | None
    numbers: Annotated[list[TurnNumber], msgspec.Meta(max_length=MAX_TURNS + 1)]
    followed: list[Weight]
    last: list[Weight]
    tokens: list[Annotated[float, msgspec.Meta(ge=0, le=1e18)]]


class _State(msgspec.Struct):
    prior_strength: float
    half_life: float
    half_life_s: float
    max_keys: int
    max_job_keys: int
    min_s: float
    max_s: float
    num_bins: Annotated[int, msgspec.Meta(le=100_000)]
    clock_s: Seconds
    keys: list[_KeyState]
    """Histograms, in the order of ``DurationEstimator.histograms_``."""
    turns: list[_TurnState]
    """Tallies, in the order of ``TurnOutcomes.tallies``."""
    min_judged: float = MIN_JUDGED
    only: str | None = None
    """See ``Tenants``."""
    tenants: list[_TenantState] = []
    """Tenants, in the order of ``Tenants.own``."""
    credit: list[_CreditState] = []
    growth: Annotated[list[_GrowthState], msgspec.Meta(max_length=MAX_KINDS)] = []
    """Kinds of jobs, in the order of ``Growth.kinds``."""
    period_s: Seconds = 0.0
    """See ``Growth``."""
    work_model: WorkModel | None = None
    """The learned model of jobs' remaining work, from ``continuum learn`` or from the server's own
    lessons."""
    duration_model: DurationModel | None = None
    """The learned model of how long calls take, from the same sources."""
    format: str = "tool-durations"
    version: int = STATE_VERSION


def snapshot(learned: Learned | Tenants) -> bytes:
    """Returns everything that ``restore`` needs, as JSON. Fast enough for an event loop, which leaves
    ``write_state`` to a thread."""
    known = learned if isinstance(learned, Tenants) else Tenants(learned)
    names_tenants = bool(known.own or known.only or any(kind.tenant for kind in known.growth.kinds))
    state = _State(
        keys=_key_states(known.durations),
        turns=_turn_states(known.turns),
        clock_s=known.durations.clock_s,
        only=known.only or None,
        tenants=[
            _TenantState(name, _key_states(own.durations), _turn_states(own.turns))
            for name, own in known.own.items()
        ],
        credit=[_CreditState(parts, each.num_judged, each.losses) for parts, each in known.credit.items()],
        growth=[_growth_state(kind, turns) for kind, turns in known.growth.kinds.items()],
        period_s=known.growth.period_s,
        work_model=known.work_model,
        duration_model=known.duration_model,
        version=STATE_VERSION if names_tenants else VERSION_WITHOUT_TENANTS,
        **known.durations.get_params(),
    )
    return msgspec.json.encode(state)


def _key_states(durations: DurationEstimator) -> list[_KeyState]:
    return [_key_state(parts, histogram) for parts, histogram in durations.items()]


def _turn_states(turns: TurnOutcomes) -> list[_TurnState]:
    return [_turn_state(parts, tally) for parts, tally in turns.tallies.items()]


def restore(data: bytes) -> Tenants:
    """Restores the learned state, which answers like the saved one; EstimatorStateError if ``data`` is not
    such a state."""
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version not in (STATE_VERSION, VERSION_WITHOUT_TENANTS):
            raise EstimatorStateError(
                f"it has version {version}, this program reads version {STATE_VERSION}: "
                "move it away to start again"
            )
        state = msgspec.json.decode(data, type=_State)
        return _tenants(state)
    except (ValueError, IndexError, RecursionError) as error:
        raise EstimatorStateError(f"it is damaged or belongs to another program: {error}") from error


def load_learned(path: str | Path) -> Tenants:
    """Reads the state saved at ``path``; an empty one if there is no such file. EstimatorStateError if it
    cannot be read."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return Tenants()
    except OSError as error:
        raise EstimatorStateError(f"The estimator state {path} cannot be read: {error.strerror}.") from error
    try:
        return restore(data)
    except EstimatorStateError as error:
        raise EstimatorStateError(f"The estimator state {path} cannot be used: {error}.") from error


def write_state(data: bytes, path: str | Path) -> None:
    """Replaces the file at ``path`` atomically; OSError if that fails.

    A reader, or a restart after a crash, sees the whole old file or the whole new one.
    """
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
    ended = histogram.ended
    censored = histogram.censored
    bins = [index for index, weight in enumerate(ended) if weight or (censored and censored[index])]
    weights = None if censored is None else [censored[index] for index in bins]
    of_jobs = histogram.of_jobs
    num_judged, losses = (0.0, []) if of_jobs is None else (of_jobs.num_judged, of_jobs.losses)
    return _KeyState(
        parts, bins, [ended[index] for index in bins], weights, histogram.seen_s, num_judged, losses
    )


def _turn_state(parts: tuple[str, ...], tally: TurnTally) -> _TurnState:
    return _TurnState(parts, tally.num_turns, tally.num_last, tally.num_followed, tally.growth_tokens)


def _growth_state(kind: Kind, turns: Counts) -> _GrowthState:
    counts = turns.values()
    return _GrowthState(
        *kind,
        list(turns),
        [each.num_followed for each in counts],
        [each.num_last for each in counts],
        [each.num_tokens for each in counts],
    )


def _tenants(state: _State) -> Tenants:
    tenants = Tenants(Learned(_durations(state, state.keys), _turns(state.turns)))
    tenants.only = state.only
    for each in state.tenants:
        tenants.add(each.name, Learned(_durations(state, each.keys), _turns(each.turns)))
    for credit in state.credit:
        tenants.credit[credit.parts] = _credit(credit)
    tenants.growth = _growth(state)
    if state.work_model is not None:
        check_model(state.work_model)
        tenants.work_model = state.work_model
    if state.duration_model is not None:
        check_durations(state.duration_model)
        tenants.duration_model = state.duration_model
    return tenants


def _credit(state: _CreditState) -> Credibility:
    if len(state.losses) != len(LENT):
        raise EstimatorStateError(
            f"the credit of what tenants lend for {'/'.join(state.parts) or '*'} is incomplete"
        )
    credit = Credibility(LENT)
    credit.num_judged = state.num_judged
    credit.losses = state.losses
    return credit


def _durations(state: _State, keys: list[_KeyState]) -> DurationEstimator:
    estimator = DurationEstimator(**{name: getattr(state, name) for name in DurationEstimator().get_params()})
    estimator.start()
    estimator.clock_s_ = state.clock_s
    for key in keys:
        estimator.histograms_[key.parts] = _histogram(key, estimator.num_bins)
    _check_order(list(estimator.histograms_), "call")
    return estimator


def _turns(turns: list[_TurnState]) -> TurnOutcomes:
    outcomes = TurnOutcomes()
    for turn in turns:
        tally = TurnTally(turn.num_turns, turn.num_last, turn.num_followed, turn.growth_tokens)
        outcomes.tallies[turn.parts] = tally
    _check_order(list(outcomes.tallies), "turn")
    return outcomes


def _growth(state: _State) -> Growth:
    growth = Growth()
    growth.period_s = state.period_s
    for kind in state.growth:
        if any(tokens > MAX_TOKENS * turns for tokens, turns in zip(kind.tokens, kind.followed, strict=True)):
            raise EstimatorStateError(f"turns add more than {MAX_TOKENS:,} tokens each")
        counts = zip(kind.numbers, kind.followed, kind.last, kind.tokens, strict=True)
        growth.kinds[Kind(kind.tenant, kind.beginning)] = {
            number: TurnCounts(*each) for number, *each in counts
        }
    return growth


def _check_order(keys: list[tuple[str, ...]], what: str) -> None:
    if keys and keys[-1] != ():
        raise EstimatorStateError(f"it does not end with the key of every {what}")


def _histogram(key: _KeyState, num_bins: int) -> DurationHistogram:
    if not len(key.bins) == len(key.ended) == len(key.ended if key.censored is None else key.censored):
        raise EstimatorStateError(f"the weights of {'/'.join(key.parts) or '*'} do not match its bins")
    histogram = DurationHistogram(num_bins)
    histogram.seen_s = key.seen_s
    histogram.ended = _weights(key.bins, key.ended, num_bins)
    if key.censored is not None:
        histogram.censored = _weights(key.bins, key.censored, num_bins)
    histogram.of_jobs = _credibility(key)
    return histogram


def _credibility(key: _KeyState) -> Credibility | None:
    if not key.job_losses:
        return None
    if len(key.job_losses) != len(STRENGTHS):
        raise EstimatorStateError(f"the credit of jobs for {'/'.join(key.parts) or '*'} is incomplete")
    credibility = Credibility()
    credibility.num_judged = key.num_judged
    credibility.losses = key.job_losses
    return credibility


def _weights(bins: list[int], values: list[float], num_bins: int) -> list[float]:
    weights = [0.0] * num_bins
    for index, value in zip(bins, values, strict=True):
        weights[index] = value
    return weights


def _sync_directory(path: Path) -> None:
    """Makes the new name survive a power failure, where the system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
