"""The openai library with chat completions; the test calls the tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.weather import ANSWER, CALLS, INSTRUCTIONS, NUM_TURNS, TOOLS, Weather, question
from tests.clients.wiretap import Wiretap, check_one_kept_job

CHAT_TOOLS: Any = [{"type": "function", "function": tool} for tool in TOOLS]


@pytest.fixture
def client(wire: Wiretap) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{wire.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_job_of_tool_calls(client: openai.OpenAI, wire: Wiretap, streamed: bool) -> None:
    """A loop as the documentation shows it: parallel calls, then one that uses their results."""
    weather = Weather()
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question()},
    ]
    while True:
        message = (streamed_reply if streamed else whole_reply)(client, messages)
        messages.append(message)
        if not message.tool_calls:
            break
        messages += results_of(message, weather)
    assert weather.calls == CALLS
    assert messages[-1].content == ANSWER
    wire.check_one_kept_job(streamed=streamed)


def results_of(message: Any, weather: Weather) -> list[Any]:
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": weather.call(call.function.name, json.loads(call.function.arguments)),
        }
        for call in message.tool_calls or []
    ]


def whole_reply(client: openai.OpenAI, messages: list[Any]) -> Any:
    completion = client.chat.completions.create(model="tiny", messages=messages, tools=CHAT_TOOLS)
    choice = completion.choices[0]
    assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    return choice.message


def streamed_reply(client: openai.OpenAI, messages: list[Any]) -> Any:
    with client.chat.completions.stream(
        model="tiny", messages=messages, tools=CHAT_TOOLS, stream_options={"include_usage": True}
    ) as stream:
        num_deltas = sum(event.type.endswith("delta") for event in stream)
        completion = stream.get_final_completion()
    message = completion.choices[0].message
    assert num_deltas > 1
    assert completion.usage is not None
    return message


async def test_jobs_that_run_at_the_same_time(wire: Wiretap) -> None:
    """Unnamed jobs with similar prompts run interleaved, and each turn finds its own job."""
    async with openai.AsyncOpenAI(base_url=f"{wire.url}/v1", api_key="none", max_retries=0) as client:
        await asyncio.gather(*(job_side_by_side(client, question()) for _ in range(8)))
    jobs: dict[str, list[dict[str, Any]]] = {}
    for turn in wire.turns():
        jobs.setdefault(turn.body["messages"][1]["content"], []).append(turn.receipt())
    for receipts in jobs.values():
        check_one_kept_job(receipts)
    assert len({receipts[0]["job_id"] for receipts in jobs.values()}) == len(jobs) == 8


async def job_side_by_side(client: openai.AsyncOpenAI, asked: str) -> None:
    weather = Weather()
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": asked}]
    for _ in range(NUM_TURNS):
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=CHAT_TOOLS)
        messages += [answer.choices[0].message, *results_of(answer.choices[0].message, weather)]
    assert weather.calls == CALLS
