"""What operators ask a route: which server costs least to end. Calls that change one server are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

CHANGE_ONE_SERVER = frozenset(
    (
        *("/drain", "/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/trace"),
        *("/reset_prefix_cache", "/reset_mm_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/collective_rpc", "/start_profile", "/stop_profile", "/scale_elastic_ep"),  # vLLM's
    )
)
"""Calls that a route cannot place: each means a certain server, or all of them."""


class _Engine(msgspec.Struct):
    """A core of a server, as ``GET /engines`` lists it."""

    num_running: int
    num_waiting: int
    num_pinned_blocks: int


class _Engines(msgspec.Struct):
    data: list[msgspec.Raw]


def engines_of(answer: bytes) -> list[dict[str, Any]]:
    """The cores in a server's answer. msgspec.DecodeError if it is no list of cores."""
    listed = msgspec.json.decode(answer, type=_Engines).data
    for each in listed:
        msgspec.json.decode(each, type=_Engine)
    return [msgspec.json.decode(each) for each in listed]


def cheapest_to_end(servers: Mapping[str, Sequence[dict[str, Any]]]) -> str | None:
    """The server whose paused jobs hold the least KV: it must be handed over, or is recomputed elsewhere.
    Of equals the one with the fewest requests. None if no other one would be left."""
    return min(servers, key=lambda url: _cost(servers[url])) if len(servers) > 1 else None


def _cost(engines: Sequence[dict[str, Any]]) -> tuple[int, int]:
    num_requests = sum(each["num_running"] + each["num_waiting"] for each in engines)
    return sum(each["num_pinned_blocks"] for each in engines), num_requests
