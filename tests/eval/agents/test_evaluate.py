"""Promises of an evaluation: each task's own checker decides, and failures are distinguished."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from eval.agents.evaluate import add_arguments, run
from eval.errors import EvalError
from tests.eval.agents.scripts import ENDLESS_TASK, GARBLED_TASK, SUM_TASK, WRITE_TASK, WRONG_TASK

TASKS = [SUM_TASK, WRITE_TASK, WRONG_TASK, ENDLESS_TASK, GARBLED_TASK]


def evaluate(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(flags), TASKS, Path("unused"))


def test_every_task_ends_in_one_way(
    agent_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every task is solved, wrong, unparsed or over the limit; the file has the details of those not
    solved."""
    file = tmp_path / "evaluation.json"
    assert evaluate("--base-url", agent_server, "--json", str(file), "--at-least", "50") == 1
    told = capsys.readouterr()
    first, *_ = told.out.splitlines()
    assert first.startswith("tiny, greedy: 2 of 5 tasks solved (40.0 %), 1 of ")
    assert "1 over the turn limit" in first
    assert "tasks 5/5  solved 2" in told.err
    tasks = {task["task_id"]: task for task in json.loads(file.read_text())["tasks"]}
    assert {name: task["outcome"] for name, task in tasks.items()} == {
        "sum-1": "solved",
        "write-1": "solved",
        "sum-2": "wrong",
        "endless-1": "over_limit",
        "garbled-1": "unparsed",
    }
    assert tasks["sum-1"]["transcript"] == []
    assert 'call: list_files {"path": "notes"}' in tasks["sum-2"]["transcript"]
    assert "result: a.txt\nb.txt" in tasks["sum-2"]["transcript"]


def test_replies_can_be_drawn(agent_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a temperature replies are sampled, one task after the other."""
    assert evaluate("--base-url", agent_server, "--temperature", "0.7", "--concurrency", "1") == 0
    assert capsys.readouterr().out.startswith("tiny, temperature 0.7: 2 of 5 tasks solved")


def test_a_server_that_is_not_there_is_an_error() -> None:
    """An unreachable server gives one sentence, and nothing is measured."""
    with pytest.raises(EvalError, match="Cannot reach the server"):
        evaluate("--base-url", "http://127.0.0.1:9")
