"""The ``tool_choice`` of a chat: a word, a function, or a choice among some tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.api.turn.conversation import NamedTool
from engine.api.turn.conversation import ToolChoice as ConversationToolChoice
from engine.errors import RequestError

ToolChoice = str | Mapping[str, Any] | None


def check_tool_choice(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError for an invalid choice, or one without tools."""
    if choice is None or choice == "none":
        return
    if isinstance(choice, Mapping):
        _check_object(choice, [tool["function"]["name"] for tool in tools])
    elif choice not in ("auto", "required"):
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required', a function or allowed_tools.", "tool_choice"
        )
    if not tools:
        asked = "a function" if isinstance(choice, Mapping) else repr(choice)
        raise RequestError(f"tool_choice {asked} needs tools.", "tool_choice")


def _check_object(choice: Mapping[str, Any], names: Sequence[str]) -> None:
    if choice.get("type") != "allowed_tools":
        if _name_of(choice) is None:
            raise RequestError("tool_choice must name a function.", "tool_choice.function.name")
        return
    allowed = choice.get("allowed_tools")
    where = "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping) or not isinstance(allowed.get("tools"), list):
        raise RequestError(f"{where}.tools must be a list of tools.", f"{where}.tools")
    if allowed.get("mode") not in ("auto", "required"):
        raise RequestError(f"{where}.mode must be 'auto' or 'required'.", f"{where}.mode")
    for index, tool in enumerate(allowed["tools"]):
        if _name_of(tool) not in names:
            at = f"{where}.tools[{index}].function.name"
            raise RequestError(f"{at} must be the name of one of the tools.", at)
    if not allowed["tools"] and allowed["mode"] == "required":
        raise RequestError(f"{where}.mode 'required' needs a tool that is allowed.", f"{where}.mode")


def allowed_names(choice: ToolChoice) -> frozenset[str] | None:
    """Names of the tools that a valid choice allows; None if it allows all."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    return frozenset(filter(None, map(_name_of, choice["allowed_tools"]["tools"])))


def read_tool_choice(choice: ToolChoice) -> ConversationToolChoice:
    """Converts a valid choice, independent of the API."""
    if isinstance(choice, Mapping):
        if choice.get("type") != "allowed_tools":
            return NamedTool(choice["function"]["name"])
        choice = choice["allowed_tools"]["mode"]
    match choice:
        case "none" | "required":
            return choice
    return "auto"


def _name_of(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
