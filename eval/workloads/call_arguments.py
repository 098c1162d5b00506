"""What a call's arguments, as a model wrote them, say of the program that it runs."""

from __future__ import annotations

import msgspec

from eval.errors import UNREADABLE
from eval.workloads.job import ToolRun


class _OfShell(msgspec.Struct):
    command: str | None = None
    cmd: str | None = None


_decoder = msgspec.json.Decoder(_OfShell)


def tool_run(name: str, arguments: str) -> ToolRun:
    """A call with its command, if its arguments have one; what else they hold says nothing of its time."""
    try:
        shell = _decoder.decode(arguments)
    except UNREADABLE:
        return ToolRun(name)
    return ToolRun(name, shell.command or shell.cmd)
