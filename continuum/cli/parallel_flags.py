"""The flags of ``continuum serve`` for several processes: ranks, engine cores, API servers."""

from __future__ import annotations

from continuum.cli.flag_group import FlagGroup
from continuum.routing.catalog import DEFAULT_ROUTER, ROUTERS
from engine.config.engine_config import EXECUTOR_BACKENDS
from engine.config.parallel import DATA_PARALLEL_BACKENDS


def add_parallelism_flags(group: FlagGroup) -> None:
    """Adds the numbers of ranks, engine cores and API servers."""
    group.add(
        "tensor_parallel_size",
        "Number of tensor-parallel ranks; each takes one GPU, or an equal share of the CPU cores",
        int,
        "RANKS",
        short="-tp",
    )
    group.add(
        "pipeline_parallel_size",
        "Number of pipeline stages, each with some of the model's layers and tensor_parallel_size ranks; "
        "this many steps run at once",
        int,
        "STAGES",
        short="-pp",
    )
    group.add(
        "distributed_executor_backend",
        "How ranks are started; mp: as processes of this machine; ray: as actors on the nodes of the Ray "
        "cluster that RAY_ADDRESS names or that runs here; needs continuum-engine[ray]",
        choices=EXECUTOR_BACKENDS,
    )
    group.add_switch(
        "enable_expert_parallel",
        "Give each rank some whole experts of a mixture of experts, instead of a part of each expert; with "
        "--data-parallel-size, the ranks of all engine cores share the experts and step together",
    )
    _add_engine_cores(group)
    _add_nodes(group)
    group.add("api_server_count", "Number of API server processes in front of the engine core", int, "N")


def _add_engine_cores(group: FlagGroup) -> None:
    """Adds flags for the number of cores, their machines, and how requests are distributed."""
    group.add(
        "data_parallel_size",
        "Number of engine cores that the API servers share, each with its own copy of the weights and its "
        "own KV cache",
        int,
        "CORES",
        short="-dp",
    )
    group.add(
        "data_parallel_size_local",
        "Number of engine cores on this machine; nodes started with --headless, or Ray, run the others "
        "(default: all, with Ray none)",
        int,
        "CORES",
        short="-dpl",
    )
    group.add(
        "data_parallel_size_min",
        "Serve as soon as the first CORES engine cores are ready; the others join later (default: all)",
        int,
        "CORES",
    )
    group.flags.add_argument(
        "--router",
        choices=tuple(ROUTERS),
        default=DEFAULT_ROUTER,
        help="Routing of requests to engine cores; jobs: to the core of the job, or the one that has most of "
        f"the prompt cached; least-loaded: as V1's balancer (default: {DEFAULT_ROUTER})",
    )


def _add_nodes(group: FlagGroup) -> None:
    """Adds flags for machines that run some of the cores."""
    group.add(
        "data_parallel_start_rank",
        "With --headless: number of the first core on this node",
        int,
        "RANK",
    )
    group.add(
        "data_parallel_backend",
        "How the other engine cores are started; mp: by hand, with --headless on each node; ray: by the Ray "
        "cluster that RAY_ADDRESS names or that runs here; needs continuum-engine[ray]",
        choices=DATA_PARALLEL_BACKENDS,
    )
    group.add("data_parallel_address", "Address at which the head of the group listens for nodes")
    group.add("data_parallel_rpc_port", "Port at which the head of the group listens for nodes", int, "PORT")
    group.flags.add_argument(
        "--headless",
        action="store_true",
        help="Start no API server, only this node's cores, which join the group at --data-parallel-address",
    )
