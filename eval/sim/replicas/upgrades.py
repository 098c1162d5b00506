"""A rolling upgrade: replicas are replaced one after another while jobs run.

Turns no longer go to the one that leaves. It ends once its requests have; what its pins held is handed over,
so that the jobs' next turns load it elsewhere, or is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from engine.core.kv_cache.block_hash import BlockHash
from engine.records.kv_transfer import SavedPrefix
from eval.sim.event_heap import EventHeap
from eval.sim.replicas.replica import PausedTurn, SimReplica
from eval.sim.sim_request import SimRequest

BEGINS_AT = 1.0
"""When the first replica is replaced, in units of the time that each takes."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A paused turn that was handed over."""

    paused: PausedTurn
    at_s: float


class Upgrades:
    """Replaces all replicas once."""

    def __init__(
        self,
        replicas: Sequence[SimReplica],
        events: EventHeap,
        down_s: float,
        block_size: int,
        on_lost: Callable[[int], None],
        *,
        hands_over: bool,
    ) -> None:
        """``down_s``: how long the place of each is empty. ``on_lost`` is called with the index of a replica
        that has ended."""
        self._replicas = replicas
        self._events = events
        self._down_s = down_s
        self._block_size = block_size
        self._on_lost = on_lost
        self._hands_over = hands_over
        self._leaving: int | None = None
        self._saved: dict[BlockHash, _Saved] = {}
        """What was handed over, by the last block that was saved."""
        events.at(BEGINS_AT * down_s, lambda: self._leave(0))

    def before(self, request: SimRequest) -> None:
        """Notes at a request what was handed over of its job's last turn."""
        hashes = request.block_hashes[: (request.num_prompt_tokens - 1) // self._block_size]
        saved = next((found for each in reversed(hashes) if (found := self._saved.get(each))), None)
        if saved is None:
            return
        request.kv_transfer = SavedPrefix(saved.paused.num_blocks * self._block_size)
        turn = saved.paused.turn
        if request.job is not None and turn is not None:
            passed_s = self._events.now - saved.at_s
            moved = structs.replace(
                turn,
                num_blocks=saved.paused.num_blocks,
                elapsed_s=turn.elapsed_s + passed_s,
                age_s=turn.age_s + passed_s,
            )
            request.job = structs.replace(request.job, moved=moved)

    def ended(self, index: int) -> None:
        """Called when turns of a replica have ended."""
        if index == self._leaving:
            self._go_on(index)

    def _leave(self, index: int) -> None:
        self._leaving = index
        self._replicas[index].is_up = False
        self._go_on(index)

    def _go_on(self, index: int) -> None:
        """Saves what is paused; ends the replica once it has no requests."""
        replica = self._replicas[index]
        if self._hands_over:
            now = self._events.now
            self._saved |= {paused.last_block: _Saved(paused, now) for paused in replica.paused_turns()}
        if replica.num_unfinished:
            return
        self._leaving = None
        replica.restart()
        self._on_lost(index)
        self._events.at(self._events.now + self._down_s, lambda: self._back(index))

    def _back(self, index: int) -> None:
        self._replicas[index].is_up = True
        if index + 1 < len(self._replicas):
            self._leave(index + 1)
