"""The record of ``kv_events_config``, vLLM V1's JSON, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.config.json_options import check_names, make_record, read_fields
from engine.errors import ConfigError

OPTION = "kv_events_config"
EXAMPLE = '{"enable_kv_cache_events": true}'
PUBLISHERS = ("null", "zmq")
TRANSPORTS = ("tcp://", "ipc://", "inproc://")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Publishes what enters and leaves the prefix cache, and changes of pins, over ZMQ."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """``zmq`` | ``null``; None: zmq if events are enabled."""
    endpoint: str = "tcp://*:5557"
    """Address of the PUB socket, which binds a wildcard, ``ipc`` and ``inproc``, and else connects."""
    replay_endpoint: str | None = None
    """Address of a ROUTER socket at which subscribers request past batches; None: there is none."""
    buffer_steps: int = 10_000
    """Most past batches that can be requested."""
    hwm: int = 100_000
    """Most messages that wait for one subscriber; further ones are lost to it."""
    max_queue_size: int = 100_000
    """Most batches that wait to be sent; further ones are dropped and counted."""
    topic: str = ""
    """First frame of every message."""
    pins_endpoint: str | None = None
    """Address of a PUB socket for events of pins, topic ``pins``; None: they are not published."""

    def __post_init__(self) -> None:
        if self.publisher not in (None, *PUBLISHERS):
            raise ConfigError(f"publisher must be one of {', '.join(PUBLISHERS)}, got {self.publisher!r}.")
        for name in ("endpoint", "replay_endpoint", "pins_endpoint"):
            address = getattr(self, name)
            if address is not None and not address.startswith(TRANSPORTS):
                raise ConfigError(f"{name} must begin with tcp://, ipc:// or inproc://, got {address!r}.")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def of_rank(self, rank: int) -> KVEventsConfig:
        """The record with the addresses of this core of several: a TCP port higher by ``rank``, as in V1,
        other names with ``_dp1`` and so on."""
        return replace(
            self,
            endpoint=_of_rank(self.endpoint, rank),
            replay_endpoint=None if self.replay_endpoint is None else _of_rank(self.replay_endpoint, rank),
            pins_endpoint=None if self.pins_endpoint is None else _of_rank(self.pins_endpoint, rank),
        )

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def _of_rank(address: str, rank: int) -> str:
    if rank == 0:
        return address
    base, colon, port = address.rpartition(":")
    if address.startswith("tcp://") and port.isdecimal():
        return f"{base}{colon}{int(port) + rank}"
    return f"{address}_dp{rank}"


def read_kv_events_config(given: str | Mapping[str, Any] | KVEventsConfig | None) -> KVEventsConfig:
    """The record of what was given, JSON or fields; ConfigError names the field that is wrong."""
    if given is None:
        return KVEventsConfig()
    if isinstance(given, KVEventsConfig):
        return given
    fields = read_fields(OPTION, given, EXAMPLE)
    check_names(OPTION, fields, KVEventsConfig)
    return make_record(OPTION, fields, KVEventsConfig)
