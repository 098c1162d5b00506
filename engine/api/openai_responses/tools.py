"""The tools of a request: how the model is shown each tool, and which item a call becomes.

The model knows only functions. A custom tool is shown as a function with one string, a tool in a namespace
with a joined name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.api.openai_responses.custom_input import PARAMETER
from engine.api.turn.conversation import FreeInput, NamedTool, ToolChoice
from engine.errors import RequestError

Tool = dict[str, Any]
"""A tool keeps all fields of the client's JSON, since it is returned, and schemas may contain anything."""

NAME_SEPARATOR = "__"
"""Joins a namespace and a name; valid in every format in which models write calls."""
MAX_NAME_CHARS = 256

NOT_RUN_HERE = frozenset(
    (
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "computer",
        "computer_use",
        "computer_use_preview",
        "tool_search",
        "programmatic_tool_calling",
        "local_shell",
        "shell",
        "apply_patch",
    )
)
"""Tools that OpenAI's servers run, or that only its models can call. They are left out with a warning, since
clients send them by default."""


@dataclass(frozen=True, slots=True)
class ToolName:
    """The client's name of a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def shown(self) -> str:
        """The name that the model sees and calls."""
        return self.name if self.namespace is None else f"{self.namespace}{NAME_SEPARATOR}{self.name}"


@dataclass(slots=True)
class Tools:
    """The tools of one request."""

    functions: list[Tool] = field(default_factory=list)
    """The tools that the model is shown, in chat format."""
    names: dict[str, ToolName] = field(default_factory=dict)
    """The client's names, by the shown name."""
    warnings: list[str] = field(default_factory=list)
    _free_inputs: dict[str, FreeInput] = field(default_factory=dict)
    """Custom tools whose text follows a Lark grammar, by the shown name."""
    _patterns: dict[str, FreeInput] = field(default_factory=dict)
    """Custom tools whose text follows a regular expression, which a JSON schema can enforce, too."""

    def find(self, shown: str) -> ToolName:
        """Returns the tool of a call; an unknown name is treated as a function's."""
        return self.names.get(shown) or ToolName(shown)

    def add(self, tools: list[Tool], where: str) -> None:
        """Adds tools; RequestError names the invalid one as ``where[i]``."""
        for index, tool in enumerate(tools):
            self._add_one(tool, f"{where}[{index}]")

    def _add_one(self, tool: Tool, where: str) -> None:
        kind = tool.get("type")
        if kind == "namespace":
            self._add_namespace(tool, where)
        elif kind in ("function", "custom"):
            self._add_function(tool, where, None, "")
        elif isinstance(kind, str) and kind in NOT_RUN_HERE:
            self.warnings.append(
                f"{where}: tools of type {kind!r} are not run by this server; it is left out."
            )
        else:
            raise RequestError(
                f"{where}.type must be 'function', 'custom' or 'namespace', or one of OpenAI's own tools.",
                f"{where}.type",
            )

    def _add_namespace(self, tool: Tool, where: str) -> None:
        namespace = _name_of(tool, where)
        nested = tool.get("tools")
        if not isinstance(nested, list):
            raise RequestError(f"{where}.tools must be a list.", f"{where}.tools")
        about = _description_of(tool, where)
        for index, inner in enumerate(nested):
            inside = f"{where}.tools[{index}]"
            if not isinstance(inner, dict) or inner.get("type") not in ("function", "custom"):
                raise RequestError(f"{inside}.type must be 'function' or 'custom'.", f"{inside}.type")
            # Only the namespace's first tool gets its description.
            self._add_function(inner, inside, namespace, about if index == 0 else "")

    def _add_function(self, tool: Tool, where: str, namespace: str | None, about: str) -> None:
        is_custom = tool["type"] == "custom"
        name = ToolName(_name_of(tool, where), namespace, is_custom)
        if self.names.setdefault(name.shown, name) != name:
            raise RequestError(f"{where}: another tool already has the name {name.shown!r}.", f"{where}.name")
        description = "\n\n".join(filter(None, (about, _description_of(tool, where))))
        function: Tool = {"name": name.shown}
        if is_custom:
            format_note = _format_note(tool.get("format"), f"{where}.format")
            function["description"] = "\n\n".join(filter(None, (description, format_note)))
            function["parameters"] = _CUSTOM_PARAMETERS
            self._add_format(tool.get("format"), f"{where}.format", function)
        else:
            function |= {"description": description} if description else {}
            function["parameters"] = _parameters_of(tool, where)
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        self.functions.append({"type": "function", "function": function})

    def _add_format(self, form: Any, where: str, function: Tool) -> None:
        """Adds the grammar of a custom tool's text, which has been validated."""
        if form is None or form["type"] == "text":
            return
        if form["syntax"] == "lark":
            self._free_inputs[function["name"]] = FreeInput(PARAMETER, form["definition"], where)
            return
        pattern = form["definition"].removeprefix("^")
        pattern = pattern if pattern.endswith("\\$") else pattern.removesuffix("$")
        self._patterns[function["name"]] = FreeInput(PARAMETER, _in_lark(pattern), where)
        text = {**_CUSTOM_PARAMETERS["properties"][PARAMETER], "pattern": f"^(?:{pattern})$"}
        function["parameters"] = {**_CUSTOM_PARAMETERS, "properties": {PARAMETER: text}}
        function["strict"] = True

    def _named(self, shown: str) -> NamedTool:
        return NamedTool(shown, self._free_inputs.get(shown))

    @property
    def free_inputs(self) -> dict[str, FreeInput]:
        """Custom tools whose text follows a grammar, by the shown name."""
        return self._free_inputs | self._patterns

    def _tell_of_formats(self, mode: ToolChoice, enforces_texts: bool) -> None:
        """Refuses Lark grammars, or warns of them, where this mode cannot enforce them."""
        shown = {tool["function"]["name"] for tool in self.functions}
        grammars = {name: free.asked_in for name, free in self._free_inputs.items() if name in shown}
        if mode == "required" and grammars:
            where = next(iter(grammars.values()))
            raise RequestError(
                f"{where}: a Lark grammar can be enforced only if tool_choice names the tool, not if "
                "tool_choice is 'required'.",
                where,
            )
        if mode == "auto" and not enforces_texts:
            self.warnings += [
                f"{where}: the model sees it, but it is enforced only if tool_choice names the tool."
                for where in grammars.values()
            ]

    def choose(self, choice: str | Mapping[str, Any] | None, *, enforces_texts: bool = False) -> ToolChoice:
        """Reads the ``tool_choice`` of the request; ``allowed_tools`` removes the others from ``functions``.

        ``enforces_texts``: whether Lark grammars are enforced when the model may choose.
        """
        chosen = self._choose(choice)
        self._tell_of_formats(chosen, enforces_texts)
        return chosen

    def _choose(self, choice: str | Mapping[str, Any] | None) -> ToolChoice:
        if choice is None:
            return "auto"
        if isinstance(choice, str):
            return self._mode(choice, "tool_choice", ("auto", "none", "required"))
        match choice.get("type"):
            case "function" | "custom":
                return self._named(self._chosen(choice, "tool_choice"))
            case "allowed_tools":
                return self._choose_among(choice)
        raise RequestError(
            "tool_choice.type must be 'function', 'custom' or 'allowed_tools'; other tools are not run here.",
            "tool_choice",
        )

    def _mode(self, mode: object, where: str, known: tuple[str, ...]) -> ToolChoice:
        if mode not in known:
            raise RequestError(f"{where} must be one of {', '.join(known)}, or an object.", where)
        if mode == "required":
            if not self.functions:
                raise RequestError(f"{where} 'required' needs tools.", where)
            return "required"
        return "none" if mode == "none" else "auto"

    def _choose_among(self, choice: Mapping[str, Any]) -> ToolChoice:
        allowed = choice.get("tools")
        if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
            raise RequestError("tool_choice.tools must be a list of tools.", "tool_choice.tools")
        shown = {
            self._chosen(tool, f"tool_choice.tools[{index}]")
            for index, tool in enumerate(allowed)
            if tool.get("type") in ("function", "custom")
        }
        self.functions = [tool for tool in self.functions if tool["function"]["name"] in shown]
        return self._mode(choice.get("mode"), "tool_choice.mode", ("auto", "required"))

    def _chosen(self, choice: Mapping[str, Any], where: str) -> str:
        """The shown name of the tool that a choice names."""
        name = choice.get("name")
        namespace = choice.get("namespace")
        for tool in self.names.values():
            if tool.name == name and (namespace is None or tool.namespace == namespace):
                return tool.shown
        raise RequestError(f"{where}.name must name one of tools.", f"{where}.name")


_CUSTOM_PARAMETERS: Tool = {
    "type": "object",
    "properties": {PARAMETER: {"type": "string", "description": "The whole input of the tool, as text."}},
    "required": [PARAMETER],
    "additionalProperties": False,
}


def _in_lark(pattern: str) -> str:
    """Converts a regular expression to a grammar."""
    escapes = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    text = re.sub(r"\\.|[/\n\r]", lambda found: escapes.get(found.group(), found.group()), pattern)
    return f"start: TEXT\nTEXT: /{text}/\n"


def _name_of(tool: Tool, where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise RequestError(
            f"{where} needs a name, a string of 1 to {MAX_NAME_CHARS} characters, in addition to type.",
            f"{where}.name",
        )
    return name


def _description_of(tool: Tool, where: str) -> str:
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}.description must be a string.", f"{where}.description")
    return description or ""


def _parameters_of(tool: Tool, where: str) -> Tool:
    parameters = tool.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestError(f"{where}.parameters must be a JSON schema.", f"{where}.parameters")
    return parameters


def _format_note(form: object, where: str) -> str:
    """A note for the model on the format of a custom tool's input."""
    if form is None:
        return ""
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(form, dict) or kind not in ("text", "grammar"):
        raise RequestError(f"{where}.type must be 'text' or 'grammar'.", f"{where}.type")
    if kind == "text":
        return ""
    syntax = form.get("syntax")
    definition = form.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise RequestError(f"{where} must have a definition, and 'lark' or 'regex' as syntax.", where)
    what = "Lark grammar" if syntax == "lark" else "regular expression"
    return f"The input must match this {what}:\n{definition}"
