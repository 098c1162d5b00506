"""Formats a turn's cache use and tool calls as single lines of text."""

from __future__ import annotations

import json

from engine.records.messages import TurnReceipt
from eval.agents.model import Call, ModelReply

MAX_LINES = 4
MAX_LINE = 100
"""Most characters of a line."""

_PIN_WORDS = {
    "handed_over": "its pin was handed over",
    "expired": "its pin had expired",
    "revoked": "its pin was revoked",
    "released": "its pin was released",
    "superseded": "its pin was superseded",
}


def call_line(call: Call) -> str:
    """Formats a call as ``read_file(path="notes.txt")``, or as the model wrote it if it is not valid."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return _cut(f"{call.name} {call.arguments}")
    told = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return _cut(f"{call.name}({told})")


def result_lines(result: str) -> str:
    """Returns the first lines of a result, indented."""
    lines = result.rstrip("\n").split("\n")
    shown = [f"  {_cut(line)}" for line in lines[:MAX_LINES]]
    if left_out := len(lines) - len(shown):
        shown.append(f"  ... {left_out} more {'line' if left_out == 1 else 'lines'}")
    return "\n".join(shown)


def warmth_line(reply: ModelReply) -> str:
    """Returns the cached share of the prompt, and the receipt's report on the job's KV."""
    told = [_warmth(reply)]
    if reply.receipt is not None:
        told += _kept(reply.receipt)
    told.append(f"TTFT {reply.ttft_s:.2f} s")
    return f"  [{'; '.join(told)}]"


def _warmth(reply: ModelReply) -> str:
    if reply.cached_tokens is None:
        return f"{reply.prompt_tokens:,} prompt tokens"
    share = reply.cached_tokens / reply.prompt_tokens if reply.prompt_tokens else 0.0
    return f"{reply.cached_tokens:,} of {reply.prompt_tokens:,} prompt tokens cached ({share:.0%})"


def _kept(receipt: TurnReceipt) -> list[str]:
    told = []
    if receipt.previous_pin is not None:
        told.append(_PIN_WORDS.get(receipt.previous_pin, receipt.previous_pin))
    if receipt.recomputed_tokens:
        told.append(f"{receipt.recomputed_tokens:,} recomputed")
    if receipt.pinned_tokens:
        told.append(f"{receipt.pinned_tokens:,} pinned for {receipt.ttl_s:.1f} s")
    return told


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} ..."
