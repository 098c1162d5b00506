"""The anthropic library with the Messages API; the test calls the tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.weather import ANSWER, CALLS, INSTRUCTIONS, TOOLS, Weather, question
from tests.clients.wiretap import Wiretap

MESSAGE_TOOLS: Any = [
    {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
    for tool in TOOLS
]


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


@pytest.fixture
def client(wire: Wiretap) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=wire.url, api_key="none", max_retries=0) as client:
        yield client


def whole(client: anthropic.Anthropic, request: Any) -> anthropic.types.Message:
    message: anthropic.types.Message = client.messages.create(**request)
    return message


def streamed(client: anthropic.Anthropic, request: Any) -> anthropic.types.Message:
    """Streams with the library's helper, which assembles the message from its events."""
    with client.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(message.content)
    return message


@pytest.mark.parametrize("extra", [[], [PICTURE]], ids=["text", "pictures"])
@pytest.mark.parametrize("create", [whole, streamed])
def test_a_job_of_tool_calls(
    client: anthropic.Anthropic, wire: Wiretap, create: Any, extra: list[Any]
) -> None:
    """The documentation's loop runs; the cache fields of usage add up to the counted tokens. Pictures in
    results do not end the job."""
    weather = Weather()
    request: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 500,
        "system": INSTRUCTIONS,
        "tools": MESSAGE_TOOLS,
        "messages": [{"role": "user", "content": question()}],
    }
    while True:
        counted = client.messages.count_tokens(
            **{name: request[name] for name in ("model", "system", "tools", "messages")}
        )
        message = create(client, request)
        usage = message.usage
        assert counted.input_tokens == (
            usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        )
        if message.stop_reason != "tool_use":
            break
        request["messages"] += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results_of(message, weather, extra)},
        ]
    assert message.stop_reason == "end_turn"
    assert weather.calls == CALLS
    assert [block.text for block in message.content] == [ANSWER]
    assert usage.cache_read_input_tokens > counted.input_tokens / 2
    wire.check_one_kept_job(streamed=create is streamed)


def results_of(message: anthropic.types.Message, weather: Weather, extra: list[Any]) -> list[Any]:
    return [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": [{"type": "text", "text": weather.call(block.name, dict(block.input))}, *extra],
        }
        for block in message.content
        if block.type == "tool_use"
    ]


def test_the_librarys_own_loop(client: anthropic.Anthropic, wire: Wiretap) -> None:
    """The library's tool runner calls the tools and sends results until the model makes no more calls. It
    requests a server-held conversation, and sends all messages when that is refused."""
    weather = Weather()
    runner = client.beta.messages.tool_runner(
        model="tiny",
        max_tokens=500,
        system=INSTRUCTIONS,
        tools=[anthropic.beta_tool(weather.get_temperature), anthropic.beta_tool(weather.subtract)],
        messages=[{"role": "user", "content": question()}],
    )
    assert [block.type for block in runner.until_done().content] == ["text"]
    assert weather.calls == CALLS
    wire.check_one_kept_job(streamed=False)
