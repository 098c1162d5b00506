"""The viewers of a core, which are in other processes: returns what each is shown when it polls.

Without viewers it does nothing. A viewer that has polled gets trace events until it leaves or its lease ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice

import msgspec

from engine.clock import Clock
from engine.core.policy import Pin
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.watch.block_map import BlockPainter, Retention
from engine.watch.digest import Digest
from engine.watch.feed import Feed, Watched
from engine.watch.view import Gauges, HeldPin, OpenRequest, Phase, Scene, View
from tracing.tracer import Tracer

MAX_REQUESTS = 512
"""Maximum number of requests in a scene: running ones first, then others in no order."""
MAX_PINS = 256
MAX_JOBS = 40


@dataclass(slots=True)
class _Viewer:
    feed: Feed
    looked_s: float
    digest: Digest = field(default_factory=Digest)


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look reads from the engine under its lock."""

    now: float
    elapsed_s: float
    events: list[Watched]
    num_left_out: int
    gauges: Gauges


class LiveFeed:
    """Called on any thread; holds the lock of the core as briefly as possible."""

    def __init__(
        self, scheduler: Scheduler, tracer: Tracer, clock: Clock, lock: AbstractContextManager[object]
    ) -> None:
        """``lock``: the reentrant lock that steps take."""
        self._scheduler = scheduler
        self._tracer = tracer
        self._clock = clock
        self._lock = lock
        self._viewers: dict[str, _Viewer] = {}
        self._encode = msgspec.json.Encoder().encode

    def watch(self, viewer_id: str, with_scene: bool) -> bytes:
        """Returns a ``View`` as JSON: what has happened since this viewer's last call. At its first call, or
        the first after its lease has ended, it sees only later events. No two viewers may share an id."""
        with self._lock:
            viewer = self._viewer(viewer_id)
            look = self._look(viewer)
            requests = self._open_requests() if with_scene else None
        viewer.digest.take(look.events)
        if requests is not None:
            viewer.digest.reset(requests)
        scene = None if requests is None else self._scene(requests)
        return self._encode(_view(look, viewer.digest, scene))

    def leave(self, viewer_id: str) -> None:
        """Removes the viewer."""
        with self._lock:
            viewer = self._viewers.pop(viewer_id, None)
            if viewer is not None:
                self._tracer.remove(viewer.feed)

    def _viewer(self, viewer_id: str) -> _Viewer:
        now = self._clock.now()
        viewer = self._viewers.get(viewer_id)
        if viewer is None:
            feed = Feed(on_expiry=lambda _: self.leave(viewer_id))
            viewer = self._viewers[viewer_id] = _Viewer(feed, now)
            self._tracer.add(feed)
        viewer.feed.renew(now)
        return viewer

    def _look(self, viewer: _Viewer) -> _Look:
        now = self._clock.now()
        events, num_left_out = viewer.feed.take()
        elapsed_s = now - viewer.looked_s
        viewer.looked_s = now
        return _Look(now, elapsed_s, events, num_left_out, self._gauges())

    def _gauges(self) -> Gauges:
        counts = self._scheduler.statistics()
        pool = self._scheduler.kv.pool
        return Gauges(
            running=counts.num_running,
            waiting=counts.num_waiting,
            loading=counts.num_loading,
            total_blocks=counts.num_blocks,
            free_blocks=counts.num_free_blocks,
            cached_blocks=counts.num_cached_blocks,
            empty_blocks=pool.num_free_empty_blocks,
            pinned_blocks=counts.num_pinned_blocks,
            pins=counts.num_pins,
            host_blocks=counts.num_host_blocks,
            used_host_blocks=counts.num_used_host_blocks,
        )

    # ---- scenes ----

    @cached_property
    def _policy_name(self) -> str:
        return self._scheduler.policy.describe().name  # it also encodes all that was learned: call it once

    def _open_requests(self) -> list[OpenRequest]:
        scheduler = self._scheduler
        requests: Iterator[Request] = chain(
            scheduler.running, scheduler.loads.requests, scheduler.waiting, scheduler.compiling.values()
        )
        return [self._open_request(request) for request in islice(requests, MAX_REQUESTS)]

    def _open_request(self, request: Request) -> OpenRequest:
        return OpenRequest(
            req_id=request.request_id,
            job_id=self._scheduler.policy.job_of(request),
            phase=_phase(request),
            arrived_s=request.arrival_time,
            started_s=request.first_scheduled_time,
            first_token_s=request.first_token_time,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_output_tokens=request.num_output_tokens,
        )

    def _scene(self, requests: list[OpenRequest]) -> Scene:
        """Takes the lock twice, so that a step may run in between."""
        scheduler = self._scheduler
        with self._lock:
            holdings, pins = self._holdings(requests)
        with self._lock:
            jobs = list(scheduler.policy.jobs(MAX_JOBS, self._clock.now()))
        blocks = BlockPainter(scheduler.kv).paint(holdings)
        return Scene(
            policy=self._policy_name,
            requests=requests,
            pins=pins,
            jobs=jobs,
            blocks=blocks,
        )

    def _holdings(self, requests: list[OpenRequest]) -> tuple[list[Retention], list[HeldPin]]:
        """All blocks held by these requests and by pins, and the pins that expire first."""
        kv = self._scheduler.kv
        pins = list(self._scheduler.policy.pins())
        holdings = [Retention(pin.job_id, True, kv.blocks_of_pin(pin.pin_id)) for pin in pins]
        holdings += [
            Retention(each.job_id, False, kv.blocks_of_request(each.req_id))
            for each in requests
            if each.phase is not Phase.QUEUE
        ]
        soonest = heapq.nsmallest(MAX_PINS, pins, key=lambda pin: pin.deadline_s)
        return holdings, [_held_pin(pin) for pin in soonest]


def _view(look: _Look, digest: Digest, scene: Scene | None) -> View:
    digest.totals.elapsed_s = look.elapsed_s
    return View(
        now=look.now,
        gauges=look.gauges,
        totals=digest.totals,
        phases=digest.phases,
        events=digest.events,
        num_left_out=look.num_left_out + digest.num_left_out,
        scene=scene,
    )


def _phase(request: Request) -> Phase:
    if request.status is RequestStatus.PREEMPTED:
        return Phase.MEMORY
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        return Phase.LOADING
    if request.status is not RequestStatus.RUNNING:
        return Phase.QUEUE
    return Phase.PREFILL if request.num_output_tokens == 0 else Phase.DECODE


def _held_pin(pin: Pin) -> HeldPin:
    return HeldPin(
        pin_id=pin.pin_id,
        job_id=pin.job_id,
        req_id=pin.request_id,
        num_blocks=pin.num_blocks,
        deadline_s=pin.deadline_s,
    )
