"""The examples run unchanged, against a real server or a real model, and are short enough to read.

So do the commands and programs of README, quick start, clients and API, except for the port.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import httpx
import openai
import pytest

from eval.agent_model import NAME, folder
from eval.load.records import told
from eval.report.results import read_results
from tests.api.server import running_server
from tests.api.test_kv_stores import flags as kv_store
from tests.api.test_kv_stores import running_redis
from tests.api.test_kv_transfer import answers, running_pair, wait_until
from tests.processes.event_subscriber import free_ports

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(folder(), "--served-model-name", NAME) as server:
        yield f"{server.url}/v1"


def asked(command: list[str], typed: str = "", where: Path = ROOT, **environment: str) -> str:
    """Runs a command; returns its output."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        input=typed,
        cwd=where,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def run(name: str, *arguments: str) -> str:
    return asked([sys.executable, str(EXAMPLES / name), *arguments])


@contextmanager
def started(name: str, *arguments: str) -> Iterator[None]:
    """Runs an example that serves."""
    process = subprocess.Popen([sys.executable, str(EXAMPLES / name), *arguments])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def blocks(page: str, language: str, url: str) -> list[str]:
    """A page's blocks of a language, with the server and the model of these tests."""
    text = (ROOT / page).read_text().replace("http://localhost:8000", url.removesuffix("/v1"))
    text = text.replace("localhost:8000", url.removesuffix("/v1"))
    text = re.sub(r"\bMODEL\b", NAME, text)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def lines(page: str, url: str) -> list[str]:
    """The page's shell commands, without comments."""
    text = "".join(blocks(page, "sh", url)).replace("\\\n", " ")
    return [line for each in text.splitlines() if (line := re.sub(r"\s+#.*", "", each).strip())]


@pytest.mark.slow
def test_a_question_is_answered_and_has_a_receipt(url: str) -> None:
    """The openai library streams the answer; the receipt is in its usage."""
    said = run("openai_client.py", url, "What can you do?")
    assert "I am a small model." in said
    assert "'cached_tokens': 0" in said


@pytest.mark.slow
def test_an_agents_loop_finds_its_history_cached(url: str) -> None:
    """The agent reads both files and adds correctly, and all later turns hit their prefix."""
    said = run("agent_loop.py", url, "Add the plants of north.txt and south.txt.")
    assert "643" in said.splitlines()[-1]
    cached = [int(line.split()[1]) for line in said.splitlines() if line.startswith("cached")]
    assert cached[0] == 0
    assert all(cached[1:])


@pytest.mark.slow
def test_a_job_without_a_server() -> None:
    """The second turn's prompt hits the cache, up to its last block."""
    first, second = run("offline.py", str(folder())).splitlines()
    assert first.startswith("0 of ")
    assert int(second.split()[0]) > 100


@pytest.mark.slow
def test_a_policy_of_ones_own_decides() -> None:
    """The second, shorter prompt runs first."""
    assert run("custom_policy.py", str(folder())) == "first to run: A short one.\n"


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_a_page_asks_as_it_says(page: str, url: str) -> None:
    """The page's ``curl`` command is answered."""
    (command,) = (line for line in lines(page, url) if line.startswith("curl"))
    assert "I am a small model." in asked(["bash", "-c", f"{command} -sf"])


@pytest.mark.slow
def test_the_quick_starts_programs_run(url: str) -> None:
    """Both programs run: the client of a server, and the one that loads a model folder."""
    served, alone = blocks("docs/quickstart.md", "python", url)
    said = asked([sys.executable, "-c", served])
    assert "I am a small model." in said
    assert "'cached_tokens'" in said
    asked([sys.executable, "-c", alone.replace(f'"{NAME}"', f'"{folder()}"') + "print(output)"])


@pytest.mark.slow
def test_the_quick_start_chats_as_it_says(url: str, tmp_path: Path) -> None:
    """Each chat command works with the server of these tests."""
    talks = [line for line in lines("docs/quickstart.md", url) if line.startswith("continuum chat")]
    assert len(talks) == 4
    for line in talks:
        server = "" if "--base-url" in line else f"--base-url {url.removesuffix('/v1')} --model {NAME}"
        command = f"{sys.executable} -m continuum.cli.main {line.removeprefix('continuum ')} {server}"
        said = asked(["bash", "-c", command], typed="What can you do?", where=tmp_path)
        assert ("643" if '"' in line else "I am a small model.") in said


def test_every_command_of_the_quick_start_is_known(url: str) -> None:
    """The commands that the tests do not run set up the machine, or serve."""
    others = [
        line for line in lines("docs/quickstart.md", url) if not line.startswith(("curl", "continuum chat"))
    ]
    assert others == [
        "python3 -m venv .venv && . .venv/bin/activate",
        "pip install -c constraints.txt -e .",
        "continuum serve --port 8000",
        "continuum serve Qwen/Qwen3-0.6B",
    ]


ASK = {
    "openai.OpenAI": "it.chat.completions.create(model='box', messages=messages).choices[0].message.content",
    "agents.OpenAIChatCompletionsModel": (
        "agents.Runner.run_sync(agents.Agent(name='it', model=it), messages).final_output"
    ),
    "anthropic.Anthropic": (
        "it.messages.create(model='box', messages=messages, max_tokens=64).content[0].text"
    ),
    "langchain_openai.ChatOpenAI": "it.invoke(messages).content",
    "OpenAIChatModel": "pydantic_ai.Agent(it).run_sync(messages[0]['content']).output",
    "litellm.completion": "it.choices[0].message.content",
}
"""How to send a prompt with the object that a page's block makes."""
CLIENTS = """
import agents, anthropic, langchain_openai, litellm, openai, pydantic_ai
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

messages = [{"role": "user", "content": "What can you do?"}]
"""


@pytest.mark.slow
def test_clients_ask_as_their_blocks_say(url: str) -> None:
    """Each block's client gets an answer; Claude Code's and Codex's are below, others in other files."""
    made = blocks("docs/clients.md", "python", url)
    kinds = [block.partition("(")[0] for block in made]
    assert sorted(kinds) == sorted(ASK)
    program = [f"it = {block}print({ASK[kind]})" for kind, block in zip(kinds, made, strict=True)]
    said = asked([sys.executable, "-c", "\n".join([CLIENTS, *program])])
    assert said.count("I am a small model.") == len(ASK)
    numbers = {kind: len(blocks("docs/clients.md", kind, url)) for kind in ("sh", "toml")}
    assert numbers == {"sh": 2, "toml": 1}


@pytest.mark.slow
def test_claude_code_is_told_where_to_ask(url: str, tmp_path: Path) -> None:
    """A stand-in for ``claude`` with Anthropic's library needs only the environment of the page."""
    program = """\
        import anthropic, os
        asked = [{"role": "user", "content": "What can you do?"}]
        answer = anthropic.Anthropic().messages.create(
            model=os.environ["ANTHROPIC_MODEL"], messages=asked, max_tokens=64
        )
        print(answer.content[0].text)
    """
    stand_in = tmp_path / "claude"
    stand_in.write_text(f"#!{sys.executable}\n{dedent(program)}")
    stand_in.chmod(0o755)
    command, *others = lines("docs/clients.md", url)
    assert all(other.startswith("vllm bench serve --backend openai") for other in others)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert "I am a small model." in asked(["bash", "-c", command], PATH=path)


def test_codex_is_told_where_to_ask(url: str) -> None:
    """The page's settings name a provider whose Responses are answered."""
    (text,) = blocks("docs/clients.md", "toml", url)
    settings = tomllib.loads(text)
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["wire_api"] == "responses"
    body = {"model": settings["model"], "input": "What can you do?"}
    answer = httpx.post(f"{provider['base_url']}/responses", json=body, timeout=60).json()
    assert "I am a small model." in answer["output"][0]["content"][0]["text"]


def test_all_endpoints_are_in_the_table(url: str) -> None:
    """docs/api.md has exactly the methods and paths of the server's OpenAPI document."""
    described = httpx.get(f"{url.removesuffix('/v1')}/openapi.json").json()["paths"]
    served = {(method.upper(), path) for path, methods in described.items() for method in methods}
    page = (ROOT / "docs" / "api.md").read_text()
    listed = {
        (method, path)
        for methods, paths in re.findall(r"^\| ([A-Z, ]+) \| (`/[^|]*) \|", page, re.MULTILINE)
        for method in methods.split(", ")
        for path in re.findall(r"`([^`]+)`", paths)
    }
    assert listed == {each for each in served if each[0] != "HEAD"}


def test_signals_are_sent_as_the_page_says(url: str) -> None:
    """Each command of docs/api.md is answered for an existing job."""
    body = {"messages": [{"role": "user", "content": "Add the plants."}], "max_tokens": 4, "job_id": "JOB"}
    receipt = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()["usage"]["receipt"]
    page = (ROOT / "docs" / "api.md").read_text()
    assert [field for field in receipt if f"`{field}`" not in page] == []
    for command in lines("docs/api.md", url):
        assert '"id":"JOB"' in asked(["bash", "-c", f"{command} -sf"])


@pytest.mark.slow
def test_the_policies_of_the_page_decide(tmp_path: Path) -> None:
    """Both policies of docs/writing-a-policy.md run in a simulator: one orders, the other keeps what jobs
    reuse."""
    page = (ROOT / "docs" / "writing-a-policy.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    policies = [block for block in blocks if "class " in block]
    (tmp_path / "my_policies.py").write_text("".join(policies))
    (command,) = re.findall(r"^continuum simulate (.*)$", page, re.MULTILINE)
    flags = f"{command},my_policies:KeepTenSeconds --kv-tokens 20000 --json out.json".split()
    simulated = [sys.executable, "-m", "continuum.cli.main", "simulate", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        simulated, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    runs = {run.name.rpartition(":")[2]: run for run in read_results(tmp_path / "out.json").runs}
    assert runs["ShortestPromptFirst"].job_completion_s != runs["fcfs"].job_completion_s
    recomputed = {name: told(run.recomputed_tokens) for name, run in runs.items()}
    assert recomputed["KeepTenSeconds"] < recomputed["fcfs"]


@pytest.mark.slow
def test_one_server_computes_prompts_and_another_goes_on(model_folder: Path, tmp_path: Path) -> None:
    """One address serves both: long prompts of chats and Responses use KV from the first server; short
    prompts and other routes use only the second."""
    (port,) = free_ports(1)
    text = "The page says that the plants in the north are dry, and that the east has rain. " * 4
    with running_pair(model_folder, tmp_path) as pair:
        places = (pair.first.url, pair.second.url, str(port), "250")
        with started("prefill_decode_proxy.py", *places):
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            stream = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": text}],
                max_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
            usage = list(stream)[-1].usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert (usage.prompt_tokens_details.cached_tokens or 0) > 0
            whole = client.responses.create(model="tiny", input="Again: " + text, max_output_tokens=6)
            assert whole.usage is not None
            assert whole.usage.input_tokens_details.cached_tokens > 0
            short = client.completions.create(model="tiny", prompt="a short one", max_tokens=3)
            assert short.choices[0].finish_reason == "length"
            assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.slow
def test_a_store_of_ones_own_keeps_kv(tmp_path: Path) -> None:
    """What one server has computed, the next one loads, started in the example's folder as it says."""
    (port,) = free_ports(1)
    with running_redis(port):
        given = kv_store("RedisStore", "redis_store", url=f"redis://127.0.0.1:{port}")
        cached = []
        for _ in range(2):
            with running_server(folder(), *given, where=EXAMPLES) as server:
                client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
                answer = client.completions.create(model="tiny", prompt="a long prompt " * 40, max_tokens=3)
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
                assert server.interrupt() == 0
    assert cached[0] == 0
    assert cached[1] > 64


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_run_here(path: Path) -> None:
    """An example has less than 60 lines and a test above."""
    text = path.read_text()
    assert len(text.splitlines()) < 60
    tests = Path(__file__).read_text()
    used = (("run(", path.name), ("started(", path.name), ('kv_store("RedisStore", ', path.stem))
    assert any(f'{how}"{name}"' in tests for how, name in used)
