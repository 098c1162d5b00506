"""Real Ray clusters whose nodes are all on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: continuum-engine[ray]")

MEMORY = 80 * 2**20
"""Size of a node's object store, which nothing of ours uses."""
MARK = "CLUSTER_OF_A_TEST"
"""An environment variable of all processes of a test's cluster."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head with one CPU, for one rank or one core."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv(MARK, token_hex(8))
    head = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
    made = pytest.importorskip("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    try:
        yield made
    finally:
        made.shutdown()


def add_node(cluster: Any) -> Any:
    """Adds a node with one CPU."""
    node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    cluster.wait_for_nodes()
    return node
