"""A rolling upgrade: each of two servers behind a route is replaced while agents are at work."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.api.test_chat import token_ids
from tests.api.test_jobs_endpoints import Body, receipt
from tests.eval.route.test_route import free_port, running_route
from tests.worker.conftest import VARIANTS

NUM_AGENTS = 20
TURNS_BESIDE_AN_UPGRADE = 4
NUM_TURNS = 1 + 2 * TURNS_BESIDE_AN_UPGRADE
CACHES = {"full": "qwen3", "windows": "gemma3", "latents": "deepseek-v3", "states": "qwen3-next"}
"""A family for each kind of cache."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Agent:
    """A job whose tool takes no time: its next turn comes as soon as the last one has ended."""

    def __init__(self, number: int, reply: list[int]) -> None:
        """``reply``: the tokens of its model's answers, which its template renders again as they are."""
        self._reply = reply
        self.name = f"agent-{number}"
        self.messages: list[Body] = [{"role": "user", "content": f"{number}: " + "find all errors " * 20}]
        self.receipts: list[Body] = []

    def work(self, url: str, num_turns: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            for _ in range(num_turns):
                self._turn(http)

    def _turn(self, http: httpx.Client) -> None:
        body: Body = {
            "messages": self.messages,
            "temperature": 0,
            "job_id": self.name,
            "prompt_cache_options": {"ttl": "30m"},
        }
        if len(self.receipts) < NUM_TURNS - 1:
            body["replay_token_ids"] = self._reply
        else:  # what does the model say by itself?
            body["max_tokens"] = 12
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["message"]["content"]
        self.receipts.append(receipt(answer.json()))
        number = len(self.receipts)
        more = {"role": "user", "content": f"result {number} of the call " * 3}
        self.messages += [{"role": "assistant", "content": said}, more]


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=() if kind == "states" else pytest.mark.long) for kind in CACHES],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "m"
    return make_model_folder(folder, **{**VARIANTS[CACHES[request.param]], "max_position_embeddings": 4096})


@contextmanager
def serving(model: Path, shared: Path, port: int) -> Iterator[Server]:
    flags = ("--num-gpu-blocks-override", "2400", "--kv-handover-path", str(shared), "--port", str(port))
    with running_server(model, *flags) as server:
        yield server


def test_no_agent_notices(model: Path, tmp_path: Path) -> None:
    """No error, no token recomputed, no turn lost, and each agent says what it says without an upgrade."""
    with running_server(model, "--num-gpu-blocks-override", "2400") as server:
        with httpx.Client(base_url=server.url) as http:
            reply = token_ids(http, "I look at the next file<|im_end|>")
        undisturbed = [Agent(number, reply) for number in range(NUM_AGENTS)]
        at_work(undisturbed, server.url, NUM_TURNS)
    agents = [Agent(number, reply) for number in range(NUM_AGENTS)]
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(model, tmp_path, port)) for port in ports]
        route = stack.enter_context(running_route(*(server.url for server in servers)))
        at_work(agents, route, 1)
        for server, port in zip(servers, ports, strict=True):
            with ThreadPoolExecutor(1) as beside:
                work = beside.submit(at_work, agents, route, TURNS_BESIDE_AN_UPGRADE)
                server.process.terminate()
                assert server.wait(60) == 0
                stack.enter_context(serving(model, tmp_path, port))
                work.result()
    for agent, expected in zip(agents, undisturbed, strict=True):
        assert agent.messages == expected.messages
        assert [told["turn"] for told in agent.receipts] == [*range(1, NUM_TURNS + 1)]
        assert sum(told["recomputed_tokens"] for told in agent.receipts) == 0
    moved = [told for agent in agents for told in agent.receipts if told.get("previous_pin")]
    assert len(moved) == NUM_AGENTS * (NUM_TURNS - 1)


def at_work(agents: list[Agent], url: str, num_turns: int) -> None:
    with ThreadPoolExecutor(len(agents)) as threads:
        for done in [threads.submit(agent.work, url, num_turns) for agent in agents]:
            done.result()
