"""Names what a tool call does, for learning how long such calls take: ``bash/pytest/file``.

Knows nothing of durations. Never raises: the arguments were written by a model and may be anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from estimator.shell import dominant_command

MAX_PARTS = 3
MAX_PART_CHARS = 32
MAX_KEY_CHARS = MAX_PARTS * MAX_PART_CHARS + MAX_PARTS - 1
MAX_SHELL_CHARS = 8192
"""How much of a shell text is looked at."""
SHELL_TOOLS = frozenset(
    """bash sh zsh shell terminal bash_tool shell_tool execute_bash run_bash run_shell run_shell_command
    shell_command local_shell shell_exec run_terminal_cmd run_terminal_command run_in_terminal execute_command
    exec_command run_command execute_shell exec cmd""".split()  # noqa: SIM905 - a word list reads best as one
)
"""Names under which agents offer a shell; all are learnt as ``bash``."""


@dataclass(frozen=True, slots=True)
class ToolKey:
    """A kind of tool call, from the general to the specific; the empty key is any call at all."""

    parts: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ToolKey:
        """The inverse of ``str``; also makes any other text a legal key."""
        return cls(()) if text == "*" else key_of(text.split("/"))

    def chain(self) -> tuple[ToolKey, ...]:
        """This key and what to fall back on, the most specific first, ending with the empty key."""
        return tuple(ToolKey(self.parts[:depth]) for depth in range(len(self.parts), -1, -1))

    def __str__(self) -> str:
        return "/".join(self.parts) or "*"


def tool_key(name: str, arguments: str = "") -> ToolKey:
    """The key of a call, from the tool's name and its arguments (JSON text, or bare shell text)."""
    is_shell = name.strip().lower() in SHELL_TOOLS
    shell_text = _shell_text(arguments, is_shell)
    if is_shell:
        return key_of(("bash", *dominant_command(shell_text)))
    if shell_text:
        return key_of((name, *dominant_command(shell_text)))
    return key_of(name.split("__"))  # mcp__server__tool


def key_of(parts: Sequence[str]) -> ToolKey:
    """A key of bounded length without odd characters."""
    cleaned = (_ODD_CHARACTERS.sub("_", part.strip().lower())[:MAX_PART_CHARS] for part in parts)
    return ToolKey(tuple(part for part in cleaned if part)[:MAX_PARTS])


_ODD_CHARACTERS = re.compile(r"[^a-z0-9._+:=@-]")


class _ShellArguments(msgspec.Struct):
    """The names under which tools take a shell text; all other arguments are skipped undecoded."""

    command: str | list[str] | None = None
    cmd: str | list[str] | None = None
    script: str | list[str] | None = None


_arguments_decoder = msgspec.json.Decoder(_ShellArguments)


def _shell_text(arguments: str, is_shell: bool) -> str:
    """What a shell will run; empty if nothing."""
    try:
        found = _arguments_decoder.decode(arguments)
    except msgspec.ValidationError:
        return ""
    except (ValueError, RecursionError):
        is_bare_text = is_shell and not arguments.lstrip().startswith("{")
        return arguments[:MAX_SHELL_CHARS] if is_bare_text else ""
    text = found.command or found.cmd or (found.script if is_shell else None) or ""
    if isinstance(text, list):
        text = " ".join(_quoted(word) for word in text)
    return text[:MAX_SHELL_CHARS]


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
