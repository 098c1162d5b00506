"""A group whose cores this process owns: starts them, and restarts those that die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from engine.core_group.group_client import CoreGroupClient
from engine.core_group.group_cores import GroupCores, StartableCore
from engine.core_group.restarts import CoreRestarts, report_core_died
from engine.core_group.shared_words import shared_words
from engine.core_process.client_protocols import Delivery
from engine.core_process.core_client import AsyncMPClient
from engine.routing import RouterContext, RouterFactory


class OwnCoreGroup(CoreGroupClient):
    """The group of a server with one API server process."""

    def __init__(self, group: GroupCores, make_router: RouterFactory) -> None:
        """Start the cores; they load their models at the same time."""
        self._cores = group
        cores = [group.make(index) for index in range(group.num_awaited)]
        for core in cores:
            core.launch()
        self._to_come = range(group.num_awaited, group.count)
        context = RouterContext(group.count, group.block_size, shared_words())
        places = [*cores, *(None for _ in self._to_come)]
        super().__init__(places, make_router(context), on_core_died=self._restart)
        self._restarts = CoreRestarts(group, _started, self._came_back, self._gave_up)

    def attach(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None]) -> None:
        super().attach(loop, deliver)
        for index in self._to_come:
            self._restarts.begin(index)

    def close(self) -> None:
        self._restarts.close()
        super().close()
        self._cores.close()

    def _restart(self, index: int, client: AsyncMPClient) -> bool:
        pid = client.pid
        exit_code = client.exit_code
        comes_back = self._restarts.restart(index, client, self.clients_up())
        share_experts = self._cores.share_experts
        report_core_died(index, pid, exit_code, comes_back=comes_back, share_experts=share_experts)
        return comes_back

    def _came_back(self, index: int, client: AsyncMPClient) -> None:
        try:
            self._on_loop(lambda: self.replace(index, client))
        except RuntimeError:  # the loop has been closed
            client.close()

    def _gave_up(self, index: int) -> None:
        with suppress(RuntimeError):
            self._on_loop(lambda: self.give_up(index))

    def _on_loop(self, work: Callable[[], None]) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(work)


def _started(index: int, core: StartableCore) -> AsyncMPClient:
    client = AsyncMPClient(core)
    client.await_ready()
    return client
