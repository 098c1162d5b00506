"""The messages that start a core process. Both sides import this module, so it imports neither of them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.engine_config import EngineConfig
from engine.core.policy import PolicyFactory
from engine.executor import ExecutorFactory
from engine.routing import LeastLoadedRouter, RouterFactory

READY = b"READY"
FAILED = b"FAILED"
"""First frame of the one message that ends the startup, from the core to the process that started it."""


@dataclass(frozen=True, slots=True)
class CoreStart:
    """All that a core process receives from its parent, over its standard input."""

    folder: str
    """Private folder of the sockets; removed when the core ends."""
    parent_pid: int
    log_level: int
    spec: bytes
    """A ``CoreSpec``, pickled separately: if it cannot be loaded, the error is reported in the handshake."""


@dataclass(frozen=True, slots=True)
class CoreSpec:
    """What the core is built from."""

    config: EngineConfig
    executor_factory: ExecutorFactory
    policy_factory: PolicyFactory
    router_factory: RouterFactory = LeastLoadedRouter
    """Makes the routers of a group of cores; unused by one core alone."""
