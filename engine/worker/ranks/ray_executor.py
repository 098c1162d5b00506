"""Ranks of a model as Ray actors on the nodes of a cluster. Needs no torch.

Ray places the ranks and reports their deaths. Plans and outputs use a separate connection per rank, like
between processes of one machine.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.config.parallel import ranks_per_core
from engine.errors import ConfigError, EngineDeadError
from engine.process.network import keep_alive
from engine.process.ray_cluster import import_ray, join_cluster, resources_of, with_gpus
from engine.worker.ranks.multiproc_executor import RankExecutor
from engine.worker.ranks.rank_messages import CoreAddress, RankPlace, RankStart
from engine.worker.ranks.rank_process import STOP_TIMEOUT_S, RankLink
from engine.worker.ranks.ray_actor import RankActor

PLACE_TIMEOUT_S = 60.0
"""Seconds that the cluster may take to place all ranks."""
CONNECT_TIMEOUT_S = 60.0
TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Host:
    """An actor, and its location."""

    actor: Any
    address: str
    port: int
    gpus: list[str]


class RayRank(RankLink):
    """A rank that an actor has started."""

    def __init__(self, rank: int, channel: Connection[Any, Any], host: _Host) -> None:
        super().__init__(rank, channel)
        self._host = host

    def death(self) -> EngineDeadError:
        return EngineDeadError(
            f"Rank {self.rank} of the model, on node {self._host.address}, has died; see its log."
        )

    def wait(self) -> None:
        import ray

        with suppress(Exception):  # the node may be gone
            ray.get(self._host.actor.stop.remote(), timeout=2 * STOP_TIMEOUT_S)
        ray.kill(self._host.actor)


class RayExecutor(RankExecutor):
    """An Executor over Ray actors; its own factory.

    Joins the cluster that ``RAY_ADDRESS`` names or that runs on this machine; otherwise starts one here.
    """

    def __init__(self, config: EngineConfig) -> None:
        ray = import_ray("distributed_executor_backend")
        self._joined = join_cluster(ray)
        self._group: Any = None
        try:
            self._group, actors = _place_actors(ray, config)
            super().__init__(_start_ranks(ray, config, actors))
        except BaseException:
            self._leave_cluster()
            raise

    def _stopped_all(self) -> None:
        self._leave_cluster()

    def _leave_cluster(self) -> None:
        """Free the ranks' placement group, which ends the actors."""
        import ray

        with suppress(Exception):  # the cluster may be gone
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
                self._group = None
        if self._joined:
            ray.shutdown()


def _place_actors(ray: Any, config: EngineConfig) -> tuple[Any, list[Any]]:
    """A placement group with a bundle for each rank, and an actor in each, those on this node first.

    ConfigError if the cluster cannot place them.
    """
    size = ranks_per_core(config)
    bundle = {"CPU": 1.0, **({"GPU": 1.0} if with_gpus(ray, config.model.device, size) else {})}
    group = ray.util.placement_group([bundle] * size, strategy="PACK")
    if not group.wait(PLACE_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"The Ray cluster has no place for {size} ranks (tensor_parallel_size times "
            f"pipeline_parallel_size), each with "
            f"{' and '.join(f'1 {name}' for name in bundle)}; it has {resources_of(ray)}."
        )
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    order = sorted(range(size), key=lambda index: (nodes[index] != here, nodes[index], index))
    make = ray.remote(RankActor).options
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return group, [
        make(
            num_cpus=1,
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=4,
            scheduling_strategy=strategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in order
    ]


def _start_ranks(ray: Any, config: EngineConfig, actors: Sequence[Any]) -> list[RankLink]:
    """Start a rank in each actor, and wait until all have connected."""
    places = ray.get([actor.place.remote() for actor in actors], timeout=CONNECT_TIMEOUT_S)
    stages = config.model.pipeline_parallel_size
    hosts = [_Host(actor, *place) for actor, place in zip(actors, places, strict=True)]
    token = secrets.token_bytes(TOKEN_BYTES)
    with socket.create_server((ray.util.get_node_ip_address(), 0)) as listener:
        host, port = listener.getsockname()[:2]
        core = CoreAddress(host, port, token)
        level = logging.getLogger().getEffectiveLevel()
        starting = [
            each.actor.start.remote(RankStart(config, place, core, 0, level), _gpus_on(each, hosts))
            for each, place in zip(hosts, _places(hosts, stages), strict=True)
        ]
        ray.get(starting, timeout=CONNECT_TIMEOUT_S)
        channels = _accept(ray, listener, token, [each.actor.wait.remote() for each in hosts])
    return [RayRank(rank, channels[rank], each) for rank, each in enumerate(hosts)]


def _places(hosts: Sequence[_Host], num_stages: int) -> list[RankPlace]:
    """The place of each rank; the ranks meet at the first one's node."""
    addresses = [host.address for host in hosts]
    meeting_point = f"tcp://{hosts[0].address}:{hosts[0].port}"
    return [
        RankPlace(
            rank,
            len(hosts),
            addresses[:rank].count(address),
            addresses.count(address),
            meeting_point,
            address,
            num_stages,
        )
        for rank, address in enumerate(addresses)
    ]


def _gpus_on(host: _Host, hosts: Sequence[_Host]) -> list[str]:
    """The GPUs of all ranks on a node, by their local ranks."""
    return [gpu for other in hosts if other.address == host.address for gpu in other.gpus]


def _accept(
    ray: Any, listener: socket.socket, token: bytes, exits: list[Any]
) -> dict[int, Connection[Any, Any]]:
    """The channel of each rank. EngineDeadError if a rank exits before it connects, or they take too long."""
    channels: dict[int, Connection[Any, Any]] = {}
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while len(channels) < len(exits):
        if time.monotonic() > deadline:
            raise EngineDeadError("The ranks of the model did not connect in time; see Ray's logs.")
        ended, _ = ray.wait(exits, timeout=0)
        if ended:
            raise EngineDeadError("A rank of the model ended before it had connected; see Ray's logs.")
        if not select.select([listener], [], [], 0.1)[0]:
            continue
        connection, _ = listener.accept()
        rank = _rank_of(connection, token)
        if rank is not None and rank < len(exits):
            channels[rank] = Connection(connection.detach())
    return channels


def _rank_of(connection: socket.socket, token: bytes) -> int | None:
    """The number of the rank that has connected; closes the connection and returns None for anyone else."""
    connection.settimeout(2.0)
    with suppress(OSError):
        said = connection.recv(len(token) + 4, socket.MSG_WAITALL)
        if secrets.compare_digest(said[: len(token)], token):
            connection.settimeout(None)
            keep_alive(connection)
            return int.from_bytes(said[len(token) :], "big")
    connection.close()
    return None
