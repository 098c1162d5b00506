"""Promises of the bundled model: served by default, it answers the chat's example questions."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eval.agent_model import MAX_REPLY_TOKENS, NAME, folder
from eval.agents.agent import Agent
from eval.agents.example import FILES, QUESTIONS
from eval.agents.http_model import HttpModel
from eval.agents.model import Sampling
from eval.agents.sandbox import folder_of
from eval.agents.tools import Toolbox
from eval.load.client import ServerClient
from eval.load.server_process import ServerProcess

pytestmark = pytest.mark.slow

MAX_BYTES = 10 * 2**20
ENDINGS = ("4", "tomato", "643", "40", "host.txt")
"""The expected ends of the answers, without the full stop."""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``continuum serve`` without a model argument."""
    log = tmp_path_factory.mktemp("box") / "server.log"
    with ServerProcess(["--host", "127.0.0.1", "--port", "0"], log) as server:
        assert f"No MODEL given; serving the bundled demo model as '{NAME}'." in log.read_text()
        yield server.base_url


def test_it_is_served_without_being_named(box: str) -> None:
    """Requests use the model under its own name."""
    (card,) = httpx.get(f"{box}/v1/models").json()["data"]
    assert card["id"] == NAME


@pytest.mark.parametrize(("question", "ending"), list(zip(QUESTIONS, ENDINGS, strict=True)))
async def test_it_answers_what_the_chat_proposes(box: str, question: str, ending: str) -> None:
    """The model's calls are parsed without naming a parser, and are run."""
    async with ServerClient(box, model=NAME) as client:
        with folder_of(FILES) as root:
            agent = Agent(model=HttpModel(client, Sampling()), tools=Toolbox(root), max_turns=12)
            run = await agent.ask(question)
            written = {path.name: path.read_text().strip() for path in root.glob("host.txt")}
    assert run.answer.rstrip(".").endswith(ending), run
    assert written == ({"host.txt": "well-7"} if ending == "host.txt" else {})


def test_what_it_cannot_do_ends_soon() -> None:
    """Outside its tasks it may write nonsense, but no reply of the chat fills its context."""
    command = [sys.executable, "-m", "continuum.cli", "chat", "list the files here"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    found = re.findall(r"of ([\d,]+) prompt tokens", done.stderr)
    lengths = [int(length.replace(",", "")) for length in found]
    assert len(lengths) > 1, done.stderr
    assert max(after - before for before, after in itertools.pairwise(lengths)) < MAX_REPLY_TOKENS + 200
    assert "maximum context length" not in done.stderr


@pytest.mark.parametrize("role", ["system", "developer"])
def test_what_the_system_says_later_is_read_where_it_stands(box: str, role: str) -> None:
    """As in all APIs, system messages at the front are joined, and a later one becomes a reminder in the
    previous message."""
    first, second = {"role": "system", "content": "Be brief."}, {"role": role, "content": "Be kind."}
    hello = {"role": "user", "content": "Hello"}
    reminded = "Hello\n<system-reminder>\nBe kind.\n</system-reminder>"
    expected = {
        (reminded,): [hello, second],
        ("Be brief.\n\nBe kind.", "Hello"): [first, second, hello],
        ("Be brief.", reminded, "Hello"): [first, hello, second, hello],
    }
    for contents, messages in expected.items():
        tokens = httpx.post(f"{box}/tokenize", json={"messages": messages}).json()["tokens"]
        text = httpx.post(f"{box}/detokenize", json={"tokens": tokens}).json()["prompt"]
        read = tuple(block.partition("\n")[2] for block in text.split("<|im_end|>\n")[:-1])
        assert read == contents


def test_it_is_small() -> None:
    """All files of the model together are small, since they are part of the package."""
    assert sum(file.stat().st_size for file in Path(folder()).rglob("*") if file.is_file()) <= MAX_BYTES
