"""Codex's requests as it sends them, over a thread of several turns; ``shapes`` has the first one."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.clients.scripted_model import Script, tool_call
from tests.clients.wiretap import Wiretap

SHAPE: dict[str, Any] = json.loads(Path(__file__).with_name("shapes").joinpath("codex.json").read_text())
PATCH = """*** Begin Patch
*** Update File: greeting.py
@@
-print("Helo")
+print("Hello")
*** End Patch
"""
THOUGHT = "I have not seen the file yet."
ANSWER = "greeting.py says Hello now, and a reviewer looks at it."
SCRIPT = Script(
    '"name": "apply_patch"',
    (
        f"<think>\n{THOUGHT}\n</think>\n\n" + tool_call("exec_command", cmd="cat greeting.py", workdir="."),
        "I mend the greeting.\n" + tool_call("apply_patch", input=PATCH),
        tool_call("multi_agent_v1__spawn_agent", message="Review greeting.py."),
        ANSWER,
    ),
)
_EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


class Thread:
    """A thread of Codex: stateless, every turn sends all items again."""

    def __init__(self, wire: Wiretap, headers: dict[str, str], cache_key: str) -> None:
        self._wire = wire
        self._headers = SHAPE["headers"] | headers
        self.body = deepcopy(SHAPE["body"]) | {"prompt_cache_key": cache_key}

    def turn(self) -> list[dict[str, Any]]:
        """Sends a turn; the items of the answer, as they were when done, become part of the history."""
        answer = httpx.post(
            f"{self._wire.url}/v1/responses", headers=self._headers, json=self.body, timeout=60
        )
        assert answer.status_code == 200, answer.text
        items = self._items(answer)
        self.body["input"] += [_as_sent_back(item) for item in items]
        return items

    def _items(self, answer: httpx.Response) -> list[dict[str, Any]]:
        done: list[dict[str, Any]] = []
        completed: dict[str, Any] | None = None
        for number, event in enumerate(answer.text.strip().split("\n\n")):
            name, data = event.split("\n")
            read = _EVENTS.validate_json(data.removeprefix("data: "))
            assert name == f"event: {read.type}"
            assert read.sequence_number == number
            document = json.loads(data.removeprefix("data: "))
            if read.type == "response.output_item.done":
                done.append(document["item"])
            elif read.type == "response.completed":
                completed = document["response"]
        assert completed is not None
        Response.model_validate(completed)
        assert completed["output"] == done
        return done

    def give_result(self, call: dict[str, Any], result: str) -> None:
        output = {"call_id": call["call_id"], "output": result}
        self.body["input"].append({"type": f"{call['type']}_output"} | output)


def _as_sent_back(item: dict[str, Any]) -> dict[str, Any]:
    """Drops status and ids, which Codex does not keep if nothing is stored."""
    return {name: value for name, value in item.items() if name not in ("id", "status")}


@pytest.mark.parametrize("form", ["session-id", "session_id", "prompt_cache_key"])
def test_a_thread_is_one_job(wire: Wiretap, form: str) -> None:
    """Calls of functions, of the custom tool and of a namespace are in Codex's item types, and are understood
    when sent back; each turn finds the whole one before it in the cache."""
    thread_id = str(uuid4())
    thread = Thread(wire, {} if form == "prompt_cache_key" else {form: thread_id}, thread_id)

    reasoning, call = thread.turn()
    assert reasoning["type"] == "reasoning"
    assert reasoning["encrypted_content"]
    assert (call["type"], call["name"]) == ("function_call", "exec_command")
    assert json.loads(call["arguments"]) == {"cmd": "cat greeting.py", "workdir": "."}
    thread.give_result(call, 'Exit code: 0\nOutput:\nprint("Helo")\n')

    message, call = thread.turn()
    assert message["content"][0]["text"] == "I mend the greeting."
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    thread.give_result(call, "Success. Updated the following files:\nM greeting.py\n")

    (call,) = thread.turn()
    assert (call["type"], call["namespace"], call["name"]) == (
        "function_call",
        "multi_agent_v1",
        "spawn_agent",
    )
    thread.give_result(call, '{"agent_id": "0198f2c1-0000-7000-8000-000000000000"}')

    (message,) = thread.turn()
    assert message["content"][0]["text"] == ANSWER
    wire.check_one_kept_job(4, streamed=True, named=True)
    assert wire.turns()[-1].receipt()["job_id"] == thread_id
