"""Joins a Ray cluster, or starts one on this machine. Only modules that run on Ray also import it."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from engine.errors import ConfigError

ADDRESS_TIMEOUT_S = 5.0


def import_ray(option: str) -> Any:
    """Returns Ray, with its usage report off. ConfigError, which names the option that needs Ray, if it is
    not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.placement_group
    except ImportError as error:
        raise ConfigError(f"{option} ray needs Ray: install continuum-engine[ray].") from error
    return ray


def join_cluster(ray: Any) -> bool:
    """Joins the cluster of ``RAY_ADDRESS`` or of this machine, or starts one here if there is none; returns
    False if this process was already in one. ConfigError if RAY_ADDRESS does not answer."""
    if ray.is_initialized():
        return False
    _check_address(os.environ.get("RAY_ADDRESS", ""))
    quiet = {"logging_level": logging.WARNING, "configure_logging": False}
    with _own_signals():
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            ray.init(address="local", include_dashboard=False, **quiet)
    return True


def with_gpus(ray: Any, device: str, count: int) -> bool:
    """Whether each of ``count`` places gets a GPU: as ``device`` requests; if it is open, whether there are
    enough."""
    if device in ("cpu", "cuda"):
        return device == "cuda"
    return bool(ray.cluster_resources().get("GPU", 0) >= count)


def resources_of(ray: Any) -> str:
    """The cluster's resources, for a message."""
    found = ray.cluster_resources()
    return f"{found.get('CPU', 0):.0f} CPU and {found.get('GPU', 0):.0f} GPU"


def _check_address(address: str) -> None:
    """Raises ConfigError if the address does not answer; Ray would wait for it for more than a minute."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ADDRESS_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"RAY_ADDRESS: no Ray cluster answers at {address}: {error}.") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restores our SIGTERM handler, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(ValueError):  # not on the main thread, where Ray changes nothing
            signal.signal(signal.SIGTERM, before)
