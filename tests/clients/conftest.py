"""One server with a scripted model for all clients, and no connections to other machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Documented settings for offline work; the libraries read them on import.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

from tests.api.server import running_server
from tests.clients import test_claude_code, test_codex, test_mini_swe_agent, weather
from tests.clients.scripted_model import make_scripted_model
from tests.clients.wiretap import Wiretap, tapped

SCRIPTS = (
    weather.SCRIPT,
    test_mini_swe_agent.TOOL_SCRIPT,
    test_mini_swe_agent.TEXT_SCRIPT,
    test_claude_code.SCRIPT,
    test_claude_code.SUBAGENT_SCRIPT,
    test_claude_code.TITLE_SCRIPT,
    test_codex.SCRIPT,
)
_LOCAL_HOSTS = (None, "", "127.0.0.1", "::1", "localhost")
_guard = {"on": False}


def _keep_inside(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook that raises if another machine is looked up or connected to."""
    if not _guard["on"]:
        return
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in _LOCAL_HOSTS:
        raise PermissionError(f"a client wanted to reach {host}")


sys.addaudithook(_keep_inside)


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    """Prevents a client from reaching another machine."""
    _guard["on"] = True
    yield
    _guard["on"] = False


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted_model(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS)


@pytest.fixture(scope="session")
def tap(scripted_model: Path) -> Iterator[Wiretap]:
    flags = ("--num-gpu-blocks-override", "4000")
    with running_server(scripted_model, *flags) as server, tapped(server.url) as wiretap:
        yield wiretap


@pytest.fixture
def wire(tap: Wiretap) -> Wiretap:
    """A proxy to the server; it records this test's exchanges."""
    tap.clear()
    return tap
