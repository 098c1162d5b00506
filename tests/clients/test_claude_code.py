"""Claude Code's requests as it sends them, over a session of several turns; ``shapes`` has the first ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount, BetaRawMessageStreamEvent
from pydantic import TypeAdapter

from tests.clients.scripted_model import Script, tool_call
from tests.clients.wiretap import BLOCK_SIZE, Wiretap, check_one_kept_job

SHAPES: dict[str, Any] = json.loads(
    Path(__file__).with_name("shapes").joinpath("claude_code.json").read_text()
)
TABLE = "/home/user/table/table.c"
THOUGHT = "The upper bound looks wrong. I read the file and its tests together."
ANSWER = "The bound was off by one: idx == len is refused now, and the tests pass."
SCRIPT = Script(
    '"name": "Edit"',
    (
        f"<think>\n{THOUGHT}\n</think>\n\nI read the table and its tests.\n"
        + tool_call("Read", file_path=TABLE)
        + "\n"
        + tool_call("Bash", command="make -C /home/user/table test", description="Run the tests"),
        "<think>\nIt must be >= rather than >.\n</think>\n\n"
        + tool_call("Edit", file_path=TABLE, old_string="if (idx > len)", new_string="if (idx >= len)"),
        ANSWER,
    ),
)
SUBAGENT_SCRIPT = Script(
    '"name": "Grep"',
    (
        tool_call("Grep", pattern="lookup\\(", path="/home/user/table", output_mode="files_with_matches"),
        "/home/user/table/main.c calls it.",
    ),
)
TITLE_SCRIPT = Script("Name this coding session", ('{"title": "Bound of the table"}',))
_EVENTS: TypeAdapter[BetaRawMessageStreamEvent] = TypeAdapter(BetaRawMessageStreamEvent)


class Conversation:
    """One conversation of a session, as the client keeps it."""

    def __init__(self, wire: Wiretap, shape: str, headers: dict[str, str], user_id: str) -> None:
        self._wire = wire
        self._headers = SHAPES["headers"] | headers
        self.body = deepcopy(SHAPES[shape])
        self.body["metadata"]["user_id"] = user_id
        self.receipts: list[dict[str, Any]] = []

    def turn(self) -> BetaMessage:
        """Sends a turn; the answer becomes part of the history."""
        self._sign()
        answer = httpx.post(
            f"{self._wire.url}/v1/messages",
            params={"beta": "true"},
            headers=self._headers,
            json=self.body,
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        message = assembled(list(self._events(answer)))
        self.receipts.append(self._wire.turns()[-1].receipt())
        content = [block.model_dump(exclude_unset=True) for block in message.content]
        self.body["messages"].append({"role": "assistant", "content": content})
        return message

    def _sign(self) -> None:
        """Writes the billing text, which holds a hash of the request and so differs in each."""
        head = self.body["system"][0]["text"].rpartition("cch=")[0]
        self.body["system"][0]["text"] = f"{head}cch={uuid4().hex[:5]};"

    def _events(self, answer: httpx.Response) -> Iterator[BetaRawMessageStreamEvent]:
        """Yields the library's own event types; the event's name is its type, as its parsers require."""
        for event in answer.text.strip().split("\n\n"):
            name, data = event.split("\n")
            if name == "event: ping":
                continue
            read = _EVENTS.validate_json(data.removeprefix("data: "))
            assert name == f"event: {read.type}"
            yield read

    def give_results(self, message: BetaMessage, *results: str) -> None:
        """Adds the results of the calls in order and moves the cache mark to the last of them."""
        for earlier in self.body["messages"]:
            if isinstance(earlier["content"], list):
                for block in earlier["content"]:
                    block.pop("cache_control", None)
        calls = [block.id for block in message.content if block.type == "tool_use"]
        blocks: list[Any] = [
            {"tool_use_id": call, "type": "tool_result", "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
        self.body["messages"].append({"role": "user", "content": blocks})

    def count_tokens(self) -> int:
        """Counts the next prompt as the client does, with a smaller body."""
        counted = ("model", "messages", "system", "tools", "thinking")
        answer = httpx.post(
            f"{self._wire.url}/v1/messages/count_tokens",
            params={"beta": "true"},
            headers=self._headers,
            json={name: self.body[name] for name in counted},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return BetaMessageTokensCount.model_validate_json(answer.content).input_tokens


def assembled(events: list[BetaRawMessageStreamEvent]) -> BetaMessage:
    """Assembles the message of a stream as a client does."""
    first = events[0]
    assert first.type == "message_start"
    message = first.message.model_dump()
    texts: list[str] = []
    for event in events[1:]:
        match event.type:
            case "content_block_start":
                assert event.index == len(message["content"])
                message["content"].append(event.content_block.model_dump(exclude_unset=True))
                texts = []
            case "content_block_delta":
                delta = event.delta
                if delta.type == "input_json_delta":
                    texts.append(delta.partial_json)
                    continue
                kind = delta.type.removesuffix("_delta")
                message["content"][event.index][kind] += getattr(delta, kind)
            case "content_block_stop":
                if texts:
                    message["content"][event.index]["input"] = json.loads("".join(texts))
            case "message_delta":
                message |= event.delta.model_dump(include={"stop_reason", "stop_sequence"})
                message["usage"] |= event.usage.model_dump(exclude_none=True)
    assert events[-1].type == "message_stop"
    return BetaMessage.model_validate(message)


def kinds(message: BetaMessage) -> list[str]:
    return [block.type for block in message.content]


def identity(form: str, session: str) -> tuple[dict[str, str], str]:
    """How versions of Claude Code name their session: extra headers, and the body's user id."""
    old = f"user_{'0' * 64}_account_{uuid4()}_session_{session}"
    new = json.dumps({"device_id": "9f2c0d1e4b7a", "account_uuid": "", "session_id": session})
    match form:
        case "header":
            return {"x-claude-code-session-id": session}, new
        case "user-id-as-json":
            return {}, new
        case _:
            return {}, old


@pytest.mark.parametrize("form", ["header", "user-id-as-json", "user-id-as-text"])
def test_a_session_is_one_job(wire: Wiretap, form: str) -> None:
    """Reasoning and calls are well formed; each turn finds the whole one before it in the cache, although the
    billing text at the prompt's start always differs."""
    session = str(uuid4())
    conversation = Conversation(wire, "body", *identity(form, session))

    first = conversation.turn()
    assert kinds(first) == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    conversation.give_results(first, "1\tint lookup(int *table, int len, int idx) {", "1 of 4 tests failed")

    second = conversation.turn()
    assert kinds(second) == ["thinking", "tool_use"]
    conversation.give_results(second, f"The file {TABLE} has been updated.")

    last = conversation.turn()
    assert kinds(last) == ["text"]
    assert last.stop_reason == "end_turn"
    assert last.usage.cache_read_input_tokens == conversation.receipts[-1]["cached_tokens"]
    assert {receipt["job_id"] for receipt in conversation.receipts} == {session}
    check_one_kept_job(conversation.receipts)


def test_tokens_are_counted_as_a_turn_has_them(wire: Wiretap) -> None:
    """The count before a turn equals the tokens of its usage, cached or not."""
    conversation = Conversation(wire, "body", *identity("header", str(uuid4())))
    for results in (("a", "b"), ("c",)):
        counted = conversation.count_tokens()
        message = conversation.turn()
        usage = message.usage
        assert counted == sum(
            (usage.input_tokens, usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0)
        )
        conversation.give_results(message, *results)


@pytest.mark.slow
def test_the_title_of_a_session_is_json(wire: Wiretap) -> None:
    """Claude Code requests a title under the session's id, as JSON of a schema."""
    names = identity("header", str(uuid4()))
    session, aside = (Conversation(wire, shape, *names) for shape in ("body", "title_body"))
    asked = session.turn()
    (block,) = aside.turn().content
    assert block.type == "text"
    assert json.loads(block.text) == {"title": "Bound of the table"}
    session.give_results(asked, "1\tint lookup(int *table, int len, int idx) {", "1 of 4 tests failed")
    session.turn()
    assert session.receipts[-1]["previous_pin"] == "handed_over"


def test_a_subagent_in_the_same_session_is_kept_apart(wire: Wiretap) -> None:
    """Subagents have their parent's session id: as they alternate, both conversations find their own
    prefix."""
    names = identity("header", str(uuid4()))
    parent, subagent = (Conversation(wire, shape, *names) for shape in ("body", "subagent_body"))
    asked = parent.turn()
    searched = subagent.turn()
    assert kinds(searched) == ["tool_use"]
    parent.give_results(asked, "1\tint lookup(int *table, int len, int idx) {", "1 of 4 tests failed")
    parent.turn()
    subagent.give_results(searched, "main.c")
    assert subagent.turn().stop_reason == "end_turn"
    for conversation in (parent, subagent):
        before, after = conversation.receipts
        assert after["previous_pin"] == "handed_over"
        assert after["cached_tokens"] >= before["prompt_tokens"] // BLOCK_SIZE * BLOCK_SIZE
        assert after["recomputed_tokens"] == 0
