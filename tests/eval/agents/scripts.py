"""Replies of the scripted model in the tests of agents, and their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.scripted_model import Script, tool_call

FILES = {"notes/a.txt": "one\ntwo\nthree\n", "notes/b.txt": "four\n", "app.toml": "[server]\nport = 8123\n"}

SUM = Script(
    "How many lines",
    (
        "I look around.\n" + tool_call("list_files", path="notes"),
        tool_call("count_lines", path="notes/a.txt") + "\n" + tool_call("count_lines", path="notes/b.txt"),
        tool_call("python", expression="3 + 1"),
        "There are 4 lines.",
    ),
)
WRITE = Script(
    "Write the port",
    (
        tool_call("config_get", path="app.toml", key="server.port"),
        tool_call("write_file", path="port.txt", content="8123"),
        "It is written.",
    ),
)
ESCAPE = Script(
    "Read the secret",
    (
        tool_call("read_file", path="../secret.txt") + "\n" + tool_call("delete_all"),
        "I was not allowed to.",
    ),
)
ENDLESS = Script("Never stop", (tool_call("list_files", path="."),))
GARBLED = Script("Mumble", ('<tool_call>\n{"name": "list_files", "argu: [}\n</tool_call>', "Never mind."))
LONG = Script("Tell a tale", (" ".join(f"And then came number {n * 7919}." for n in range(100, 140)),))
SCRIPTS = (SUM, WRITE, ESCAPE, ENDLESS, GARBLED, LONG)


@dataclass(frozen=True, slots=True)
class ScriptedTask:
    """A task with a known answer, and the expected content of a file afterwards."""

    task_id: str
    kind: str
    prompt: str
    answer: str
    written: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=lambda: FILES)
    max_turns: int = 6

    def check(self, answer: str, root: Path) -> bool:
        return answer == self.answer and all(
            (root / name).read_text() == content for name, content in self.written.items()
        )


SUM_TASK = ScriptedTask("sum-1", "sum", "How many lines are in notes, all together?", "There are 4 lines.")
WRITE_TASK = ScriptedTask(
    "write-1", "write", "Write the port of app.toml to port.txt.", "It is written.", {"port.txt": "8123"}
)
WRONG_TASK = ScriptedTask("sum-2", "sum", "How many lines are in notes? In words.", "Four.")
ENDLESS_TASK = ScriptedTask("endless-1", "endless", "Never stop looking.", "Never", max_turns=3)
GARBLED_TASK = ScriptedTask("garbled-1", "garbled", "Mumble something.", "Clear words.")
