"""mini-swe-agent repairs a file in a temporary folder: with its bash tool, and with fenced commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.scripted_model import Script, tool_call
from tests.clients.weather import question
from tests.clients.wiretap import Wiretap

LOOK = "cat greeting.txt"
MEND = "sed -i 's/Helo/Hello/' greeting.txt && cat greeting.txt"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMMANDS = {
    LOOK: "THOUGHT: I read the file first.",
    MEND: "THOUGHT: I mend the typing error.",
    SUBMIT: "THOUGHT: It is done.",
}
TOOL_SCRIPT = Script(
    '"Execute a bash command"',
    tuple(f"{thought}\n{tool_call('bash', command=command)}" for command, thought in COMMANDS.items()),
)
TEXT_SCRIPT = Script(
    "```mswea_bash_command",
    tuple(f"{thought}\n\n```mswea_bash_command\n{command}\n```" for command, thought in COMMANDS.items()),
)


@pytest.fixture(autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the agent a folder, since it creates and reads one on import."""
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path_factory.mktemp("mini-swe-agent")))
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")


@pytest.mark.parametrize(
    ("kind", "config"),
    [("litellm", "mini.yaml"), ("litellm_textbased", "mini_textbased.yaml")],
    ids=["bash-tool", "fenced"],
)
def test_a_job_of_commands(wire: Wiretap, tmp_path: Path, kind: str, config: str) -> None:
    """The agent's own loop and prompts run: the commands are executed, and it submits."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models import get_model_class

    (tmp_path / "greeting.txt").write_text("Helo world\n")
    settings = get_config_from_spec(config)
    model = get_model_class("", kind)(
        model_name="hosted_vllm/tiny",
        cost_tracking="ignore_errors",
        **settings["model"] | {"model_kwargs": {"api_base": f"{wire.url}/v1", "api_key": "none"}},
    )
    environment = LocalEnvironment(cwd=str(tmp_path), **settings["environment"])
    agent = DefaultAgent(model, environment, **agent_settings(settings["agent"]))
    ended = agent.run(f"{question()} And greeting.txt has a typing error.")
    assert ended["exit_status"] == "Submitted"
    assert (tmp_path / "greeting.txt").read_text() == "Hello world\n"
    assert agent.n_calls == len(COMMANDS)
    wire.check_one_kept_job(len(COMMANDS), streamed=False)


def agent_settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in ("system_template", "instance_template", "step_limit")}
