"""The job that the client libraries run: two parallel lookups, a calculation with their results, then the
answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.clients.scripted_model import Script, tool_call

TEMPERATURES = {"Paris": 21, "Oslo": 7}
ANSWER = "Paris is warmer than Oslo: it is 14 degrees above it."
SCRIPT = Script(
    '"get_temperature"',
    (
        "I look both cities up.\n"
        + tool_call("get_temperature", city="Paris")
        + "\n"
        + tool_call("get_temperature", city="Oslo"),
        tool_call("subtract", a=21, b=7),
        ANSWER,
    ),
)
NUM_TURNS = len(SCRIPT.replies)
CALLS = ["get_temperature Paris", "get_temperature Oslo", "subtract 21 7"]
INSTRUCTIONS = (
    "You answer questions about the weather of today. Look every city up before you answer; never guess. "
    "Work out differences with the tool for it rather than in your head, and name both cities in the answer."
)
TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_temperature",
        "description": "The temperature in a city now, in degrees Celsius.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {
        "name": "subtract",
        "description": "What is left of a without b.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
]
_questions = count(1)


def question() -> str:
    """Returns a new question each time, so that no job begins with another's prompt."""
    return f"Question {next(_questions)}: is it warmer in Paris or in Oslo, and by how much?"


@dataclass(slots=True)
class Weather:
    """The tools, and a record of their calls."""

    calls: list[str] = field(default_factory=list)

    def get_temperature(self, city: str) -> str:
        """The temperature in a city now, in degrees Celsius."""
        self.calls.append(f"get_temperature {city}")
        return f"{TEMPERATURES[city]} degrees"

    def subtract(self, a: int, b: int) -> str:
        """What is left of a without b."""
        self.calls.append(f"subtract {a} {b}")
        return str(a - b)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The tool of this name, for a client whose user calls the tools."""
        if name == "subtract":
            return self.subtract(**arguments)
        assert name == "get_temperature"
        return self.get_temperature(**arguments)
