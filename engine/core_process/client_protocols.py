"""The engine core as its clients use it: one process, or a group of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import msgspec

from engine.errors import EngineDeadError
from engine.records.handed_over import HandedOver
from engine.records.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady, Signal, TurnReceipt

Delivery = EngineCoreOutputs | EngineDeadError


class EngineState(msgspec.Struct, kw_only=True):
    """One of the engine cores of a server, as an API server process knows it."""

    engine: int
    """The number of the core."""
    state: Literal["up", "draining", "drained", "down"]
    """``draining``: takes no new jobs; ``drained``: has no requests, and was told to take none; ``down``: has
    died, and is being restarted."""
    process_id: int | None
    num_open: int
    """Requests that were sent to it and have not ended."""
    num_running: int
    num_waiting: int
    num_blocks: int
    """KV blocks of its pool; 0 before its first report."""
    num_free_blocks: int
    num_pinned_blocks: int


def lone_engine(process_id: int, statistics: dict[str, Any]) -> EngineState:
    """The state of a server's only core, from its statistics."""
    names = ("num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_pinned_blocks")
    return EngineState(
        engine=0,
        state="up",
        process_id=process_id,
        num_open=statistics["num_running"] + statistics["num_waiting"],
        **{name: statistics[name] for name in names},
    )


class SyncCoreClient(Protocol):
    """A core as the synchronous ``LLMEngine`` uses it: calls block. An event loop uses ``AsyncMPClient``."""

    def await_ready(self) -> EngineReady:
        """Wait until the core has loaded its model; raises the error that prevents it."""

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def abort_requests(self, request_ids: list[str], *, stopped: bool = False) -> None:
        """End requests. ``stopped``: a stop string was found, which ends a turn as EOS does."""

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the core's next message; EngineDeadError if the core has died."""

    def call_utility(self, method: str, *args: object) -> Any:
        """Call a utility of the core by name; EngineGenerateError with its text if it fails."""

    def close(self) -> None: ...


class AsyncCoreClient(Protocol):
    """Sends without waiting; what the core sends is delivered on the event loop."""

    @property
    def ready(self) -> EngineReady:
        """The answer to the handshake; set by ``await_ready``."""

    @property
    def pid(self) -> int:
        """Process id of the core, of the first one if there are several."""

    @property
    def dead(self) -> bool:
        """Whether nothing can be generated any more."""

    def await_ready(self) -> EngineReady:
        """Wait until the model is loaded; if it cannot be, closes this client and raises the error."""

    def attach(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None]) -> None:
        """Call ``deliver`` on this loop from now on, also for earlier messages."""

    def operating(self) -> AbstractAsyncContextManager[None]:
        """A lock that one operator at a time holds, of all API server processes."""

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Send the requests of one prompt: one for each answer that it is to have."""

    def abort_requests(self, request_ids: list[str], *, stopped: bool = False) -> None:
        """End requests. ``stopped``: a stop string was found, which ends a turn as EOS does."""

    async def call_utility(self, method: str, *args: object) -> Any:
        """Call a utility by name; EngineGenerateError with its text if it fails."""

    async def signal(self, signal: Signal) -> TurnReceipt | None:
        """Send a signal; returns the decision about the turn, if any, without waiting for a step."""

    def tell(self, signal: Signal) -> None:
        """Send a signal that is not answered."""

    async def engine_states(self) -> list[EngineState]:
        """The cores, in the order of their numbers."""

    def drain(self, engine: int, deadline_s: float) -> asyncio.Task[HandedOver | None]:
        """Let a core take no new requests, and hand over what its pins hold; see ``Drains``."""

    async def end_drain(self, engine: int) -> None:
        """Let a core take new requests again."""

    def close(self) -> None:
        """Stop the core if this client started it, and wait until it has exited. May be called again."""
