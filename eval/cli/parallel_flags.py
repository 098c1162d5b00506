"""The flags of ``continuum serve`` for more than one process: ranks, engine cores, API servers."""

from __future__ import annotations

from continuum.routing.catalog import DEFAULT_ROUTER, ROUTERS
from engine.config import EXECUTOR_BACKENDS
from eval.cli.flag_group import FlagGroup


def add_parallelism_flags(group: FlagGroup) -> None:
    """How many of each."""
    group.add(
        "tensor_parallel_size",
        "Number of tensor-parallel ranks; each takes one GPU, or an equal share of the CPU cores",
        int,
        "RANKS",
        short="-tp",
    )
    group.add(
        "distributed_executor_backend",
        "Who starts the ranks: mp: processes of this machine; ray: actors on the nodes of the Ray cluster "
        "that RAY_ADDRESS names or that runs here; needs continuum-engine[ray]",
        choices=EXECUTOR_BACKENDS,
    )
    group.add_switch(
        "enable_expert_parallel",
        "Give each rank some whole experts of a mixture of experts, instead of a part of each",
    )
    group.add(
        "data_parallel_size",
        "Number of engine cores behind the same API servers, each with its own copy of the weights and its "
        "own KV cache",
        int,
        "CORES",
        short="-dp",
    )
    group.flags.add_argument(
        "--router",
        choices=tuple(ROUTERS),
        default=DEFAULT_ROUTER,
        help="Which engine core a request goes to; jobs: to its job's, or where most of its "
        "prompt is cached; "
        f"least-loaded: V1's balancer (default: {DEFAULT_ROUTER})",
    )
    group.add("api_server_count", "Number of API server processes in front of the engine core", int, "N")
