"""litellm's completion, which many agents wrap; the test calls the tools."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from litellm.exceptions import ContextWindowExceededError, NotFoundError

from tests.clients.test_openai_chat import CHAT_TOOLS
from tests.clients.weather import ANSWER, CALLS, INSTRUCTIONS, Weather, question
from tests.clients.wiretap import Wiretap

# litellm reads pydantic's fields in a way that pydantic has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Accessing the 'model_:pydantic.warnings.PydanticDeprecatedSince211"
)

PATHS = {"hosted_vllm": "/v1", "openai": "/v1", "anthropic": ""}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("provider", list(PATHS))
def test_a_job_of_tool_calls(wire: Wiretap, provider: str, streamed: bool) -> None:
    """A job runs under each provider name that litellm has for such a server."""
    weather = Weather()
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question()},
    ]
    while True:
        message = reply(wire, provider, messages, streamed=streamed)
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = weather.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert weather.calls == CALLS
    assert messages[-1].content == ANSWER
    wire.check_one_kept_job(streamed=streamed)


def reply(wire: Wiretap, provider: str, messages: list[Any], *, streamed: bool) -> Any:
    answer: Any = litellm.completion(
        model=f"{provider}/tiny",
        api_base=wire.url + PATHS[provider],
        api_key="none",
        messages=messages,
        tools=CHAT_TOOLS,
        num_retries=0,
        stream=streamed,
        stream_options={"include_usage": True} if streamed else None,
    )
    if streamed:
        chunks = list(answer)
        answer = litellm.stream_chunk_builder(chunks, messages=messages)
        # The builder takes the reason from the last chunk, which has the usage and no reason.
        (answer.choices[0].finish_reason,) = filter(
            None, (chunk.choices[0].finish_reason for chunk in chunks)
        )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == ("tool_calls" if message.tool_calls else "stop")
    if len(messages) > 2:
        assert answer.usage.prompt_tokens_details.cached_tokens > 0
    return message


@pytest.mark.parametrize("provider", list(PATHS))
def test_errors_are_what_the_library_knows_them_as(wire: Wiretap, provider: str) -> None:
    """Both errors map to litellm's: agents shorten their history at one and try another model at the
    other."""
    arguments: dict[str, Any] = {
        "api_base": wire.url + PATHS[provider],
        "api_key": "none",
        "num_retries": 0,
        "max_tokens": 5,
    }
    long = [{"role": "user", "content": "word " * 60_000}]
    with pytest.raises(ContextWindowExceededError):
        litellm.completion(model=f"{provider}/tiny", messages=long, **arguments)
    with pytest.raises(NotFoundError):
        litellm.completion(model=f"{provider}/other", messages=long, **arguments)
