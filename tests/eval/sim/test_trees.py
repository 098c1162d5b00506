"""Trees of agents in simulated time: who says which job waits for a sub-agent ends sooner."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.policy.trees import Trees
from continuum.cli.main import main


def test_trees_end_sooner_if_the_policy_knows_of_them(tmp_path: Path) -> None:
    """Ten trees in too little memory. The clients name the jobs in both runs, in one the parents, too."""
    trees = Trees(seed=1)
    for number in range(10):
        trees.root(number)
    assert any(record["job_id"].count("/") == 2 for record in trees.records)
    workload = tmp_path / "trees.jsonl"
    workload.write_text("".join(json.dumps(record) + "\n" for record in trees.records))
    unnamed, named = (_mean_s(workload, tmp_path / "out.json", *flags) for flags in ((), ("--tell-parents",)))
    assert named < 0.8 * unnamed


def _mean_s(workload: Path, out: Path, *flags: str) -> float:
    hardware = ("--gpu", "h100", "--model", "llama-3.1-8b", "--kv-tokens", "100000")
    traffic = ("--workload", str(workload), "--rate", "0.1", "--seeds", "1", "--policies", "continuum")
    assert main(["simulate", *traffic, *hardware, "--json", str(out), *flags]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["num_completed_jobs"] == 10
    mean_s: float = run["job_completion_s"]["mean"]
    return mean_s
