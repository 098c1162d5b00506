"""Names what a tool call does, to learn how long such calls take: ``bash/pytest/file``.

It does not know durations. It never raises: a model wrote the arguments, which may be anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from estimator.shell import dominant_command

MAX_PARTS = 3
MAX_PART_CHARS = 32
MAX_KEY_CHARS = MAX_PARTS * MAX_PART_CHARS + MAX_PARTS - 1
MAX_SHELL_CHARS = 8192
"""Maximum number of characters of a shell text that are examined."""
LEAST_MS = 10_000
"""A timeout of at least this number is in milliseconds: no shell gets that many seconds or that few
milliseconds."""
SHELL_TOOLS = frozenset(
    """bash sh zsh shell terminal bash_tool shell_tool execute_bash run_bash run_shell run_shell_command
    shell_command local_shell shell_exec run_terminal_cmd run_terminal_command run_in_terminal execute_command
    exec_command run_command execute_shell exec cmd""".split()  # noqa: SIM905 - a word list reads best as one
)
"""Names under which agents offer a shell; all are learned as ``bash``."""


@dataclass(frozen=True, slots=True)
class ToolKey:
    """A kind of tool call, from the general to the specific; the empty key stands for any call."""

    parts: tuple[str, ...] = ()
    limit_s: float | None = field(default=None, compare=False)
    """Seconds after which the call is stopped, by its own arguments; not part of the key."""

    @classmethod
    def parse(cls, text: str) -> ToolKey:
        """The inverse of ``str``; any other text becomes a valid key, too."""
        return cls(()) if text == "*" else key_of(text.split("/"))

    def chain(self) -> tuple[ToolKey, ...]:
        """This key and its fallbacks, the most specific first, ending with the empty key."""
        return tuple(ToolKey(self.parts[:depth]) for depth in range(len(self.parts), -1, -1))

    def __str__(self) -> str:
        return "/".join(self.parts) or "*"


def tool_key(name: str, arguments: str = "") -> ToolKey:
    """The key of a call, from the tool's name and its arguments (JSON text, or bare shell text)."""
    is_shell = name.strip().lower() in SHELL_TOOLS
    call = _shell_call(arguments, is_shell)
    if not is_shell and not call.text:
        return key_of(name.split("__"))  # mcp__server__tool
    tool = "bash" if is_shell else name
    if call.in_background:
        return key_of((tool, "background"))
    command = dominant_command(call.text)
    limits_s = [limit_s for limit_s in (command.limit_s, call.limit_s) if limit_s is not None]
    return ToolKey(key_of((tool, *command.what)).parts, min(limits_s, default=None))


def key_of(parts: Sequence[str]) -> ToolKey:
    """A key of bounded length without unusual characters."""
    cleaned = (_ODD_CHARACTERS.sub("_", part.strip().lower())[:MAX_PART_CHARS] for part in parts)
    return ToolKey(tuple(part for part in cleaned if part)[:MAX_PARTS])


_ODD_CHARACTERS = re.compile(r"[^a-z0-9._+:=@-]")


@dataclass(frozen=True, slots=True)
class _ShellCall:
    """What a shell will run and how; the text is empty if it runs nothing."""

    text: str = ""
    limit_s: float | None = None
    in_background: bool = False


class _ShellArguments(msgspec.Struct):
    """The names under which tools take a shell text and its options; all other arguments are skipped
    undecoded."""

    command: str | list[str] | None = None
    cmd: str | list[str] | None = None
    script: str | list[str] | None = None
    timeout: msgspec.Raw = msgspec.Raw(b"null")
    timeout_ms: msgspec.Raw = msgspec.Raw(b"null")
    run_in_background: msgspec.Raw = msgspec.Raw(b"null")


_arguments_decoder = msgspec.json.Decoder(_ShellArguments)


def _shell_call(arguments: str, is_shell: bool) -> _ShellCall:
    try:
        found = _arguments_decoder.decode(arguments)
    except msgspec.ValidationError:
        return _ShellCall()
    except (ValueError, RecursionError):
        is_bare_text = is_shell and not arguments.lstrip().startswith("{")
        return _ShellCall(arguments[:MAX_SHELL_CHARS] if is_bare_text else "")
    text = found.command or found.cmd or (found.script if is_shell else None) or ""
    if isinstance(text, list):
        text = " ".join(_quoted(word) for word in text)
    return _ShellCall(text[:MAX_SHELL_CHARS], _limit_s(found), bytes(found.run_in_background) == b"true")


def _limit_s(arguments: _ShellArguments) -> float | None:
    """The timeout in seconds. Some agents give milliseconds, some seconds: from ``LEAST_MS`` on it is read as
    milliseconds. A limit that is too long does no harm."""
    limit_ms = _positive(arguments.timeout_ms)
    if limit_ms is not None:
        return limit_ms / 1000
    limit = _positive(arguments.timeout)
    return limit / 1000 if limit is not None and limit >= LEAST_MS else limit


def _positive(raw: msgspec.Raw) -> float | None:
    try:
        value = float(bytes(raw))
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
