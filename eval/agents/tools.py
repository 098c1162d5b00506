"""The tools of a small coding agent, executed for real in a sandbox. Knows nothing of models.

Errors go to the model as text that begins with ``error:``; nothing is raised.
"""

from __future__ import annotations

import configparser
import json
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eval.agents.expression import evaluate
from eval.agents.sandbox import Refused, Sandbox

MAX_FILE_BYTES = 1 << 20
MAX_RESULT_CHARACTERS = 4000
MAX_HITS = 20
MAX_ENTRIES = 100
TIME_LIMIT_S = 5.0
"""Time limit of one call."""

Tool = Callable[..., str]
"""A function whose parameters are its schema's, all strings; may raise ``Refused`` or file system errors."""


class Toolbox:
    """Runs the calls of one agent in the folder ``root``."""

    def __init__(self, root: Path, evaluate: Callable[[str], str] = evaluate) -> None:
        self._sandbox = Sandbox(root)
        self._evaluate = evaluate
        self._tools: dict[str, Tool] = {
            "list_files": self._list_files,
            "read_file": self._read_file,
            "search": self._search,
            "count_lines": self._count_lines,
            "python": self._python,
            "config_get": self._config_get,
            "write_file": self._write_file,
        }

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as an OpenAI client sends them."""
        return SCHEMAS

    def run(self, name: str, arguments_json: str) -> str:
        """Runs one call; returns its result, or why there is none, as text for the model."""
        try:
            tool = self._tools.get(name)
            if tool is None:
                raise Refused(f"there is no tool {name}")
            result = tool(**_arguments(name, arguments_json))
        except Refused as refused:
            return f"error: {refused}"
        except (OSError, UnicodeDecodeError) as error:
            return f"error: {_reason(error)}"
        return _shortened(result)

    # ---- the tools ----

    def _list_files(self, path: str = ".") -> str:
        folder = self._sandbox.path(path)
        if not folder.exists():
            raise Refused(f"no such folder: {path}")
        if not folder.is_dir():
            raise Refused(f"{path} is a file")
        entries = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in folder.iterdir())
        if len(entries) > MAX_ENTRIES:
            entries = [*entries[:MAX_ENTRIES], f"... and {len(entries) - MAX_ENTRIES} more"]
        return "\n".join(entries) or "(empty)"

    def _read_file(self, path: str) -> str:
        return self._text(path).removesuffix("\n") or "(empty)"

    def _search(self, text: str, path: str = ".") -> str:
        if not text:
            raise Refused("text must not be empty")
        hits = list(self._hits(text, self._existing(path)))
        more = [f"... only the first {MAX_HITS} are shown"] if len(hits) > MAX_HITS else []
        return "\n".join([*hits[:MAX_HITS], *more]) or "no match"

    def _count_lines(self, path: str) -> str:
        return str(len(self._text(path).splitlines()))

    def _python(self, expression: str) -> str:
        return self._evaluate(expression)

    def _config_get(self, path: str, key: str) -> str:
        value = _config(path, self._text(path))
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                raise Refused(f"no key {key} in {path}")
            value = value[part]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _write_file(self, path: str, content: str) -> str:
        if len(content) > MAX_FILE_BYTES:
            raise Refused(f"content is longer than {MAX_FILE_BYTES} characters")
        file = self._sandbox.path(path)
        if file.is_dir():
            raise Refused(f"{path} is a folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return f"wrote {len(content)} characters"

    # ---- files ----

    def _existing(self, path: str) -> Path:
        found = self._sandbox.path(path)
        if not found.exists():
            raise Refused(f"no such file: {path}")
        return found

    def _text(self, path: str) -> str:
        file = self._existing(path)
        if not file.is_file():
            raise Refused(f"{path} is a folder")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise Refused(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB")
        return file.read_text()

    def _hits(self, text: str, where: Path) -> Iterator[str]:
        """Yields lines with the text, one more than are shown; stops at the time limit."""
        ends_s = time.monotonic() + TIME_LIMIT_S
        num_hits = 0
        for file in [where] if where.is_file() else sorted(where.rglob("*")):
            for number, line in _lines(file, self._sandbox):
                if text in line:
                    num_hits += 1
                    yield f"{self._sandbox.name(file)}:{number}: {line}"
                if num_hits > MAX_HITS or time.monotonic() > ends_s:
                    return


def _lines(file: Path, sandbox: Sandbox) -> Iterator[tuple[int, str]]:
    """Yields numbered lines of a searchable file; none of any other."""
    try:
        inside = sandbox.path(sandbox.name(file))
        if inside.is_file() and inside.stat().st_size <= MAX_FILE_BYTES:
            yield from enumerate(inside.read_text().splitlines(), start=1)
    except (Refused, OSError, UnicodeDecodeError):
        return


def _arguments(name: str, arguments_json: str) -> dict[str, str]:
    """Returns the arguments of a call, checked against the tool's schema."""
    try:
        given = json.loads(arguments_json or "{}")
    except ValueError as error:
        raise Refused(f"the arguments of {name} are not JSON") from error
    schema = next(s["function"]["parameters"] for s in SCHEMAS if s["function"]["name"] == name)
    if not isinstance(given, dict):
        raise Refused(f"the arguments of {name} are not a JSON object")
    for key, value in given.items():
        if key not in schema["properties"]:
            raise Refused(f"{name} has no argument {key}")
        if not isinstance(value, str):
            raise Refused(f"argument {key} of {name} must be a string")
    missing = [key for key in schema["required"] if key not in given]
    if missing:
        raise Refused(f"{name} needs the argument {missing[0]}")
    return given


def _config(path: str, text: str) -> Any:
    """Parses a configuration file by its suffix."""
    try:
        if path.endswith(".json"):
            return json.loads(text)
        if path.endswith(".toml"):
            return tomllib.loads(text)
        if path.endswith((".ini", ".cfg")):
            parser = configparser.ConfigParser(interpolation=None)
            parser.read_string(text)
            return {section: dict(parser[section]) for section in parser.sections()}
    except (ValueError, RecursionError, configparser.Error) as error:
        raise Refused(f"{path} cannot be read as a configuration") from error
    raise Refused(f"{path} is not a .toml, .json, .ini or .cfg file")


def _reason(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "the file is not text"
    return (error.strerror or type(error).__name__).lower()


def _shortened(result: str) -> str:
    if len(result) <= MAX_RESULT_CHARACTERS:
        return result
    return f"{result[:MAX_RESULT_CHARACTERS]}\n... {len(result) - MAX_RESULT_CHARACTERS} more characters"


def _schema(
    name: str, told: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": told,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"} for key in required + optional},
                "required": list(required),
            },
        },
    }


SCHEMAS: list[dict[str, Any]] = [
    _schema("list_files", "List a folder.", (), ("path",)),
    _schema("read_file", "Read a file.", ("path",)),
    _schema("search", "Find the lines with a text.", ("text",), ("path",)),
    _schema("count_lines", "Count the lines of a file.", ("path",)),
    _schema("python", "Compute a Python expression.", ("expression",)),
    _schema("config_get", "Look up a key in a config file.", ("path", "key")),
    _schema("write_file", "Write a file.", ("path", "content")),
]
