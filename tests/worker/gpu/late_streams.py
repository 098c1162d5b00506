"""A device that executes its queues as late as a test chooses, in any order that their events allow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from engine.core.outputs import DiskReads
from engine.worker.kv_tiers.copy_streams import Copy, Event
from engine.worker.kv_tiers.disk_pool import TransferReports

PICKS = ("steps", "loads", "stores", "disk", "host")
"""The next actor: this queue does its next piece of work, or the host goes on."""

Wait = tuple[str, str]
"""The waiting side, and the queue of the event."""


class LateEvent:
    """Done when its queue reaches it. If the host's wait is forgotten, the host sees it as done earlier."""

    def __init__(self, queue: str, forgotten: Collection[Wait]) -> None:
        self.queue = queue
        self._host_waits = ("host", queue) not in forgotten
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def happen(self) -> bool:
        self._done.set()
        return True

    def query(self) -> bool:
        return self.is_done or not self._host_waits

    def synchronize(self) -> None:
        assert threading.current_thread() is not threading.main_thread(), "a step must not wait"
        self._done.wait()


class LateStream:
    """A CopyStream that does one piece of work at a time, on request."""

    def __init__(self, name: str, forgotten: Collection[Wait], finish: Callable[[], None]) -> None:
        """``finish``: does the work of all streams."""
        self.name = name
        self.synchronize = finish
        self._forgotten = forgotten
        self._queue: deque[Callable[[], bool]] = deque()
        """Each returns whether it is done; an unfinished one blocks the later ones."""

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        if (self.name, event.queue) not in self._forgotten:
            self._queue.append(lambda: event.is_done)

    def record_event(self) -> Event:
        event = LateEvent(self.name, self._forgotten)
        self._queue.append(event.happen)
        return event

    def copy(self, copies: Iterable[Copy]) -> None:
        for to, source in copies:
            for one_to, one_source in zip(to, source, strict=True):
                self.do(partial(one_to.copy_, one_source))

    def do(self, work: Callable[[], object]) -> None:
        """Queues any other work like a copy."""
        self._queue.append(lambda: (work(), True)[1])

    def run_one(self) -> bool:
        """Does the next piece of work; returns False if there is none, or it must wait."""
        if not self._queue or not self._queue[0]():
            return False
        self._queue.popleft()
        return True


@dataclass(slots=True)
class _Job:
    """A block to be read from, or written to, a slot of the disk."""

    after: list[LateEvent]
    work: Callable[[], bool]
    """Returns whether it succeeded."""
    end: Callable[[bool], None]


@dataclass(slots=True)
class LateDisk:
    """A KvDisk in memory. It executes jobs in order of arrival, except those that must wait."""

    blocks: torch.Tensor
    forgotten: Collection[Wait]
    luck: Iterator[bool]
    contents: dict[int, bytes] = field(default_factory=dict)
    _jobs: list[_Job] = field(default_factory=list)
    _reports: TransferReports = field(default_factory=TransferReports)

    def read(self, load_id: int, reads: DiskReads, after: Iterable[Event] = ()) -> None:
        results: list[bool] = []

        def end(worked: bool) -> None:
            results.append(worked)
            if len(results) == len(reads):
                reports = self._reports
                (reports.finished_loads if all(results) else reports.failed_loads).append(load_id)

        for block_id, slot in zip(reads.block_ids, reads.disk_slots, strict=True):
            fetch = partial(self._fetch, block_id, slot)
            self._add("disk reads", after, fetch, end)

    def write(self, slot: int, content: memoryview, after: Iterable[Event] = ()) -> None:
        def end(worked: bool) -> None:
            (self._reports.finished_writes if worked else self._reports.failed_writes).append(slot)

        self._add("disk writes", after, partial(self._keep, slot, content), end)

    def take_reports(self) -> TransferReports:
        reports, self._reports = self._reports, TransferReports()
        return reports

    def close(self) -> None:
        self._jobs.clear()

    def run_one(self) -> bool:
        for job in self._jobs:
            if all(event.is_done for event in job.after):
                self._jobs.remove(job)
                job.end(next(self.luck) and job.work())
                return True
        return False

    def _add(
        self, who: str, after: Iterable[Event], work: Callable[[], bool], end: Callable[[bool], None]
    ) -> None:
        events = [event for event in after if isinstance(event, LateEvent)]
        waited_for = [event for event in events if (who, event.queue) not in self.forgotten]
        self._jobs.append(_Job(waited_for, work, end))

    def _fetch(self, block_id: int, slot: int) -> bool:
        block = self.blocks[block_id]
        block.copy_(torch.frombuffer(bytearray(self.contents[slot]), dtype=block.dtype).view_as(block))
        return True

    def _keep(self, slot: int, content: memoryview) -> bool:
        self.contents[slot] = bytes(content)
        return True


class LateStreams:
    """CopyStreams and the queue of the steps, all of them late."""

    def __init__(self, picks: Iterator[str], forgotten: Collection[Wait] = ()) -> None:
        """``forgotten``: waits that are skipped."""
        self.forgotten = forgotten
        self.steps = LateStream("steps", forgotten, self.run_all)
        self.loads = LateStream("loads", forgotten, self.run_all)
        self.stores = LateStream("stores", forgotten, self.run_all)
        self._queues: dict[str, LateStream | LateDisk] = {
            stream.name: stream for stream in (self.steps, self.loads, self.stores)
        }
        self._picks = picks

    def disk_of(self, blocks: torch.Tensor, luck: Iterator[bool]) -> LateDisk:
        """A late disk. ``luck``: whether the next transfer succeeds."""
        self._queues["disk"] = disk = LateDisk(blocks, self.forgotten, luck)
        return disk

    def run_some(self) -> None:
        """Does the picked work until the host is picked."""
        for pick in self._picks:
            if pick == "host":
                return
            if pick in self._queues:
                self._queues[pick].run_one()

    def run_each(self) -> bool:
        """Does a piece of work of each queue; returns False if all queues are empty or waiting."""
        return sum(queue.run_one() for queue in self._queues.values()) > 0

    def run_all(self) -> None:
        while self.run_each():
            pass

    def pin(self, memory: torch.Tensor) -> bool:
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        return


class StepsAtOnce(LateStreams):
    """Copies are late, but steps run when they are called, as on a CPU: a step's waits finish before it."""

    def __init__(self, picks: Iterator[str]) -> None:
        super().__init__(picks)
        self.steps = _StepsAtOnce("steps", (), self.run_all)


class _StepsAtOnce(LateStream):
    def wait_event(self, event: Event) -> None:
        self.synchronize()

    def record_event(self) -> Event:
        event = LateEvent(self.name, ())
        event.happen()
        return event
