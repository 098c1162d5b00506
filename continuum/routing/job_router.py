"""Sends a turn to the core that has its job's KV, unless recomputing it on another core is sooner.

The unit of all costs is a token of prefill. A core's cost of a turn is what it must compute of the prompt,
what is queued before it, and what must be evicted or end before the turn fits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar
from zlib import crc32

from continuum.routing.home_table import CHUNK_TOKENS, HomeTable, beginnings, key_of
from engine.routing import EngineLoad, RoutedTurn, RouterContext

MOVE_MARGIN = 1.5
"""A job moves if its home costs this many times as much as the best other core, and ``MOVE_TOKENS`` more."""
MOVE_TOKENS = 2048
"""Moves are not free: the KV at the old home stays there, unused, until it is evicted."""
RETURN_SHARE = 0.95
"""A job is expected to return for the time in which this share of all gaps end. Few clients announce the end
of a job, and the KV of an ended job is evicted before that of jobs that return."""
FIRST_RETURN_S = 60.0
SHORTEST_RETURN_S = 10.0
LONGEST_RETURN_S = 600.0
RETURN_STEP = 0.02
"""How much one return changes that time, as a share of it."""
MAX_JOBS = 65_536
"""Maximum number of jobs whose sizes a router remembers."""
MAX_CANDIDATES = 64
"""Maximum number of cores that are considered for a job that may move."""
NEW_TOKENS_SMOOTHING = 0.05
OPEN_TOKENS = 16_384
"""Weight in tokens of a running or waiting request when a new job is placed: it slows the steps of all
others. 15,000 to 50,000 work equally well (docs/design/admission-and-order.md); 5,000 is too small."""
LIKE_SHARE = 0.005
"""Cores whose loads differ by less than this share of a pool are equally good homes for a new job."""
_END = 0x9E3779B97F4A7C15
"""XORed with a prompt's last key: the key of an unnamed job that had a turn with this prompt."""


@dataclass(slots=True)
class _Job:
    """The last known state of a job."""

    engine: int
    num_tokens: int
    seen_s: float
    num_chunks: int
    last_key: int | None
    """Key of the first ``num_chunks`` chunks of its prompt."""


@dataclass(frozen=True, slots=True)
class _Home:
    """The engine that has a turn's KV, and the number of prompt tokens there."""

    engine: int
    num_tokens: int
    job_key: int | None
    """Key of the turn's own job, if known to this router; None if only another's prompt has this prefix."""


class JobRouter:
    """A ``Router``. Routers of several processes share a table, so a job has one home for all of them."""

    name: ClassVar[str] = "jobs"

    def __init__(self, context: RouterContext) -> None:
        self._block_size = context.block_size
        self._homes = HomeTable(context.shared_words)
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        """Jobs by key, the least recent turn first."""
        self._active: OrderedDict[int, _Job] = OrderedDict()
        """Jobs that are expected to return, in the same order."""
        self._return_s = FIRST_RETURN_S
        self._expected = [0] * context.num_engines
        """Per engine, the tokens of this router's jobs that are at home there and expected to return."""
        self._mean_new_tokens = float(CHUNK_TOKENS)
        """Mean number of prompt tokens that a turn must compute."""

    def place(self, turn: RoutedTurn, loads: Sequence[EngineLoad | None], now: float) -> int:
        self._expect_no_longer(now)
        root = key_of(turn.owner, turn.cache_salt)
        job_key = None if turn.job_id is None else key_of(turn.job_id)
        keys = self._keys(turn, root, job_key)
        home = self._home(turn, keys, job_key)
        beside = None if home is not None and home.job_key is not None else self._home_beside(turn, loads)
        if beside is not None:
            engine = beside
        elif home is None or loads[home.engine] is None or self._is_crowded(home, loads):
            engine = self._new_home(keys[0] if keys else job_key, turn, loads)
        else:
            engine = self._stay_or_move(home, turn, loads)
        if home is not None and home.job_key is not None:
            self._learn_return(home.job_key, now)
        self._learn(turn, keys, job_key, engine, now)
        num_cached = home.num_tokens if home is not None and engine == home.engine else 0
        new_tokens = len(turn.prompt_token_ids) - num_cached
        self._mean_new_tokens += NEW_TOKENS_SMOOTHING * (new_tokens - self._mean_new_tokens)
        return engine

    def home(self, turn: RoutedTurn) -> int | None:
        job_key = None if turn.job_id is None else key_of(turn.job_id)
        root = key_of(turn.owner, turn.cache_salt)
        home = self._home(turn, self._keys(turn, root, job_key), job_key)
        return None if home is None or home.job_key is None else home.engine

    def lost(self, engine: int) -> None:
        self._homes.forget(engine)
        for key in [key for key, job in self._jobs.items() if job.engine == engine]:
            self._drop(key)

    def job_ended(self, job_id: str) -> None:
        key = key_of(job_id)
        if key in self._jobs:
            self._drop(key)

    # ---- finding the home ----

    def _keys(self, turn: RoutedTurn, root: int, job_key: int | None) -> list[int]:
        """Keys of the prompt's prefixes; for a known job only the new ones, assuming that the prompt
        continues the job's last one. If it does not, only these keys are useless."""
        job = None if job_key is None else self._jobs.get(job_key)
        if job is None or job.last_key is None or len(turn.prompt_token_ids) < job.num_tokens:
            return list(beginnings(turn.prompt_token_ids, root))
        new = beginnings(turn.prompt_token_ids, root, known=job.num_chunks, known_key=job.last_key)
        return [job.last_key, *new]

    def _home(self, turn: RoutedTurn, keys: list[int], job_key: int | None) -> _Home | None:
        prefix = self._longest_prefix(keys, len(turn.prompt_token_ids) // CHUNK_TOKENS)
        job = None if job_key is None else self._jobs.get(job_key)
        engine = None if job_key is None else self._homes[job_key]
        if engine is None and job is not None:
            engine = job.engine  # other keys have overwritten it in the table
        if engine is None:
            return prefix
        if prefix is not None and prefix.engine == engine:
            return _Home(engine, prefix.num_tokens, job_key)
        known = 0 if job is None else job.num_tokens
        return _Home(engine, min(known, len(turn.prompt_token_ids)), job_key)

    def _longest_prefix(self, keys: list[int], num_chunks: int) -> _Home | None:
        """``num_chunks``: the prompt's number of chunks; the last of the keys is that of all of them."""
        for back, key in enumerate(reversed(keys)):
            num_tokens = (num_chunks - back) * CHUNK_TOKENS
            if (job := self._jobs.get(key)) is not None:
                return _Home(job.engine, num_tokens, key)
            if (engine := self._homes[key ^ _END]) is not None:
                return _Home(engine, num_tokens, key)
            if (engine := self._homes[key]) is not None:
                return _Home(engine, num_tokens, None)
        return None

    # ---- choosing the core ----

    def _is_crowded(self, home: _Home, loads: Sequence[EngineLoad | None]) -> bool:
        """Whether a new job should leave another job's prefix: agents of one kind share one, and one core
        cannot hold them all. Shared tokens count twice, as they are neither computed nor stored again."""
        if home.job_key is not None:
            return False
        weights = self._weights(loads)
        return weights[home.engine] - min(weights.values()) > 2 * home.num_tokens

    def _stay_or_move(self, home: _Home, turn: RoutedTurn, loads: Sequence[EngineLoad | None]) -> int:
        own = loads[home.engine]
        assert own is not None, "a home that takes no requests is none"
        at_home = self._cost(turn, own, home.num_tokens)
        if not _is_worth_a_move(at_home, len(turn.prompt_token_ids)):
            return home.engine  # not even an idle core would be
        costs = {
            engine: self._cost(turn, load, 0)
            for engine in _some(len(loads), turn.request_id)
            if engine != home.engine and (load := loads[engine]) is not None
        }
        best = min(costs, key=costs.__getitem__, default=home.engine)
        return best if costs and _is_worth_a_move(at_home, costs[best]) else home.engine

    def _cost(self, turn: RoutedTurn, load: EngineLoad, num_cached: int) -> float:
        """Tokens of prefill until the turn's first token."""
        new_tokens = len(turn.prompt_token_ids) - num_cached
        short_blocks = max(0, new_tokens // self._block_size - load.num_free_blocks) if load.num_blocks else 0
        return new_tokens + self._queued_tokens(load) + short_blocks * self._block_size

    def _queued_tokens(self, load: EngineLoad) -> float:
        """Tokens queued on the core. Requests that were sent since its last report count as waiting."""
        num_waiting = max(load.num_waiting, load.num_open - load.num_running)
        return num_waiting * self._mean_new_tokens

    def _new_home(self, key: int | None, turn: RoutedTurn, loads: Sequence[EngineLoad | None]) -> int:
        """Chooses the least loaded core, for a turn that has KV nowhere. Among equally loaded cores the key
        decides (rendezvous hashing), so that several processes choose the same."""
        weights = self._weights(loads)
        pool = max((load.num_blocks for load in loads if load is not None), default=0)
        limit = min(weights.values()) + LIKE_SHARE * pool * self._block_size
        alike = [engine for engine, weight in weights.items() if weight <= limit]
        name = str(key) if key is not None else turn.request_id
        return max(alike, key=lambda engine: key_of(name, str(engine)))

    def _home_beside(self, turn: RoutedTurn, loads: Sequence[EngineLoad | None]) -> int | None:
        """The core of the job that waits for this new one, which alone knows that; None if there is none, or
        if it is more loaded than others without the waiting job and one request more."""
        if turn.parent_id is None:
            return None
        key = key_of(turn.parent_id)
        engine = self._homes[key]
        weights = self._weights(loads)
        if engine is None or engine not in weights:
            return None
        parent = self._jobs.get(key)
        own = OPEN_TOKENS + (0 if parent is None else parent.num_tokens)
        return engine if weights[engine] - own <= min(weights.values()) else None

    def _weights(self, loads: Sequence[EngineLoad | None]) -> dict[int, float]:
        return {engine: self._weight(engine, load) for engine, load in enumerate(loads) if load is not None}

    def _weight(self, engine: int, load: EngineLoad) -> float:
        """Tokens that the core holds, or will when its jobs return, plus the weight of its open requests. Its
        report on memory is as old as its last step."""
        held = (load.num_blocks - load.num_free_blocks) * self._block_size
        return max(held, self._expected[engine]) + load.num_open * OPEN_TOKENS

    # ---- remembering jobs ----

    def _learn(self, turn: RoutedTurn, keys: list[int], job_key: int | None, engine: int, now: float) -> None:
        for key in keys:
            self._homes[key] = engine
        if job_key is None:
            # An unnamed job is identified by its latest prompt: its size only counts while it is active.
            job_key = keys[-1] if keys else key_of(turn.request_id)
            self._homes[job_key ^ _END] = engine
        else:
            self._homes[job_key] = engine
        if job_key in self._jobs:
            self._drop(job_key)
        num_tokens = len(turn.prompt_token_ids)
        num_chunks = num_tokens // CHUNK_TOKENS
        job = _Job(engine, num_tokens, now, num_chunks, keys[-1] if keys else None)
        self._jobs[job_key] = self._active[job_key] = job
        self._expected[engine] += num_tokens
        if len(self._jobs) > MAX_JOBS:
            self._drop(next(iter(self._jobs)))

    def _learn_return(self, key: int, now: float) -> None:
        """Moves the logarithm of the expected return time towards its quantile when a job returns, by
        stochastic approximation (Robbins and Monro, 1951)."""
        if (job := self._jobs.get(key)) is None:
            return
        is_late = now - job.seen_s > self._return_s
        moved_s = self._return_s * (1 + RETURN_STEP * (is_late - (1 - RETURN_SHARE)))
        self._return_s = min(max(moved_s, SHORTEST_RETURN_S), LONGEST_RETURN_S)
        self._drop(key)

    def _expect_no_longer(self, now: float) -> None:
        """Stops counting jobs that have been away for too long. Their homes stay known."""
        while self._active:
            key, job = next(iter(self._active.items()))
            if now - job.seen_s < self._return_s:
                return
            self._forget_active(key)

    def _forget_active(self, key: int) -> None:
        if (job := self._active.pop(key, None)) is not None:
            self._expected[job.engine] -= job.num_tokens

    def _drop(self, key: int) -> None:
        del self._jobs[key]
        self._forget_active(key)


def _some(num_engines: int, request_id: str) -> Iterable[int]:
    """Candidate cores: all, or a subset that depends on the request. The best of some is nearly as good as
    the best (Mitzenmacher, 2001: the power of two choices)."""
    if num_engines <= MAX_CANDIDATES:
        return range(num_engines)
    first = crc32(request_id.encode("utf-8", "surrogatepass"))
    return ((first + step) % num_engines for step in range(MAX_CANDIDATES))


def _is_worth_a_move(at_home: float, elsewhere: float) -> bool:
    return at_home > MOVE_MARGIN * elsewhere and at_home - elsewhere > MOVE_TOKENS
