"""Makes the cores of a group: processes of this machine, and cores that nodes run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from engine.config.parallel import cores_sharing_experts
from engine.core_group.engine_config import spec_of_engine
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import Core, CoreProcess
from engine.process.network import free_port

if TYPE_CHECKING:
    from engine.core_group.node_listener import NodeListener
    from engine.core_group.ray_nodes import RayNodes


class StartableCore(Core, Protocol):
    """A core that has not been started."""

    def launch(self) -> None:
        """Start it, without a client yet."""


class GroupCores:
    """Makes a core for each place of a group, and another one when that has died."""

    def __init__(self, spec: CoreSpec) -> None:
        """ConfigError if nodes are expected but cannot join."""
        parallel = spec.config.parallel
        self._spec = spec
        self.share_experts = cores_sharing_experts(spec.config) > 1
        """Whether the cores share experts: then none can go on without the others."""
        self.count = parallel.data_parallel_size
        self.num_awaited = parallel.num_awaited
        """Number of cores that must be ready before the group serves: those with the lowest numbers."""
        remote = [index for index in range(self.count) if index not in parallel.local_engines]
        self._listener: NodeListener | None = None
        self._nodes: RayNodes | None = None
        if remote and parallel.data_parallel_backend == "ray":
            from engine.core_group.ray_nodes import RayNodes

            self._nodes = RayNodes(spec, remote)
            self._listener = self._nodes.listener
        elif remote:
            from engine.core_group.node_listener import NodeListener  # not loaded on one machine

            self._listener = NodeListener(spec.config, remote)
        self._made: set[int] = set()
        self.meet_anew()

    def meet_anew(self) -> None:
        """Let cores that are made from now on meet at a new port, not at that of earlier ones."""
        if self.share_experts and self._listener is None:
            config = self._spec.config
            parallel = replace(config.parallel, data_parallel_master_port=free_port())
            self._spec = replace(self._spec, config=replace(config, parallel=parallel))

    @property
    def block_size(self) -> int:
        """Size of a KV block in tokens."""
        return self._spec.config.cache.block_size

    def make(self, index: int) -> StartableCore:
        """Make a core for this place."""
        if index in self._spec.config.parallel.local_engines:
            spec = self._spec if index not in self._made else _without_adapters(self._spec)
            self._made.add(index)
            return CoreProcess(spec_of_engine(spec, index))
        from engine.core_group.remote_core import RemoteCore

        if self._nodes is not None:
            self._nodes.start(index)
        assert self._listener is not None
        return RemoteCore(index, self._listener)

    def close(self) -> None:
        """Take no more nodes."""
        if self._listener is not None:
            self._listener.close()
        if self._nodes is not None:
            self._nodes.close()


def _without_adapters(spec: CoreSpec) -> CoreSpec:
    """The spec of a restarted core: adapters are loaded when requests name them. Those of the start may have
    been unloaded or rewritten, which must not keep a core from restarting."""
    if spec.config.lora is None:
        return spec
    return replace(spec, config=replace(spec.config, lora=replace(spec.config.lora, modules=())))
