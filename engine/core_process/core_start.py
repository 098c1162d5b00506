"""How a core process is told what to be, and tells that it is: read by both sides, so it loads neither."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core.policy import PolicyFactory
from engine.executor import ExecutorFactory

READY, FAILED = b"READY", b"FAILED"
"""First frame of the one message that ends the start-up, from the core to who started it."""


@dataclass(frozen=True, slots=True)
class CoreStart:
    """All a core process is told by its parent, over its standard input."""

    folder: str
    """Private folder of the sockets; removed with the core."""
    parent_pid: int
    log_level: int
    spec: bytes
    """A pickled CoreSpec, apart so that one that cannot be read is reported over the handshake."""


@dataclass(frozen=True, slots=True)
class CoreSpec:
    """What the core is built from."""

    config: EngineConfig
    executor_factory: ExecutorFactory
    policy_factory: PolicyFactory
