"""The sockets of KV events: numbering, replay of past batches, drops, and valid addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.config.kv_events import KVEventsConfig, read_kv_events_config
from engine.core_process.events.event_publisher import EventPublisher
from engine.errors import ConfigError
from engine.records.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from tests.processes.event_subscriber import Past, ask_for_past, free_ports, subscriber

MOST_BATCHES = 1_000_000


@contextmanager
def publisher(endpoint: str, **options: object) -> Iterator[EventPublisher]:
    given: dict[str, object] = {"hwm": 1000, "max_queue_size": 1000, "buffer_steps": 1000, **options}
    topic = str(given.pop("topic", ""))
    publishes = EventPublisher(endpoint, topic, **given)  # type: ignore[arg-type]
    try:
        yield publishes
    finally:
        publishes.close()


def batch(number: int) -> EventBatch:
    return EventBatch(float(number), [BlockRemoved([number], "GPU", 0)], 0)


def test_the_bytes_are_those_of_v1() -> None:
    """Events are maps with a type; fields at their default are omitted, but for seven that V1 sends."""
    stored = BlockStored([2, 3], 1, [5, 6], 1, None, "GPU", None, [None, ["salt"]], 0, session_id="job")
    events = [stored, BlockRemoved([2], "GPU", 0), AllBlocksCleared()]
    payload = msgspec.msgpack.encode(EventBatch(1.5, events, 0))
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [2, 3],
                "parent_block_hash": 1,
                "token_ids": [5, 6],
                "block_size": 1,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None, ["salt"]],
                "group_idx": 0,
                "session_id": "job",
            },
            {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_batches_are_numbered_and_the_last_can_be_asked_for(tmp_path: Path) -> None:
    """A subscriber gets batches as they come and may request past ones; the oldest are dropped."""
    past, port = f"ipc://{tmp_path}/past", free_ports(1)[0]
    address = f"tcp://127.0.0.1:{port}"
    with publisher(f"tcp://*:{port}", topic="kv@a", replay_endpoint=past, buffer_steps=3) as publishes:
        with subscriber(address, "kv", replay=past) as reads:
            for number in range(3):
                publishes.publish(batch(number))
            reads.read_until(lambda events: len(events) == 3)
            for number in range(3, 5):
                publishes.publish(batch(number))
            reads.read_until(lambda events: len(events) == 5)
            assert {number: each[0] for number, each in reads.batches.items()} == {n: n for n in range(5)}
        with zmq.Context() as context:
            left = ask_for_past(context, past, 0)
            assert [(topic, number) for topic, number, _ in left[:-1]] == [(b"kv@a", n) for n in (2, 3, 4)]
            assert left[-1] == (b"", -1, None)
            assert [number for _, number, _ in ask_for_past(context, past, 4)] == [4, -1]


def test_an_address_of_a_host_is_connected_to() -> None:
    """A publisher connects to an address with a host, as in V1, for a subscriber that binds it."""
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with subscriber(address, binds=True) as reads, publisher(address) as publishes:
        number = 0
        while not reads.has_news:
            publishes.publish(batch(number := number + 1))
        assert reads.read_until(bool)[0]["type"] == "BlockRemoved"


def test_nonsense_for_a_request_is_not_answered_and_hurts_nobody(tmp_path: Path) -> None:
    past = f"ipc://{tmp_path}/past"
    endpoint = f"ipc://{tmp_path}/events"
    with (
        publisher(endpoint, replay_endpoint=past),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as asks,
    ):
        asks.linger = 0
        asks.connect(past)
        asks.send_multipart([b"", b"short"])
        asks.send_multipart([b"one frame"])
        asks.send_multipart([b"", bytes(8)])
        assert asks.poll(30_000)
        assert asks.recv_multipart() == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


def test_a_full_queue_never_blocks_and_leaves_a_gap(tmp_path: Path) -> None:
    """Publishing faster than batches are sent never blocks; a lost batch is counted and keeps its number."""
    past, num_published = f"ipc://{tmp_path}/past", 0
    options = {"max_queue_size": 1, "buffer_steps": MOST_BATCHES}
    with publisher(f"ipc://{tmp_path}/events", replay_endpoint=past, **options) as publishes:
        while not publishes.num_dropped and num_published < MOST_BATCHES:
            publishes.publish(batch(num_published))
            num_published += 1
        num_sent = num_published - publishes.num_dropped
        assert publishes.num_dropped == 1
        with zmq.Context() as context:
            sent: list[Past] = []
            while len(sent) < num_sent:
                *sent, _ = ask_for_past(context, past, 0)
            publishes.publish(batch(num_published))  # the queue has space again
            while len(sent) == num_sent:
                *sent, _ = ask_for_past(context, past, 0)
    assert [number for _, number, _ in sent] == [*range(num_sent), num_published]


def test_an_address_in_use_is_named() -> None:
    port = free_ports(1)[0]
    in_use = f"cannot open 'tcp://\\*:{port}': Address already in use"
    with publisher(f"tcp://*:{port}"), pytest.raises(ConfigError, match=in_use):
        EventPublisher(f"tcp://*:{port}", "", hwm=1, max_queue_size=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "kv_events_config must be a JSON object such as"),
        ({"endpont": "tcp://*:1"}, "unknown field 'endpont'"),
        ({"publisher": "nats"}, "publisher must be one of null, zmq"),
        ({"endpoint": "http://x"}, "endpoint must begin with tcp://, ipc:// or inproc://"),
        ({"buffer_steps": 0}, "buffer_steps must be at least 1"),
        ({"hwm": "many"}, "hwm: expected int, got str"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(given: str | dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_kv_events_config(given)
    assert message in str(error.value)


def test_the_defaults_are_those_of_v1() -> None:
    assert not KVEventsConfig().is_on
    config = read_kv_events_config('{"enable_kv_cache_events": true}')
    assert config.is_on
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert not read_kv_events_config('{"enable_kv_cache_events": true, "publisher": "null"}').is_on
