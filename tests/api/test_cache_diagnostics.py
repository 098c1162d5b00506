"""Promises about what hosted APIs report about their caches: lifetimes, prewarming and why a prefix was not
reused. Checked on a real server with current openai and anthropic clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.api.server import Server, running_server

LONG = "Read every file of this project before you answer, and name the ones that matter. " * 4
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    for name in ("read", "write")
]
BLOCK_SIZE = 16


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def respond(client: openai.OpenAI, text: Any, compared: str | None = None, **fields: Any) -> Response:
    options = {} if compared is None else {"prompt_cache_options": {"comparison_response_id": compared}}
    fields = {"instructions": LONG, "tools": TOOLS, "max_output_tokens": 4, **options, **fields}
    response: Response = client.responses.create(model="tiny", input=text, **fields)
    return response


def told(response: Response) -> dict[str, Any]:
    assert response.prompt_cache_diagnostics is not None
    return response.prompt_cache_diagnostics.model_dump(exclude_none=True)


def test_a_prompt_that_is_continued_is_a_hit(client: openai.OpenAI) -> None:
    first = respond(client, "continued")
    assert first.prompt_cache_diagnostics is None, "nobody asked"
    second = respond(client, "and then?", first.id, previous_response_id=first.id)
    assert told(second) == {"type": "cache_hit"}
    assert second.prompt_cache_options is not None
    assert second.prompt_cache_options.mode == "implicit"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tools": TOOLS[::-1]}, "tools_changed"),
        ({"instructions": "Be brief. " + LONG}, "input_changed"),
        ({"model": "tiny", "chat_template_kwargs": {"x": 1}, "input": "other"}, "input_changed"),
    ],
    ids=["tools", "instructions", "input"],
)
def test_what_was_changed_is_named(client: openai.OpenAI, change: dict[str, Any], reason: str) -> None:
    """A miss names what was changed and counts the tokens that would have been cached."""
    if "input" in change:
        first = client.responses.create(
            model="tiny", input=LONG, tools=TOOLS, max_output_tokens=4, store=False,
            prompt_cache_options={"mode": "implicit"},
        )  # fmt: skip
        second = client.responses.create(
            model="tiny", input="Now: " + LONG, tools=TOOLS, max_output_tokens=4,
            prompt_cache_options={"comparison_response_id": first.id},
        )  # fmt: skip
    else:
        first = respond(client, "changed")
        second = respond(client, "changed", first.id, **change)
    found = told(second)
    assert (found["type"], found["reason"]) == ("cache_miss", reason)
    assert first.usage is not None
    assert second.usage is not None
    reusable = first.usage.input_tokens // BLOCK_SIZE * BLOCK_SIZE
    missed = found["cache_missed_tokens"]
    assert 0 < missed <= reusable
    assert missed == pytest.approx(reusable - second.usage.input_tokens_details.cached_tokens, abs=BLOCK_SIZE)
    assert found["comparison_reusable_tokens"] <= reusable - missed + 64


def test_what_changes_no_token_is_no_miss(client: openai.OpenAI) -> None:
    """Cache keys, service tiers and breakpoints are not part of the prompt, so changing them is no miss."""
    first = respond(client, "the same", prompt_cache_key="one")
    part = {"type": "input_text", "text": "the same", "prompt_cache_breakpoint": {"mode": "explicit"}}
    again: Any = [{"role": "user", "content": [part]}]
    second = respond(client, again, first.id, prompt_cache_key="two", service_tier="flex", top_logprobs=0)
    assert told(second) == {"type": "cache_hit"}


def test_a_prompt_that_nobody_knows(client: openai.OpenAI) -> None:
    """An unknown, unstored or deleted response gives ``comparison_response_not_found``."""
    not_kept = respond(client, "not kept", store=False)
    deleted = respond(client, "deleted")
    client.responses.delete(deleted.id)
    for response_id in ("resp_none", not_kept.id, deleted.id):
        assert told(respond(client, "hello", response_id)) == {"type": "comparison_response_not_found"}


def test_what_was_evicted_is_not_the_clients_fault(client: openai.OpenAI, http: httpx.Client) -> None:
    first = respond(client, "evicted")
    http.post("/reset_prefix_cache").raise_for_status()
    assert told(respond(client, "more", first.id, previous_response_id=first.id)) == {"type": "unavailable"}


def test_prewarming_fills_the_cache_and_generates_nothing(client: openai.OpenAI) -> None:
    warm = respond(client, "warm", prompt_cache_options={"prewarm": True, "ttl": "30m"}, max_output_tokens=99)
    assert (warm.status, warm.output, warm.output_text) == ("completed", [], "")
    assert warm.usage is not None
    assert warm.usage.output_tokens == 0
    then = respond(client, "warm")
    assert then.usage is not None
    assert then.usage.input_tokens_details.cached_tokens >= warm.usage.input_tokens - BLOCK_SIZE
    with client.responses.stream(
        model="tiny", input="warm too", extra_body={"prompt_cache_options": {"prewarm": True}}
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]


def test_chats_count_what_they_write(client: openai.OpenAI) -> None:
    """Chat completions accept lifetimes, count cache writes, and report the lifetime in the receipt."""
    chat = client.chat.completions.create(
        model="tiny", max_tokens=2, messages=[{"role": "user", "content": LONG + "a chat"}],
        prompt_cache_options={"ttl": "30m", "mode": "explicit"},
    )  # fmt: skip
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    details = chat.usage.prompt_tokens_details
    assert (details.cached_tokens or 0) + (details.cache_write_tokens or 0) == chat.usage.prompt_tokens
    receipt: Any = chat.usage.receipt  # type: ignore[attr-defined]
    assert receipt["asked_ttl_s"] == 1800
    assert receipt["ttl_s"] > 0


@pytest.mark.parametrize("ttl", ["", "30", "1d", "25h", "0m", "-5m"])
def test_a_lifetime_that_is_none_is_refused(client: openai.OpenAI, ttl: str) -> None:
    with pytest.raises(openai.BadRequestError, match=r"prompt_cache_options\.ttl must be a lifetime"):
        respond(client, "hello", prompt_cache_options={"ttl": ttl})


# ---- Anthropic ----


def ask(client: anthropic.Anthropic, *texts: str, **fields: Any) -> anthropic.types.Message:
    """Sends a message; ``texts`` alternate between user and assistant."""
    messages: list[Any] = [
        {"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)
    ]
    fields = {"messages": messages, **fields}
    message: anthropic.types.Message = client.messages.create(model="tiny", max_tokens=4, **fields)
    return message


def miss_of(message: anthropic.types.Message) -> dict[str, Any]:
    assert message.diagnostics is not None
    assert message.diagnostics.cache_miss_reason is not None
    return message.diagnostics.cache_miss_reason.model_dump()


def num_input_tokens(message: anthropic.types.Message) -> int:
    usage = message.usage
    return (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )


def after(message: anthropic.types.Message) -> Any:
    return {"previous_message_id": message.id}


READ: Any = {"name": "read", "input_schema": {"type": "object"}}


def test_a_message_that_extends_the_last_has_nothing_to_tell(claude: anthropic.Anthropic) -> None:
    first = ask(claude, LONG + "1", diagnostics={"previous_message_id": None})
    assert first.diagnostics is None
    second = ask(claude, LONG + "1", "fine", "go on", diagnostics=after(first))
    assert second.diagnostics is None
    assert "diagnostics" in second.model_fields_set, "it was asked for"
    assert "diagnostics" not in ask(claude, "hello").model_fields_set


@pytest.mark.parametrize(
    ("texts", "change", "reason"),
    [
        ((LONG + "2",), {"system": "Another. " + LONG}, "system_changed"),
        ((LONG + "2",), {"tools": [READ]}, "tools_changed"),
        (("But " + LONG, "fine", "go on"), {}, "messages_changed"),
    ],
)
def test_what_was_changed_of_a_message_is_named(
    claude: anthropic.Anthropic, texts: tuple[str, ...], change: dict[str, Any], reason: str
) -> None:
    first = ask(claude, LONG + "2", system=LONG, diagnostics={"previous_message_id": None})
    second = ask(claude, *texts, **{"system": LONG, "diagnostics": after(first), **change})
    found = miss_of(second)
    assert found["type"] == reason
    assert 0 < found["cache_missed_input_tokens"] <= num_input_tokens(first)


def test_a_message_that_nobody_kept(claude: anthropic.Anthropic) -> None:
    """A message is remembered only if its request contained ``diagnostics``."""
    silent = ask(claude, "hello")
    assert miss_of(ask(claude, "hello", diagnostics=after(silent))) == {"type": "previous_message_not_found"}


def test_a_stream_tells_with_its_first_event(claude: anthropic.Anthropic) -> None:
    first = ask(claude, LONG + "3", diagnostics={"previous_message_id": None})
    messages: list[Any] = [{"role": "user", "content": "No: " + LONG}]
    with claude.messages.stream(
        model="tiny", max_tokens=4, messages=messages, diagnostics=after(first)
    ) as stream:  # fmt: skip
        assert miss_of(stream.get_final_message())["type"] == "messages_changed"


def test_what_is_written_is_counted_by_lifetime(claude: anthropic.Anthropic) -> None:
    """Written tokens are counted under the lifetime of the last breakpoint; the receipt reports how long they
    are kept."""
    usage = {}
    for ttl in ("5m", "1h"):
        mark: Any = {"type": "ephemeral", "ttl": ttl}
        system: Any = [{"type": "text", "text": ttl + LONG, "cache_control": mark}]
        usage[ttl] = ask(claude, "hello", system=system).usage
    assert usage["5m"].cache_creation is not None
    assert usage["1h"].cache_creation is not None
    short, long = usage["5m"].cache_creation, usage["1h"].cache_creation
    assert short.ephemeral_5m_input_tokens == usage["5m"].cache_creation_input_tokens
    assert long.ephemeral_1h_input_tokens == usage["1h"].cache_creation_input_tokens
    assert short.ephemeral_1h_input_tokens == long.ephemeral_5m_input_tokens == 0
    receipt: Any = usage["1h"].receipt  # type: ignore[attr-defined]
    assert receipt["asked_ttl_s"] == 3600
    assert receipt["ttl_s"] > 0


def test_a_prompt_whose_breakpoint_alternates_hits(claude: anthropic.Anthropic) -> None:
    """Moving the cache mark from turn to turn, as Claude Code does, does not change the prompt."""
    mark: Any = {"type": "ephemeral"}
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": LONG + "marks"}]}]
    known = 0
    for turn in range(4):
        marked = [dict(message, content=[dict(part) for part in message["content"]]) for message in history]
        for place in {0: (0,), 1: (-1,), 2: (0, -1), 3: ()}[turn]:
            marked[place]["content"][-1]["cache_control"] = mark
        message = ask(claude, messages=marked)
        assert (message.usage.cache_read_input_tokens or 0) >= known // BLOCK_SIZE * BLOCK_SIZE
        known = num_input_tokens(message)
        history += [
            {"role": "assistant", "content": [{"type": "text", "text": "fine"}]},
            {"role": "user", "content": [{"type": "text", "text": f"go on {turn}"}]},
        ]


def test_processes_of_a_server_know_what_another_kept(model: Path) -> None:
    """Processes of one server share what was kept; owners do not."""
    with running_server(
        model,
        *("--api-server-count", "2", "--num-gpu-blocks-override", "400", "--api-key", "ann:a", "bob:b"),
    ) as server:

        def through_a_new_connection(key: str, compared: str) -> dict[str, Any]:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                return told(respond(client, "shared", compared))

        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0) as client:
            first = respond(client, "shared")
        for _ in range(8):
            assert through_a_new_connection("a", first.id) == {"type": "cache_hit"}
        assert through_a_new_connection("b", first.id) == {"type": "comparison_response_not_found"}
