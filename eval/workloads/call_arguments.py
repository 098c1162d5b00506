"""Extracts from a call's arguments, as a model wrote them, the program that it runs."""

from __future__ import annotations

import msgspec

from eval.errors import UNREADABLE
from eval.workloads.job import ToolRun


class _OfShell(msgspec.Struct):
    command: str | None = None
    cmd: str | None = None


_decoder = msgspec.json.Decoder(_OfShell)


def tool_run(name: str, arguments: str) -> ToolRun:
    """Returns a call with its command, if its arguments have one; ignores all other arguments."""
    try:
        shell = _decoder.decode(arguments)
    except UNREADABLE:
        return ToolRun(name)
    return ToolRun(name, shell.command or shell.cmd)
