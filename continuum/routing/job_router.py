"""Jobs at home: a turn goes to the core that has its job's KV, unless computing again elsewhere is sooner.

The unit of all costs is a token of prefill. A core's cost of a turn is what it has to compute of the prompt,
what is queued before it, and what has to be evicted, or to end, before the turn fits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from continuum.routing.home_table import CHUNK_TOKENS, HomeTable, beginnings, key_of
from engine.routing import EngineLoad, RoutedTurn, RouterContext

MOVE_MARGIN = 1.5
"""A job moves if its home costs so many times as much as the best other core, and ``MOVE_TOKENS`` more."""
MOVE_TOKENS = 2048
"""Moves are not free: what is at home stays there, unused, until it is evicted."""
ACTIVE_S = 600.0
"""A job that has had no turn for so long is not expected back soon."""
MAX_JOBS = 16_384
"""Jobs of which a router knows how large they are."""
NEW_TOKENS_SMOOTHING = 0.05
LIKE_SHARE = 0.02
"""Cores whose loads differ by less than this share of a pool are equally good homes for a new job."""


@dataclass(slots=True)
class _Job:
    """A job as this router saw it last."""

    engine: int
    num_tokens: int
    seen_s: float
    num_chunks: int
    last_key: int | None
    """Key of its prompt's beginning of ``num_chunks`` chunks."""


def _is_worth_a_move(at_home: float, elsewhere: float) -> bool:
    return at_home > MOVE_MARGIN * elsewhere and at_home - elsewhere > MOVE_TOKENS


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a turn has KV, and how many tokens of its prompt."""

    engine: int
    num_tokens: int


class JobRouter:
    """A ``Router``. Those of several processes share one table, so a job has one home for all of them."""

    name: ClassVar[str] = "jobs"

    def __init__(self, context: RouterContext) -> None:
        self._block_size = context.block_size
        self._homes = HomeTable(context.shared_words)
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._expected = [0] * context.num_engines
        """Tokens of jobs that are at home there and active, those of this router."""
        self._mean_new_tokens = float(CHUNK_TOKENS)
        """What turns have to compute of their prompts, on average."""

    def place(self, turn: RoutedTurn, loads: Sequence[EngineLoad | None], now: float) -> int:
        self._drop_idle(now)
        root = key_of(turn.owner, turn.cache_salt)
        job_key = None if turn.job_id is None else key_of(turn.job_id)
        keys = self._keys(turn, root, job_key)
        home = self._home(turn, keys, job_key)
        if home is None or loads[home.engine] is None:
            engine = self._new_home(keys[0] if keys else job_key, turn, loads)
            num_cached = 0
        else:
            engine = self._stay_or_move(home, turn, loads)
            num_cached = home.num_tokens if engine == home.engine else 0
        self._learn(turn, keys, job_key, engine, now)
        new_tokens = len(turn.prompt_token_ids) - num_cached
        self._mean_new_tokens += NEW_TOKENS_SMOOTHING * (new_tokens - self._mean_new_tokens)
        return engine

    def lost(self, engine: int) -> None:
        self._homes.forget(engine)
        for key in [key for key, job in self._jobs.items() if job.engine == engine]:
            self._drop(key)

    def job_ended(self, job_id: str) -> None:
        key = key_of(job_id)
        if key in self._jobs:
            self._drop(key)

    # ---- where it is ----

    def _keys(self, turn: RoutedTurn, root: int, job_key: int | None) -> list[int]:
        """Keys of the prompt's beginnings, of a known job only those that are new: a client that names its
        job is believed that the prompt goes on. If it does not, only these keys are of no use."""
        job = None if job_key is None else self._jobs.get(job_key)
        if job is None or job.last_key is None or len(turn.prompt_token_ids) < job.num_tokens:
            return list(beginnings(turn.prompt_token_ids, root))
        new = beginnings(turn.prompt_token_ids, root, known=job.num_chunks, known_key=job.last_key)
        return [job.last_key, *new]

    def _home(self, turn: RoutedTurn, keys: list[int], job_key: int | None) -> _Home | None:
        prefix = self._longest_prefix(turn, keys)
        if job_key is None or (engine := self._homes[job_key]) is None:
            return prefix
        if prefix is not None and prefix.engine == engine:
            return prefix
        job = self._jobs.get(job_key)
        known = 0 if job is None else job.num_tokens
        return _Home(engine, min(known, len(turn.prompt_token_ids)))

    def _longest_prefix(self, turn: RoutedTurn, keys: list[int]) -> _Home | None:
        num_all = len(turn.prompt_token_ids) // CHUNK_TOKENS
        for back, key in enumerate(reversed(keys)):
            if (engine := self._homes[key]) is not None:
                return _Home(engine, (num_all - back) * CHUNK_TOKENS)
        return None

    # ---- where it goes ----

    def _stay_or_move(self, home: _Home, turn: RoutedTurn, loads: Sequence[EngineLoad | None]) -> int:
        own = loads[home.engine]
        assert own is not None, "a home that takes no requests is none"
        at_home = self._cost(turn, own, home.num_tokens)
        if not _is_worth_a_move(at_home, len(turn.prompt_token_ids)):
            return home.engine  # not even an idle core would be
        costs = {
            engine: self._cost(turn, load, 0)
            for engine, load in enumerate(loads)
            if load is not None and engine != home.engine
        }
        best = min(costs, key=costs.__getitem__, default=home.engine)
        return best if costs and _is_worth_a_move(at_home, costs[best]) else home.engine

    def _cost(self, turn: RoutedTurn, load: EngineLoad, num_cached: int) -> float:
        """Tokens of prefill until the turn's first token."""
        new_tokens = len(turn.prompt_token_ids) - num_cached
        short_blocks = max(0, new_tokens // self._block_size - load.num_free_blocks) if load.num_blocks else 0
        return new_tokens + self._queued_tokens(load) + short_blocks * self._block_size

    def _queued_tokens(self, load: EngineLoad) -> float:
        """What waits there. Requests that were sent since its last report wait, too."""
        num_waiting = max(load.num_waiting, load.num_open - load.num_running)
        return num_waiting * self._mean_new_tokens

    def _new_home(self, key: int | None, turn: RoutedTurn, loads: Sequence[EngineLoad | None]) -> int:
        """For who has nothing anywhere: the core that has least to hold and to do. Of those that are alike,
        the key chooses (rendezvous hashing), so that several processes choose the same."""
        weights = {
            engine: self._weight(engine, load) for engine, load in enumerate(loads) if load is not None
        }
        pool = max((load.num_blocks for load in loads if load is not None), default=0)
        limit = min(weights.values()) + LIKE_SHARE * pool * self._block_size
        alike = [engine for engine, weight in weights.items() if weight <= limit]
        name = str(key) if key is not None else turn.request_id
        return max(alike, key=lambda engine: key_of(name, str(engine)))

    def _weight(self, engine: int, load: EngineLoad) -> float:
        """Tokens that the core holds, or will when its jobs come back, and those that wait."""
        held = (load.num_blocks - load.num_free_blocks) * self._block_size
        return max(held, self._expected[engine]) + self._queued_tokens(load)

    # ---- what is remembered ----

    def _learn(self, turn: RoutedTurn, keys: list[int], job_key: int | None, engine: int, now: float) -> None:
        for key in keys:
            self._homes[key] = engine
        if job_key is None:
            # An unnamed job is known by its first turn's prompt: its size only counts while it is active.
            job_key = keys[-1] if keys else key_of(turn.request_id)
        else:
            self._homes[job_key] = engine
        if job_key in self._jobs:
            self._drop(job_key)
        num_tokens = len(turn.prompt_token_ids)
        num_chunks = num_tokens // CHUNK_TOKENS
        self._jobs[job_key] = _Job(engine, num_tokens, now, num_chunks, keys[-1] if keys else None)
        self._expected[engine] += num_tokens
        if len(self._jobs) > MAX_JOBS:
            self._drop(next(iter(self._jobs)))

    def _drop_idle(self, now: float) -> None:
        """Forget the size of jobs that are not expected back. Their homes stay known."""
        while self._jobs:
            key = next(iter(self._jobs))
            if now - self._jobs[key].seen_s < ACTIVE_S:
                return
            self._drop(key)

    def _drop(self, key: int) -> None:
        job = self._jobs.pop(key)
        self._expected[job.engine] -= job.num_tokens
