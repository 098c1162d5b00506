"""The examples run as they stand, against a real server or a real model, and are short enough to read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.agent_model import NAME, folder
from tests.api.server import running_server

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(folder(), "--served-model-name", NAME) as server:
        yield f"{server.url}/v1"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_question_is_answered_and_has_a_receipt(url: str) -> None:
    """The openai library streams the answer; the receipt comes with its usage."""
    said = run("openai_client.py", url, "What can you do?")
    assert "I am a small model." in said
    assert "'cached_tokens': 0" in said


def test_an_agents_loop_finds_its_history_cached(url: str) -> None:
    """Both files are read, the sum is right, and all later turns find their prefix."""
    said = run("agent_loop.py", url, "Add the plants of north.txt and south.txt.")
    assert "643" in said.splitlines()[-1]
    cached = [int(line.split()[1]) for line in said.splitlines() if line.startswith("cached")]
    assert cached[0] == 0
    assert all(cached[1:])


def test_the_quick_start_asks_as_it_says(url: str) -> None:
    """Its ``curl`` command and its program, but for the port, are answered."""
    page = (ROOT / "docs" / "quickstart.md").read_text().replace("http://localhost:8000/v1", url)
    (command,) = re.findall(r"^curl .*?(?=^```)", page, re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for asked in (["bash", "-c", f"exec {command.strip()} -sf"], [sys.executable, "-c", program]):
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        assert "I am a small model." in done.stdout, done.stderr


def test_a_job_without_a_server() -> None:
    """The second turn's prompt was cached, up to its last block."""
    first, second = run("offline.py", str(folder())).splitlines()
    assert first.startswith("0 of ")
    assert int(second.split()[0]) > 100


def test_a_policy_of_ones_own_decides() -> None:
    """The prompt that came second and is shorter runs first."""
    assert run("custom_policy.py", str(folder())) == "first to run: A short one.\n"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_run_here(path: Path) -> None:
    """Under 60 lines, and none without a test above."""
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert f'run("{path.name}"' in Path(__file__).read_text()
