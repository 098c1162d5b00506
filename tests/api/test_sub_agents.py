"""Agents with sub-agents in a crowded server: answers stay right, and the trace tells who waits for whom."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from tests.api.server import Server, running_server

NUM_AGENTS = 4
FLAGS = ("--max-model-len", "480", "--device", "cpu")


def turn(http: httpx.Client, prompt: list[int], job: str, parent: str | None) -> list[int]:
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}
    body |= {"job_id": job, "return_token_ids": True, "ignore_eos": True}
    if parent is not None:
        body["parent_job_id"] = parent
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def run_agent(server: Server, number: int, depth: int = 0, parent: str | None = None) -> list[list[int]]:
    """Plays an agent whose sub-agents begin with what it knows, and give it what they find. Returns all
    answers, in an order of its own."""
    random = Random(f"{number} {depth}")
    job = f"agent-{number}" if parent is None else f"{parent}/{depth}-{number}"
    prompt = [random.randrange(10, 200) for _ in range(random.randrange(40, 120))]
    answers = []
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for _ in range(2):
            answers.append(turn(http, prompt, job, parent))
            prompt += answers[-1]
            if depth < 2:
                with ThreadPoolExecutor(2) as pool:
                    children = list(pool.map(lambda each: run_agent(server, each, depth + 1, job), range(2)))
                found = [token for child in children for token in child[-1]]
                answers += [answer for child in children for answer in child]
                prompt += found
    return answers


def shape_of(tree: dict[str, Any]) -> dict[str, Any]:
    """The ids of a job, and of those below it."""
    below = [shape_of(child) for child in tree["children"]]
    return {tree["job"]["id"]: {name: each[name] for each in below for name in sorted(each)}}


def jobs_after_the_end_of(server: Server, job: str) -> set[str]:
    httpx.post(f"{server.url}/v1/jobs/{job}/finish").raise_for_status()
    return {each["id"] for each in httpx.get(f"{server.url}/v1/jobs").json()["data"]}


@pytest.mark.slow
def test_trees_of_agents_end_as_they_do_alone(model_folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with running_server(model_folder, *FLAGS, "--num-gpu-blocks-override", "2000") as alone:
        expected = [run_agent(alone, number) for number in range(NUM_AGENTS)]
    crowded = ("--num-gpu-blocks-override", "60", "--trace", str(trace))
    with running_server(model_folder, *FLAGS, *crowded) as server:
        with ThreadPoolExecutor(NUM_AGENTS) as pool:
            answers = list(pool.map(lambda number: run_agent(server, number), range(NUM_AGENTS)))
        root = httpx.get(f"{server.url}/v1/jobs/agent-0").json()
        tree = httpx.get(f"{server.url}/v1/jobs/agent-0/tree").json()
        left = jobs_after_the_end_of(server, "agent-0")
        assert server.interrupt() == 0
    assert answers == expected
    assert sorted(root["children"]) == ["agent-0/1-0", "agent-0/1-1"]
    assert shape_of(tree) == {
        "agent-0": {
            "agent-0/1-0": {"agent-0/1-0/2-0": {}, "agent-0/1-0/2-1": {}},
            "agent-0/1-1": {"agent-0/1-1/2-0": {}, "agent-0/1-1/2-1": {}},
        }
    }
    assert left
    assert not any(job.startswith("agent-0") for job in left)
    arrived = [json.loads(line) for line in trace.read_text().splitlines() if "request_arrived" in line]
    parents = {event["job_id"]: event.get("parent_id") for event in arrived}
    assert parents["agent-0"] is None
    assert parents["agent-0/1-0/2-1"] == "agent-0/1-0"
    assert main(["trace", "replay", str(trace)]) == 0
