"""The openai library with the Responses API, with and without stored history; the test calls the tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.weather import ANSWER, CALLS, INSTRUCTIONS, TOOLS, Weather, question
from tests.clients.wiretap import Wiretap

RESPONSE_TOOLS: Any = [{"type": "function", "strict": False} | tool for tool in TOOLS]


@pytest.fixture
def client(wire: Wiretap) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{wire.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def whole(client: openai.OpenAI, **request: Any) -> Any:
    return client.responses.create(model="tiny", tools=RESPONSE_TOOLS, instructions=INSTRUCTIONS, **request)


def streamed(client: openai.OpenAI, **request: Any) -> Any:
    """The library assembles the response from its events, and rejects events that do not fit."""
    stream = client.responses.stream(model="tiny", tools=RESPONSE_TOOLS, instructions=INSTRUCTIONS, **request)
    with stream as events:
        kinds = [event.type for event in events]
        response = events.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    return response


def results_of(response: Any, weather: Weather) -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": weather.call(call.name, json.loads(call.arguments)),
        }
        for call in calls
    ]


@pytest.mark.parametrize("create", [whole, streamed])
def test_a_job_that_keeps_its_own_history(client: openai.OpenAI, wire: Wiretap, create: Any) -> None:
    """Nothing is stored; every turn sends all items, including the model's."""
    weather = Weather()
    items: list[Any] = [{"role": "user", "content": question()}]
    response = create(client, input=items, store=False)
    while results := results_of(response, weather):
        items += [as_input(item) for item in response.output]
        items += results
        response = create(client, input=items, store=False)
    check(response, weather)
    wire.check_one_kept_job(streamed=create is streamed)


def as_input(item: Any) -> Any:
    """Drops the parsing fields of the library's streamed items, which the library does not send either."""
    return {name: value for name, value in item.to_dict().items() if not name.startswith("parsed")}


@pytest.mark.parametrize("create", [whole, streamed])
def test_a_job_that_names_the_response_before(client: openai.OpenAI, wire: Wiretap, create: Any) -> None:
    """The server stores the history; a turn sends only the results."""
    weather = Weather()
    response = create(client, input=question())
    while results := results_of(response, weather):
        response = create(client, input=results, previous_response_id=response.id)
    check(response, weather)
    wire.check_one_kept_job(streamed=create is streamed)
    assert client.responses.retrieve(response.id).output_text == ANSWER


def check(response: Any, weather: Weather) -> None:
    assert weather.calls == CALLS
    assert response.output_text == ANSWER
    assert response.usage.input_tokens_details.cached_tokens > response.usage.input_tokens / 2
