"""One server with a scripted model for all tests of agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.server import running_server
from tests.clients.scripted_model import make_scripted_model
from tests.eval.agents.scripts import SCRIPTS


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that gives the scripts' replies."""
    return make_scripted_model(tmp_path_factory.mktemp("agents") / "model", SCRIPTS)


@pytest.fixture(scope="session")
def agent_server(agent_model: Path) -> Iterator[str]:
    """The address of a server with that model."""
    with running_server(agent_model, "--num-gpu-blocks-override", "2000") as server:
        yield server.url
