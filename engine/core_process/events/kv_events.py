"""Publishes what the scheduler recorded of its prefix cache and its pins."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.clock import Clock
from engine.config.kv_events import KVEventsConfig
from engine.core.kv_cache.kv_event_recorder import KVEventRecorder
from engine.core.pin_recorder import PinRecorder
from engine.core.scheduler import Scheduler
from engine.core_process.core_part import CorePart
from engine.core_process.events.event_publisher import EventPublisher
from engine.records.kv_events import EventBatch, KVCacheEvent, PinEvent
from engine.records.reported_stats import SchedulerStats

PINS_TOPIC = "pins"


class KVEventFeed(CorePart):
    """Publishes the events of one scheduler, once that is attached."""

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """Open the sockets, before a model is loaded; ConfigError if an address cannot be used.

        ``rank``: number of the core among several, which is in each batch.
        """
        config = config.of_rank(rank)
        self._rank = rank
        self._publisher = EventPublisher(
            config.endpoint,
            config.topic,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
            replay_endpoint=config.replay_endpoint,
            buffer_steps=config.buffer_steps,
        )
        self._publishers = [self._publisher]
        self._pin_publisher: EventPublisher | None = None
        if config.pins_endpoint is not None:
            with closed_on_failure(self):
                self._pin_publisher = EventPublisher(
                    config.pins_endpoint, PINS_TOPIC, hwm=config.hwm, max_queue_size=config.max_queue_size
                )
            self._publishers.append(self._pin_publisher)
        self._recorder: KVEventRecorder | None = None
        self._pin_recorder: PinRecorder | None = None
        self._num_told = 0

    def attach(self, scheduler: Scheduler, clock: Clock) -> None:
        """Record what this scheduler does; it has not received anything yet."""
        kv = scheduler.kv
        self._recorder = KVEventRecorder(kv.block_size, kv.kv_cache_groups, scheduler.requests)
        self._recorder.attach(kv)
        scheduler.loads.record(self._recorder.host)
        if self._pin_publisher is not None:
            self._pin_recorder = PinRecorder(kv.block_size, time.time() - clock.now())
            scheduler.pins.recorder = self._pin_recorder

    def publish(self) -> None:
        """Publish what has happened since the last call; called under the core's lock."""
        if self._recorder is not None:
            self._send(self._publisher, self._recorder.take())
        if self._pin_recorder is not None and self._pin_publisher is not None:
            self._send(self._pin_publisher, self._pin_recorder.take())

    def _send(self, publisher: EventPublisher, events: Sequence[KVCacheEvent] | Sequence[PinEvent]) -> None:
        if events:
            publisher.publish(EventBatch(time.time(), events, self._rank))

    def fill_stats(self, stats: SchedulerStats) -> None:
        num_dropped = sum(each.num_dropped for each in self._publishers) - self._num_told
        self._num_told += num_dropped
        stats.kv_events_dropped = num_dropped

    def persist(self, now: float) -> None:
        self.close()

    def close(self) -> None:
        """Send what was published and close the sockets, within seconds."""
        for publisher in self._publishers:
            publisher.close()


@contextmanager
def closed_on_failure(feed: KVEventFeed | None) -> Iterator[None]:
    """Close the feed if the core fails to start, so that another core can have the addresses."""
    try:
        yield
    except BaseException:
        if feed is not None:
            feed.close()
        raise


def open_kv_events(config: KVEventsConfig, rank: int = 0) -> KVEventFeed | None:
    """The feed; None if nothing is to be published: then nothing is recorded either."""
    return KVEventFeed(config, rank) if config.is_on else None
