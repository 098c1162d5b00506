"""Owns the cores that API servers in other processes use, and restarts those that die."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core_group.group_cores import GroupCores, StartableCore
from engine.core_group.restarts import CoreRestarts, report_core_died
from engine.core_process.core_client import CoreSupervisor
from engine.core_process.launcher import ClientHandle
from engine.records.messages import EngineReady

Handles = tuple[ClientHandle | None, ...]
"""Handles by which an API server process joins the cores; None for one that is being restarted."""


def with_handle(handles: Handles, index: int, handle: ClientHandle) -> Handles:
    """The handles, with another one in this place."""
    return (*handles[:index], handle, *handles[index + 1 :])


@dataclass(frozen=True, slots=True)
class CoreDied:
    """The core with this number has died."""

    index: int


@dataclass(frozen=True, slots=True)
class CoreBack:
    """A new core is ready in place of one that died."""

    index: int
    supervisor: CoreSupervisor


@dataclass(frozen=True, slots=True)
class CoreGivenUp:
    """No core will come in place of one that died: it has died too often."""

    index: int


CoreChange = CoreDied | CoreBack | CoreGivenUp


class GroupSupervisor:
    """Owns a group's cores. ``on_change`` is called on separate threads, the methods only on the owner's."""

    ready: EngineReady

    def __init__(self, group: GroupCores, on_change: Callable[[CoreChange], None]) -> None:
        """Wait until the required cores are ready; raises the error of one that cannot start."""
        self._group = group
        self._on_change = on_change
        self._cores: list[CoreSupervisor | None] = []
        self._awaited = set(range(group.num_awaited, group.count))
        self._restarts = CoreRestarts(group, self._supervised, self._came_back, self._gave_up)
        processes = [group.make(index) for index in range(group.num_awaited)]
        for process in processes:
            process.launch()
        try:
            for index, process in enumerate(processes):
                self._cores.append(self._supervised(index, process))
        except BaseException:
            self.close()
            for process in processes:
                process.stop()
            raise
        first = self._cores[0]
        assert first is not None
        self.ready = first.ready
        self._cores += [None for _ in self._awaited]
        for index in self._awaited:
            self._restarts.begin(index)

    @property
    def is_group(self) -> bool:
        return self._group.count > 1

    def add_client(self) -> Handles:
        """Handles by which one more API server process joins the cores."""
        return tuple(None if core is None else core.add_client() for core in self._cores)

    def remove_client(self, handles: Handles) -> None:
        """End the requests of a process that had these handles and has exited."""
        for core, handle in zip(self._cores, handles, strict=True):
            if core is not None and handle is not None and core.pid == handle.pid:
                core.remove_client(handle)

    def died(self, index: int) -> bool:
        """Restart a core that has died; False if no core is left or expected."""
        core = self._cores[index]
        if not self.is_group or core is None:
            return False
        self._cores[index] = None
        pid = core.pid
        exit_code = core.exit_code
        others = {other: its for other, its in enumerate(self._cores) if its is not None}
        comes_back = self._restarts.restart(index, core, others)
        share_experts = self._group.share_experts
        report_core_died(index, pid, exit_code, comes_back=comes_back, share_experts=share_experts)
        if comes_back:
            self._awaited.add(index)
        return self.has_cores

    def came_back(self, back: CoreBack) -> None:
        """Note that a core is ready in place of one that died."""
        self._awaited.discard(back.index)
        self._cores[back.index] = back.supervisor

    def given_up(self, index: int) -> bool:
        """Note that no core will come in this place; False if no core is left or expected."""
        self._awaited.discard(index)
        return self.has_cores

    @property
    def has_cores(self) -> bool:
        """Whether there are cores, or some are expected."""
        return bool(self._awaited) or any(core is not None for core in self._cores)

    def close(self) -> None:
        self._restarts.close()
        for core in self._cores:
            if core is not None:
                core.close()
        self._group.close()

    def _supervised(self, index: int, process: StartableCore) -> CoreSupervisor:
        return CoreSupervisor(process, lambda: self._on_change(CoreDied(index)))

    def _came_back(self, index: int, supervisor: CoreSupervisor) -> None:
        self._on_change(CoreBack(index, supervisor))

    def _gave_up(self, index: int) -> None:
        self._on_change(CoreGivenUp(index))
