"""Converts the tools of a Messages request to the function tools that chat templates know.

A tool with an ``input_schema`` is the client's own. Of Anthropic's typed tools, those that the
client runs (bash, text editor, memory) get the schema of their name; those that Anthropic's
servers run (web search, code execution, ...) are left out; those that need vision are refused.
"""

from __future__ import annotations

import re
from typing import Any

from engine.api.prompt.left_out import LeftOut
from engine.errors import RequestError

Tool = dict[str, Any]

_RUN_BY_THE_SERVER = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_\w+?|advisor)_\d{8}|mcp_toolset"
)
_STRING = {"type": "string"}
_VIEW_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "First and last line to show, the first line being 1; -1 is the end of the file.",
}
_FILE_FIELDS = {
    "path": {"type": "string", "description": "Path of the file or directory."},
    "file_text": {"type": "string", "description": "Content of the file that `create` makes."},
    "old_str": {"type": "string", "description": "Text that `str_replace` replaces; it must occur once."},
    "new_str": {"type": "string", "description": "What `str_replace` puts in its place."},
    "insert_line": {"type": "integer", "description": "Line after which `insert` puts its text; 0 is first."},
    "insert_text": {"type": "string", "description": "Text that `insert` puts there."},
    "view_range": _VIEW_RANGE,
}


def _schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_BASH = _schema(
    {
        "command": {"type": "string", "description": "The command to run."},
        "restart": {"type": "boolean", "description": "True restarts the shell instead."},
    }
)
_EDITOR = _schema(
    {"command": _commands("view", "create", "str_replace", "insert"), **_FILE_FIELDS}, "command", "path"
)
_EDITOR_WITH_UNDO = _schema(
    {"command": _commands("view", "create", "str_replace", "insert", "undo_edit"), **_FILE_FIELDS},
    *("command", "path"),
)
_MEMORY = _schema(
    {
        "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
        **_FILE_FIELDS,
        "old_path": _STRING,
        "new_path": _STRING,
    },
    "command",
)
_RUN_BY_THE_CLIENT = {
    "bash_20241022": ("Run a command in a shell that keeps its state.", _BASH),
    "bash_20250124": ("Run a command in a shell that keeps its state.", _BASH),
    "text_editor_20241022": ("View, create and edit files.", _EDITOR_WITH_UNDO),
    "text_editor_20250124": ("View, create and edit files.", _EDITOR_WITH_UNDO),
    "text_editor_20250429": ("View, create and edit files.", _EDITOR),
    "text_editor_20250728": ("View, create and edit files.", _EDITOR),
    "memory_20250818": ("Keep notes in files under /memories across conversations.", _MEMORY),
}


def function_tools(tools: list[Tool] | None, left_out: LeftOut) -> list[Tool] | None:
    """The tools for the template; None without any. A RequestError names the invalid tool.

    Tools with ``defer_loading`` are offered at once, since this server has no tool search.
    """
    named = [_function_tool(tool, f"tools.{index}", left_out) for index, tool in enumerate(tools or [])]
    return [tool for tool in named if tool is not None] or None


def _function_tool(tool: Tool, where: str, left_out: LeftOut) -> Tool | None:
    kind = tool.get("type")
    if kind is not None and not isinstance(kind, str):
        raise RequestError(f"{where}.type must be a string.", f"{where}.type")
    if kind is None or kind == "custom":
        return _custom(tool, where)
    if kind in _RUN_BY_THE_CLIENT:
        description, schema = _RUN_BY_THE_CLIENT[kind]
        return _function(_name(tool, where), description, schema)
    if _RUN_BY_THE_SERVER.fullmatch(kind):
        left_out.add(where, f"{kind} is not run by this server")
        return None
    raise RequestError(
        f"{where}.type {kind[:50]!r} is not supported; it must be custom or one of "
        f"{', '.join(_RUN_BY_THE_CLIENT)} (web search and code execution are accepted and left out).",
        f"{where}.type",
    )


def _custom(tool: Tool, where: str) -> Tool:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError(f"{where}.input_schema must be a JSON schema object.", f"{where}.input_schema")
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}.description must be a string.", f"{where}.description")
    function = _function(_name(tool, where), description, schema)
    if tool.get("strict") is True:
        function["function"]["strict"] = True
    return function


def _name(tool: Tool, where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 128:
        raise RequestError(f"{where}.name must be a string of 1 to 128 characters.", f"{where}.name")
    return name


def _function(name: str, description: str | None, schema: dict[str, Any]) -> Tool:
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": schema}}
