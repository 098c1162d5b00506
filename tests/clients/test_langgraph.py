"""A LangGraph agent with langchain-openai's model; LangGraph's own node calls the tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr

from tests.clients.weather import ANSWER, CALLS, INSTRUCTIONS, NUM_TURNS, Weather, question
from tests.clients.wiretap import Wiretap


@pytest.fixture
async def http() -> AsyncIterator[openai.DefaultAsyncHttpxClient]:
    """Without it LangChain would keep its own connections open for other event loops."""
    async with openai.DefaultAsyncHttpxClient() as client:
        yield client


def graph(wire: Wiretap, http: openai.DefaultAsyncHttpxClient, weather: Weather, *, streaming: bool) -> Any:
    """A graph that loops over model and tools until the model makes no call."""
    tools = [
        StructuredTool.from_function(weather.get_temperature),
        StructuredTool.from_function(weather.subtract),
    ]
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{wire.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        streaming=streaming,
        stream_usage=streaming,
        http_async_client=http,
    ).bind_tools(tools)

    async def speak(state: MessagesState) -> dict[str, list[AIMessage]]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("agent", speak)
    builder.add_node("tools", ToolNode(tools))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition, {"tools": "tools", END: END})
    builder.add_edge("tools", "agent")
    return builder.compile()


def first_state() -> dict[str, list[Any]]:
    return {"messages": [SystemMessage(INSTRUCTIONS), HumanMessage(question())]}


async def test_a_job_of_tool_calls(wire: Wiretap, http: openai.DefaultAsyncHttpxClient) -> None:
    """The graph runs to its end; LangChain's usage has the cached tokens."""
    weather = Weather()
    state = await graph(wire, http, weather, streaming=False).ainvoke(first_state())
    check(weather, state["messages"])
    wire.check_one_kept_job(streamed=False)


async def test_a_streamed_job_of_tool_calls(wire: Wiretap, http: openai.DefaultAsyncHttpxClient) -> None:
    """The graph yields pieces of the messages while it runs."""
    weather = Weather()
    pieces = 0
    state: dict[str, Any] = {}
    agent = graph(wire, http, weather, streaming=True)
    async for mode, part in agent.astream(first_state(), stream_mode=["messages", "values"]):
        if mode == "messages":
            pieces += 1
        else:
            state = part
    check(weather, state["messages"])
    assert pieces > NUM_TURNS
    wire.check_one_kept_job(streamed=True)


def check(weather: Weather, messages: list[Any]) -> None:
    assert sorted(weather.calls[:2]) == sorted(CALLS[:2])  # LangGraph runs them concurrently.
    assert weather.calls[2:] == CALLS[2:]
    assert messages[-1].content == ANSWER
    spoken = [message for message in messages if isinstance(message, AIMessage)]
    for before, after in pairwise(spoken):
        assert before.usage_metadata is not None
        assert after.usage_metadata is not None
        cached = after.usage_metadata["input_token_details"]["cache_read"]
        assert cached >= before.usage_metadata["input_tokens"] // 16 * 16
