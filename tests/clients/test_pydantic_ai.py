"""A pydantic-ai agent, with each of its models that uses one of the server's APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
from pydantic_ai import Agent, AgentRunResultEvent, PartDeltaEvent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider

from tests.clients.weather import ANSWER, CALLS, INSTRUCTIONS, NUM_TURNS, Weather, question
from tests.clients.wiretap import Wiretap


@pytest.fixture
async def of_openai(wire: Wiretap) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{wire.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def of_anthropic(wire: Wiretap) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=wire.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(params=["chat", "responses", "messages"])
def model(
    request: pytest.FixtureRequest, of_openai: openai.AsyncOpenAI, of_anthropic: anthropic.AsyncAnthropic
) -> Model:
    match request.param:
        case "chat":
            return OpenAIChatModel("tiny", provider=VLLMProvider(openai_client=of_openai))
        case "responses":
            return OpenAIResponsesModel("tiny", provider=OpenAIProvider(openai_client=of_openai))
        case _:
            return AnthropicModel("tiny", provider=AnthropicProvider(anthropic_client=of_anthropic))


def agent(model: Model, weather: Weather) -> Agent[None, str]:
    made: Agent[None, str] = Agent(model, instructions=INSTRUCTIONS)
    made.tool_plain(weather.get_temperature)
    made.tool_plain(weather.subtract)
    return made


async def test_a_job_of_tool_calls(model: Model, wire: Wiretap) -> None:
    """The agent's run ends; its usage has the cached tokens."""
    weather = Weather()
    result = await agent(model, weather).run(question())
    assert result.output == ANSWER
    assert sorted(weather.calls) == sorted(CALLS)
    assert result.usage.cache_read_tokens > result.usage.input_tokens / 2
    wire.check_one_kept_job(streamed=False)


async def test_a_streamed_job_of_tool_calls(model: Model, wire: Wiretap) -> None:
    """The agent yields events while it runs."""
    weather = Weather()
    num_deltas, output = 0, ""
    async with agent(model, weather).run_stream_events(question()) as events:
        async for event in events:
            num_deltas += isinstance(event, PartDeltaEvent)
            if isinstance(event, AgentRunResultEvent):
                output = event.result.output
    assert output == ANSWER
    assert sorted(weather.calls) == sorted(CALLS)
    assert num_deltas > NUM_TURNS
    wire.check_one_kept_job(streamed=True)
