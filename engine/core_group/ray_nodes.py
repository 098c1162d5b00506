"""Cores of a group on a Ray cluster: a Ray actor starts a node for each, wherever there is space.

The node is that of ``--headless``: it joins the group over TCP like any other.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.config.parallel import is_loopback, ranks_per_core
from engine.core_group.node_channel import TOKEN_VARIABLE
from engine.core_group.node_listener import NodeListener
from engine.core_group.ray_node_actor import NodeActor, NodeStart
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import pickled_spec
from engine.process.process_log import start_log
from engine.process.ray_cluster import import_ray, join_cluster, resources_of, with_gpus

STOP_TIMEOUT_S = 10.0
TOKEN_BYTES = 16


class RayNodes:
    """Owned by the process that owns the group's cores."""

    def __init__(self, spec: CoreSpec, engines: Sequence[int]) -> None:
        """``engines``: numbers of the cores that Ray places. ConfigError if there is no Ray, no cluster, or
        the port is taken."""
        ray = import_ray("data_parallel_backend")
        self._joined = join_cluster(ray)
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}
        try:
            token = os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(TOKEN_BYTES))
            config = _at_our_address(spec.config, ray)
            self.listener = NodeListener(config, engines)
            self._make = _node_maker(ray, config, len(engines))
            specs = {engine: _node_spec(replace(spec, config=config), engine) for engine in engines}
            level = logging.getLogger().level
            self._starts = {
                engine: NodeStart(pickled_spec(node), token, level) for engine, node in specs.items()
            }
        except BaseException:
            self._leave_cluster()
            raise

    def start(self, engine: int) -> None:
        """Start a node for this core, unless it was started. Those that the head waits for are started first,
        and so get a place first. Thread-safe."""
        with self._lock:
            if engine not in self._actors:
                self._actors[engine] = self._make(self._starts[engine])

    def close(self) -> None:
        """End all nodes, cleanly where they answer. Repeatable."""
        self.listener.close()
        self._leave_cluster()

    def _leave_cluster(self) -> None:
        import ray

        with self._lock:
            actors = list(self._actors.values())
            self._actors = {}
        with suppress(Exception):  # the cluster may be gone
            ray.wait(
                [actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=STOP_TIMEOUT_S
            )
        for actor in actors:
            with suppress(Exception):
                ray.kill(actor)
        if self._joined:
            self._joined = False
            ray.shutdown()


def _at_our_address(config: EngineConfig, ray: Any) -> EngineConfig:
    """Nodes reach the head at its address in the cluster, if no other is given."""
    if not is_loopback(config.parallel.data_parallel_address):
        return config
    address = ray.util.get_node_ip_address()
    return replace(config, parallel=replace(config.parallel, data_parallel_address=address))


def _node_spec(spec: CoreSpec, engine: int) -> CoreSpec:
    """The spec of a node: one core of the group."""
    parallel = replace(
        spec.config.parallel,
        data_parallel_backend="mp",
        headless=True,
        data_parallel_size_local=1,
        data_parallel_size_min=None,
        data_parallel_start_rank=engine,
    )
    return replace(spec, config=replace(spec.config, parallel=parallel))


def _node_maker(ray: Any, config: EngineConfig, num_nodes: int) -> Callable[[NodeStart], Any]:
    """A function that makes an actor for a node, wherever there is space. Ray restarts an actor that dies, or
    whose node does."""
    num_ranks = ranks_per_core(config)
    needed = {"CPU": num_ranks * num_nodes}
    has_gpus = with_gpus(ray, config.model.device, num_ranks * num_nodes)
    if has_gpus:
        needed["GPU"] = num_ranks * num_nodes
    if any(ray.cluster_resources().get(name, 0) < count for name, count in needed.items()):
        start_log.warning(
            "The Ray cluster has %s; %d engine cores need %s. Some cores wait for free resources.",
            resources_of(ray),
            num_nodes,
            " and ".join(f"{count} {name}" for name, count in needed.items()),
        )
    make = ray.remote(NodeActor).options(
        num_cpus=num_ranks,
        num_gpus=num_ranks if has_gpus else 0,
        scheduling_strategy="SPREAD",
        max_restarts=-1,
        max_concurrency=2,
    )
    started: Callable[[NodeStart], Any] = make.remote
    return started
