"""Writes a recorded tool call as a model would, so that a server sees which tool runs next."""

from __future__ import annotations

import json
from enum import StrEnum

from eval.workloads.job import GapKind, ToolRun, Turn


class CallStyle(StrEnum):
    """How calls are written."""

    FENCED = "fenced"
    """One ``bash`` block, as text agents do."""
    HERMES = "hermes"
    """``<tool_call>`` JSON; the tools are declared in the request."""
    NONE = "none"


def tool_call_text(turn: Turn, style: CallStyle) -> str:
    """Returns the calls of a turn, to append to its text; empty if no tool ran. Arguments are unknown."""
    if style is CallStyle.NONE or turn.gap_kind is not GapKind.TOOL or not turn.calls:
        return ""
    if style is CallStyle.FENCED:
        # Such agents run one command per turn; of parallel calls the slowest determines the gap.
        slowest = max(turn.calls, key=lambda call: call.seconds or 0.0)
        return f"\n```bash\n{_program(slowest)}\n```"
    return "".join(f"\n<tool_call>\n{_hermes_json(call)}\n</tool_call>" for call in turn.calls)


def _program(call: ToolRun) -> str:
    return call.command or call.tool


def _hermes_json(call: ToolRun) -> str:
    arguments = {} if call.command is None else {"command": call.command}
    return json.dumps({"name": call.tool, "arguments": arguments}, ensure_ascii=False)
