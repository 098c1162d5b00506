"""Joining a Ray cluster, or starting one on this machine. Nothing else imports Ray but what runs on one."""

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
    """Ray, whose usage report is off. ConfigError, which names the option that needs it, if it is not
    installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.placement_group
    except ImportError as error:
        raise ConfigError(f"{option} ray needs Ray: install continuum-engine[ray].") from error
    return ray


def join_cluster(ray: Any) -> bool:
    """Join the cluster of ``RAY_ADDRESS`` or of this machine, or start one here if there is none; returns
    whether this process was not in one. ConfigError if nobody answers."""
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
    """Whether ``count`` places get GPUs: asked for, or left to choose and there are enough."""
    if device in ("cpu", "cuda"):
        return device == "cuda"
    return bool(ray.cluster_resources().get("GPU", 0) >= count)


def resources_of(ray: Any) -> str:
    """What the cluster has, for a message."""
    found = ray.cluster_resources()
    return f"{found.get('CPU', 0):.0f} CPU and {found.get('GPU', 0):.0f} GPU"


def _check_address(address: str) -> None:
    """ConfigError if nobody is there, for which Ray would wait for more than a minute."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ADDRESS_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"RAY_ADDRESS: no Ray cluster answers at {address}: {error}.") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray handles SIGTERM of its own; here that is ours."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(ValueError):  # not on the main thread, where Ray changes nothing
            signal.signal(signal.SIGTERM, before)
