"""openai-agents, whose runner calls the tools: with the Responses API, its default, and chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)

from tests.clients.weather import ANSWER, CALLS, INSTRUCTIONS, NUM_TURNS, Weather, question
from tests.clients.wiretap import Wiretap

APIS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@pytest.fixture
async def client(wire: Wiretap) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{wire.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(params=list(APIS))
def model(request: pytest.FixtureRequest, client: openai.AsyncOpenAI) -> Model:
    made: Model = APIS[request.param](model="tiny", openai_client=client)
    return made


def agent(model: Model, weather: Weather) -> Agent[None]:
    tools = [function_tool(weather.get_temperature), function_tool(weather.subtract)]
    return Agent(
        name="Weather",
        instructions=INSTRUCTIONS,
        model=model,
        model_settings=ModelSettings(include_usage=True),
        tools=list(tools),
    )


async def test_a_job_of_tool_calls(model: Model, wire: Wiretap) -> None:
    """The runner reaches its final output; its usage has the cached tokens."""
    weather = Weather()
    result = await Runner.run(agent(model, weather), question(), run_config=RunConfig(tracing_disabled=True))
    assert result.final_output == ANSWER
    assert sorted(weather.calls) == sorted(CALLS)
    usage = result.context_wrapper.usage
    assert usage.input_tokens_details.cached_tokens > usage.input_tokens / 2
    wire.check_one_kept_job(streamed=False)


async def test_a_streamed_job_of_tool_calls(model: Model, wire: Wiretap) -> None:
    """The runner yields events while it runs."""
    weather = Weather()
    run = Runner.run_streamed(agent(model, weather), question(), run_config=RunConfig(tracing_disabled=True))
    num_deltas = 0
    async for event in run.stream_events():
        num_deltas += event.type == "raw_response_event" and event.data.type.endswith("delta")
    assert run.final_output == ANSWER
    assert sorted(weather.calls) == sorted(CALLS)
    assert num_deltas > NUM_TURNS
    wire.check_one_kept_job(streamed=True)


async def test_a_session_that_the_server_keeps(client: openai.AsyncOpenAI) -> None:
    """The runner's items are in a conversation on the server, and can be removed."""
    session = OpenAIConversationsSession(openai_client=client)
    weather = Weather()
    result = await Runner.run(
        agent(OpenAIResponsesModel(model="tiny", openai_client=client), weather),
        question(),
        session=session,
        run_config=RunConfig(tracing_disabled=True),
    )
    assert result.final_output == ANSWER
    items = await session.get_items()
    kinds = [item.get("type") for item in items]
    assert kinds[0] == kinds[-1] == "message"
    assert kinds.count("function_call") == kinds.count("function_call_output") == len(CALLS)
    assert [item.get("id") for item in await session.get_items(limit=2)] == [i.get("id") for i in items[-2:]]
    last = await session.pop_item()
    assert last is not None
    assert last.get("id") == items[-1].get("id")
    assert len(await session.get_items()) == len(items) - 1
    await session.clear_session()
