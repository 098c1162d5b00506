"""The cores that an API server process has joined, and their parent's messages about them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from engine.api.processes.server_group import ServerGroup
from engine.core_group.group_supervisor import Handles
from engine.core_group.load_board import LoadBoard
from engine.core_group.shared_words import shared_words
from engine.core_process.client_protocols import AsyncCoreClient
from engine.core_process.core_client import AsyncMPClient
from engine.core_process.launcher import ClientHandle, JoinedCore
from engine.errors import EngineDeadError
from engine.records.messages import EngineReady
from engine.routing import RouterContext, RouterFactory

if TYPE_CHECKING:
    from engine.core_group.group_client import CoreGroupClient


class JoinedCores:
    """One per API server process. The parent's messages arrive on a separate thread."""

    def __init__(self, handles: Handles, ready: EngineReady) -> None:
        """``handles``: None for a core that is being restarted. ``ready``: the cores' capabilities, used if
        none is up."""
        self._lock = threading.Lock()
        self._ready = ready
        self._cores = [None if handle is None else JoinedCore(handle) for handle in handles]
        self._group: CoreGroupClient | None = None
        self._early: list[Callable[[CoreGroupClient], None]] = []
        """Messages that arrived before there was an event loop."""

    def client(self, make_router: RouterFactory, siblings: ServerGroup) -> AsyncCoreClient:
        """Makes the one client of all cores."""
        with self._lock:
            cores = list(self._cores)
            if len(cores) == 1:
                assert cores[0] is not None, "a core alone is not started again"
                return AsyncMPClient(cores[0])
            from engine.core_group.group_client import CoreGroupClient  # not loaded for one core
            from engine.core_group.operator_records import OperatorRecords

            context = RouterContext(len(cores), self._ready.block_size, shared_words(siblings.folder))
            board = LoadBoard(
                len(cores), num_processes=siblings.count, process=siblings.index, folder=siblings.folder
            )
            self._group = CoreGroupClient(
                cores,
                make_router(context),
                board,
                on_core_died=_parent_starts_another,
                on_attached=self._attached,
                ready=self._ready,
                records=OperatorRecords(siblings.folder),
            )
        return self._group

    def died(self, index: int) -> None:
        """Handles that the core has ended."""
        with self._lock:
            core = self._cores[index]
        if core is not None:
            core.stop()

    def joined(self, index: int, handle: ClientHandle) -> None:
        """Handles that a new core is ready and replaces one that died."""
        core = JoinedCore(handle)
        with self._lock:
            self._cores[index] = core
            if self._group is None:  # it will be made with this core
                return
        client = AsyncMPClient(core)
        try:
            client.await_ready()
        except EngineDeadError:  # it has ended since; the parent's next message reports that
            return
        self._tell(lambda group: group.replace(index, client))

    def given_up(self, index: int) -> None:
        """Handles that no core will replace one that died."""
        self._tell(lambda group: group.give_up(index))

    def all_died(self) -> None:
        """Handles that the parent has ended the cores, or has ended itself."""
        for index in range(len(self._cores)):
            self.died(index)
        for index in range(len(self._cores)):
            self.given_up(index)

    def _tell(self, news: Callable[[CoreGroupClient], None]) -> None:
        with self._lock:
            group = self._group
            if group is None or group.loop is None:
                self._early.append(news)
                return
            loop = group.loop
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(news, group)

    def _attached(self, group: CoreGroupClient, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            early = self._early
            self._early = []
        for news in early:
            loop.call_soon(news, group)


def _parent_starts_another(index: int, client: AsyncMPClient) -> bool:
    threading.Thread(target=client.close, name="core-close", daemon=True).start()
    return True
