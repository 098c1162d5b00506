"""``python -m benchmarks.drafts.demanded``: counts the steps that demanded tool calls take, by drafter.

The bundled model makes ten calls of three tools, greedy, over HTTP. The grammar forces the call's frame; the
arguments are the model's own text. Nothing is timed: drafts are verified whatever they cost, so step counts
are the same on every machine that rounds alike.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from eval.agent_model import NAME, folder
from eval.agents.tools import SCHEMAS
from eval.load.server_process import ServerProcess, unwound_by_sigterm

NO_DRAFTS = "no drafts"
METHODS = (NO_DRAFTS, "grammar", "ngram", "suffix")
TOOLS = ("read_file", "write_file", "search")
ASKED = (
    ("read_file", "Read main.py."),
    ("search", "Where is MAX_RETRIES used?"),
    ("read_file", "Read config/settings.ini."),
    ("write_file", "Write the numbers from 1 to 9 into numbers.txt."),
    ("read_file", "Read numbers.txt."),
    ("search", "Find the lines with import json."),
    ("write_file", "Copy this into notes.md: the server starts before the client does."),
    ("read_file", "Read notes.md."),
    ("search", "Where is load_config called?"),
    ("write_file", "Write hello into a.txt."),
)
"""Pairs of the tool that is demanded and the user's words."""
MAX_TOKENS = 120
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Demanded:
    """One drafter's results over all calls."""

    method: str
    calls: list[dict[str, Any]]
    """The functions that were called: the same for every drafter."""
    tokens: int
    steps: int
    drafted: int
    accepted: int


def measure(method: str) -> Demanded:
    """Requests all calls, one after the other, from a server with this drafter.

    Raises ServerError if it does not start, httpx.HTTPError if it does not answer.
    """
    with (
        tempfile.TemporaryDirectory() as logs,
        ServerProcess(_arguments(method), Path(logs) / "server.log") as server,
        httpx.Client(base_url=server.base_url, timeout=TIMEOUT_S) as http,
    ):
        answers = [_ask(http, number, tool, text) for number, (tool, text) in enumerate(ASKED)]
    receipts = [answer["usage"]["receipt"] for answer in answers]
    return Demanded(
        method,
        [
            call["function"]
            for answer in answers
            for call in answer["choices"][0]["message"].get("tool_calls") or ()
        ],
        tokens=sum(answer["usage"]["completion_tokens"] for answer in answers),
        steps=sum(receipt["output_steps"] for receipt in receipts),
        drafted=sum(receipt["drafted_tokens"] for receipt in receipts),
        accepted=sum(receipt["accepted_tokens"] for receipt in receipts),
    )


def _arguments(method: str) -> list[str]:
    arguments = [str(folder()), "--host", "127.0.0.1", "--port", "0", "--served-model-name", NAME]
    arguments += ["--num-gpu-blocks-override", "400"]
    if method == NO_DRAFTS:
        return arguments
    # Verify all drafts that are likely enough, whatever rows cost; an n-gram of 2, as arguments are short.
    config: dict[str, Any] = {"method": method, "weigh_costs": False}
    if method == "ngram":
        config["prompt_lookup_min"] = 2
    return [*arguments, "--speculative-config", json.dumps(config)]


def _ask(http: httpx.Client, number: int, tool: str, text: str) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": text}],
        "tools": [{"type": "function", "function": schema} for schema in _schemas()],
        "tool_choice": {"type": "function", "function": {"name": tool}},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "job_id": f"job-{number}",
    }
    answer = http.post("/v1/chat/completions", json=body).raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def _schemas() -> list[dict[str, Any]]:
    return [schema["function"] for schema in SCHEMAS if schema["function"]["name"] in TOOLS]


def table(measured: Sequence[Demanded]) -> str:
    """One row per drafter, in Markdown."""
    lines = ["| drafter | tokens | steps | drafted | accepted |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {each.method} | {each.tokens} | {each.steps} | {each.drafted} | {each.accepted} |"
        for each in measured
    ]
    return "\n".join(lines)


def main() -> int:
    with unwound_by_sigterm():
        measured = [measure(method) for method in METHODS]
    print(table(measured))
    same = all(each.calls == measured[0].calls for each in measured)
    print(f"\n{len(measured[0].calls)} calls, {'the same' if same else 'NOT the same'} with every drafter")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
