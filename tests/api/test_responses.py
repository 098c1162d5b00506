"""Promises of /v1/responses, checked on a real server and model with the openai client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseCustomToolCallOutputParam,
    ResponseFunctionToolCall,
    ResponseInputItemParam,
    ResponseOutputMessage,
    ResponseStreamEvent,
    ToolParam,
)
from pydantic import BaseModel, Field

from tests.api.server import Server
from tests.api.test_chat import token_ids

BASH: ToolParam = {
    "type": "function",
    "name": "bash",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}
PATCH: ToolParam = {"type": "custom", "name": "apply_patch", "description": "Change files."}
CRM: ToolParam = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
}
TOOLS = [BASH, PATCH, CRM]
LONG = "Once upon a time there was a machine that remembered everything it had ever been told. " * 3


def call_text(name: str, /, **arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


LOOK = "Let me look.\n" + call_text("bash", command="ls -l") + "\n" + call_text("bash", command="pwd")


class Replies:
    """Forces the model to say a text, by its tokens."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def __call__(self, text: str) -> dict[str, object]:
        return {"replay_token_ids": token_ids(self._http, text + "<|im_end|>")}


@pytest.fixture
def saying(http: httpx.Client) -> Replies:
    return Replies(http)


def test_a_text_is_answered(client: openai.OpenAI, saying: Replies) -> None:
    """A string as input gets a message, correct counts and the request's fields."""
    answer = client.responses.create(
        model="tiny",
        input="hello",
        instructions="Be brief.",
        metadata={"task": "greet"},
        extra_body=saying("Good day."),
    )
    assert answer.object == "response"
    assert answer.status == "completed"
    assert answer.output_text == "Good day."
    [message] = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.id.startswith("msg_")
    assert message.status == "completed"
    assert answer.id.startswith("resp_")
    assert answer.error is None
    assert answer.incomplete_details is None
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"task": "greet"})
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert answer.completed_at is not None


def test_the_length_cuts_a_response_off(client: openai.OpenAI) -> None:
    """max_output_tokens makes the response, and the item that it cuts, incomplete."""
    answer = client.responses.create(
        model="tiny", input="hello", max_output_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    [message] = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "incomplete"


# ---- streams ----


def test_a_stream_in_openais_order(client: openai.OpenAI, saying: Replies) -> None:
    """Events come in OpenAI's order, numbered without a gap."""
    stream = client.responses.create(
        model="tiny", input="hello", tools=[BASH], stream=True, extra_body=saying("Go. " + call_text("bash"))
    )
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert without_repeats(event.type for event in events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def without_repeats(names: Iterator[str]) -> list[str]:
    kept: list[str] = []
    for name in names:
        if not kept or kept[-1] != name:
            kept.append(name)
    return kept


@pytest.mark.parametrize(
    "reply",
    [
        "Good day.",
        LOOK,
        call_text("bash", command="ls"),
        call_text("apply_patch", input='*** Begin Patch\n+ "\u00e9" \\n\n*** End Patch'),
        "Two.\n" + call_text("crm__find", name="Ada") + "\n" + call_text("apply_patch", input="x"),
        "",
    ],
)
def test_streamed_items_are_those_of_the_response(client: openai.OpenAI, saying: Replies, reply: str) -> None:
    """Each streamed item equals, including its id, the item of the completed and of the stored response; the
    deltas add up to it."""
    with client.responses.stream(
        model="tiny", input="hello", tools=TOOLS, extra_body=saying(reply)
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    kept = client.responses.retrieve(final.id)
    output = [item.to_dict() for item in kept.output]
    assert done == output
    assert [item.id for item in added] == [item["id"] for item in output]
    assert [item.to_dict()["status"] for item in added] == ["in_progress"] * len(output)
    assert [text_of(item) for item in output] == summed_deltas(events, len(output))
    assert final.status == "completed"


def text_of(item: dict[str, Any]) -> str:
    """The part of an item that is sent in deltas."""
    match item["type"]:
        case "message":
            return "".join(part["text"] for part in item["content"])
        case "function_call":
            return str(item["arguments"])
    return str(item["input"])


def summed_deltas(events: list[Any], num_items: int) -> list[str]:
    texts = [""] * num_items
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] += event.delta
    return texts


async def test_the_async_stream_helper_accumulates(server: Server, saying: Replies) -> None:
    """The client's own check of the events' order and identities finds no fault."""
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as client,
        client.responses.stream(model="tiny", input="hello", tools=TOOLS, extra_body=saying(LOOK)) as stream,
    ):
        final = await stream.get_final_response()
    calls = [item for item in final.output if isinstance(item, ResponseFunctionToolCall)]
    assert [call.arguments for call in calls] == ['{"command": "ls -l"}', '{"command": "pwd"}']


def test_a_stream_on_the_wire(http: httpx.Client, saying: Replies) -> None:
    """Every event is named by its type, and no [DONE] follows the last one, as in OpenAI's API."""
    calls = LOOK + call_text("apply_patch", input="x")
    body = {"input": "hello", "tools": TOOLS, "stream": True, "store": False, **saying(calls)}
    with http.stream("POST", "/v1/responses", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    payloads = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [payload["type"] for payload in payloads]
    assert names[-1] == "response.completed"


def test_log_probabilities(client: openai.OpenAI) -> None:
    """Log probabilities, if requested, come with each delta, and all of them with the whole text."""
    stream = client.responses.create(
        model="tiny",
        input="hello",
        max_output_tokens=4,
        temperature=0,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        stream=True,
        extra_body={"ignore_eos": True},
    )
    events = list(stream)
    streamed = [
        logprob.to_dict()
        for event in events
        if event.type == "response.output_text.delta"
        for logprob in event.logprobs
    ]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [logprob.to_dict() for logprob in done.logprobs] == streamed
    assert len(streamed) == 4
    assert all(len(top["top_logprobs"]) == 2 for top in streamed)  # type: ignore[arg-type]


# ---- tools ----


def test_parallel_calls(client: openai.OpenAI, saying: Replies) -> None:
    """Text and two calls of one reply are three items; ``parallel_tool_calls`` off drops the second."""

    def kinds(parallel: bool) -> list[str]:
        answer = client.responses.create(
            model="tiny",
            input="hello",
            tools=[BASH],
            parallel_tool_calls=parallel,
            extra_body=saying(LOOK),
        )
        return [item.type for item in answer.output]

    assert kinds(parallel=True) == ["message", "function_call", "function_call"]
    assert kinds(parallel=False) == ["message", "function_call"]


def test_a_custom_tool_gets_its_text(client: openai.OpenAI, saying: Replies) -> None:
    """The model writes a function call; the client gets the input as plain text."""
    patch = '*** Begin Patch\n*** Update File: a.py\n-"old"\n+"new\\n"\n*** End Patch\n'
    answer = client.responses.create(
        model="tiny",
        input="hello",
        tools=[PATCH],
        extra_body=saying(call_text("apply_patch", input=patch)),
    )
    [call] = answer.output
    assert isinstance(call, ResponseCustomToolCall)
    assert (call.name, call.input) == ("apply_patch", patch)
    assert call.call_id
    assert call.namespace is None


def test_a_tool_in_a_namespace(client: openai.OpenAI, saying: Replies) -> None:
    """The model calls the tool by a joint name; the client gets name and namespace separately."""
    answer = client.responses.create(
        model="tiny", input="hello", tools=[CRM], extra_body=saying(call_text("crm__find", name="Ada"))
    )
    [call] = answer.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.namespace, call.name) == ("crm", "find")
    assert json.loads(call.arguments) == {"name": "Ada"}


def test_tools_that_are_not_run_here_are_left_out(client: openai.OpenAI, saying: Replies) -> None:
    """Server-run tools such as web_search are echoed, hidden from the model, and reported in the response."""
    search: ToolParam = {"type": "web_search"}
    with_search = client.responses.create(
        model="tiny", input="hello", tools=[BASH, search], extra_body=saying("no")
    )
    without = client.responses.create(model="tiny", input="hello", tools=[BASH], extra_body=saying("no"))
    assert [tool.type for tool in with_search.tools] == ["function", "web_search"]
    assert with_search.usage is not None
    assert without.usage is not None
    assert with_search.usage.input_tokens == without.usage.input_tokens
    assert "tools[1]" in str(with_search.to_dict()["warnings"])
    assert "warnings" not in without.to_dict()


def test_allowed_tools(client: openai.OpenAI, saying: Replies) -> None:
    """The model sees only the allowed tools."""

    def num_input_tokens(**choice: Any) -> int:
        answer: Response = client.responses.create(
            model="tiny", input="hello", extra_body=saying("no"), **choice
        )
        assert answer.usage is not None
        return answer.usage.input_tokens

    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "bash"}]}
    assert num_input_tokens(tools=TOOLS, tool_choice=allowed) == num_input_tokens(tools=[BASH])


def test_without_tool_choice_nothing_is_called(client: openai.OpenAI, saying: Replies) -> None:
    """With tool_choice none, text that looks like a call stays text."""
    answer = client.responses.create(
        model="tiny", input="hello", tools=[BASH], tool_choice="none", extra_body=saying(LOOK)
    )
    assert answer.output_text == LOOK


LIGHT: ToolParam = {
    "type": "function",
    "name": "light",
    "parameters": {
        "type": "object",
        "properties": {"state": {"enum": ["on", "off"]}},
        "required": ["state"],
        "additionalProperties": False,
    },
    "strict": True,
}
LAMP: Any = {**LIGHT, "name": "lamp"}
HOUSE: ToolParam = {
    "type": "namespace",
    "name": "house",
    "description": "Things at home.",
    "tools": [LAMP],
}


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("required", {(None, "light"), ("house", "lamp")}),
        ({"type": "function", "name": "light"}, {(None, "light")}),
        ({"type": "function", "name": "lamp", "namespace": "house"}, {("house", "lamp")}),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "lamp", "namespace": "house"}],
            },
            {("house", "lamp")},
        ),
    ],
)
def test_a_call_can_be_demanded(
    client: openai.OpenAI, choice: Any, called: set[tuple[str | None, str]]
) -> None:
    """A required call is made, with arguments that fit the schema, whatever the model would write."""
    answer: Response = client.responses.create(
        model="tiny",
        input="Light, please.",
        tools=[LIGHT, HOUSE],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    [call] = answer.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.namespace, call.name) in called
    assert json.loads(call.arguments)["state"] in ("on", "off")
    assert answer.status == "completed"


# ---- structured output ----


class Weather(BaseModel):
    """The schema of the client's answer."""

    city: Literal["Oslo", "Rome"]
    degrees: Annotated[int, Field(ge=0, le=9)]


def test_a_reply_is_parsed(client: openai.OpenAI) -> None:
    """With a schema the client can parse the reply, whatever the model would write."""
    answer = client.responses.parse(model="tiny", input="How is the weather?", text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


# ---- jobs of several turns ----


def cached_tokens(answer: Response) -> int:
    assert answer.usage is not None
    return answer.usage.input_tokens_details.cached_tokens


def covers(second: Response, first: Response) -> bool:
    """Whether the first prompt and reply were cached, except for a last partial block."""
    assert first.usage is not None
    return cached_tokens(second) > first.usage.total_tokens - 2 * 16


@pytest.mark.parametrize("kept_by", ["server", "client"])
def test_the_next_turn_finds_its_prompt_in_the_cache(
    client: openai.OpenAI, saying: Replies, kept_by: str
) -> None:
    """Whether the server stores the turns or the client sends all items: text, parallel calls and a custom
    call are rendered as the model wrote them, so the next prompt begins with this one."""
    reply = LOOK + "\n" + call_text("apply_patch", input='say "hi"\n')
    system = f"{kept_by} {LONG}"
    items: list[ResponseInputItemParam] = [
        {"role": "developer", "content": system},
        {"role": "user", "content": [{"type": "input_text", "text": "What is here?"}]},
    ]
    first = client.responses.create(
        model="tiny", input=items, tools=TOOLS, store=kept_by == "server", extra_body=saying(reply)
    )
    outputs: list[ResponseInputItemParam] = []
    for item in first.output:
        if isinstance(item, ResponseFunctionToolCall):
            outputs.append({"type": "function_call_output", "call_id": item.call_id, "output": "a.py"})
        elif isinstance(item, ResponseCustomToolCall):
            done: ResponseCustomToolCallOutputParam = {
                "type": "custom_tool_call_output",
                "call_id": item.call_id,
                "output": [{"type": "input_text", "text": "done"}],
            }
            outputs.append(done)
    assert len(outputs) == 3
    if kept_by == "server":
        second = client.responses.create(
            model="tiny",
            input=outputs,
            previous_response_id=first.id,
            tools=TOOLS,
            extra_body=saying("There is a.py."),
        )
    else:
        sent_back: Any = [item.to_dict() for item in first.output]
        second = client.responses.create(
            model="tiny",
            input=[*items, *sent_back, *outputs],
            tools=TOOLS,
            store=False,
            extra_body=saying("There is a.py."),
        )
    assert second.output_text == "There is a.py."
    assert covers(second, first)


def test_the_next_turn_belongs_to_the_job(client: openai.OpenAI, saying: Replies) -> None:
    """previous_response_id continues the job that the first turn named, and usage has the receipts."""
    first = client.responses.create(
        model="tiny",
        input=LONG,
        tools=[BASH],
        extra_body={**saying(call_text("bash", command="ls")), "job_id": "job-of-responses"},
    )
    [call] = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    second = client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "a.py"}],
        tools=[BASH],
        extra_body=saying("Done."),
    )
    receipts = [receipt_of(first), receipt_of(second)]
    assert [(receipt["job_id"], receipt["turn"]) for receipt in receipts] == [
        ("job-of-responses", 1),
        ("job-of-responses", 2),
    ]


def receipt_of(answer: Response) -> dict[str, Any]:
    assert answer.usage is not None
    receipt: Any = answer.usage.to_dict()["receipt"]
    return dict(receipt)


def test_instructions_are_not_carried_over(client: openai.OpenAI, saying: Replies) -> None:
    """As in OpenAI's API, the next turn has only its own instructions, or none."""
    first = client.responses.create(model="tiny", input="hello", instructions=LONG, extra_body=saying("Yes."))
    second = client.responses.create(
        model="tiny", input="again", previous_response_id=first.id, extra_body=saying("Yes.")
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens < first.usage.input_tokens


def test_a_conversation(client: openai.OpenAI, saying: Replies) -> None:
    """A conversation continues from its newest response, which the client need not name."""
    conversation = client.conversations.create(
        items=[{"role": "system", "content": LONG}], metadata={"task": "talk"}
    )
    first = client.responses.create(
        model="tiny", input="hello", conversation=conversation.id, extra_body=saying("One.")
    )
    second = client.responses.create(
        model="tiny", input="again", conversation={"id": conversation.id}, extra_body=saying("Two.")
    )
    assert covers(second, first)
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [getattr(item, "role", None) for item in items] == ["system", "user", "assistant", "user"]
    assert client.conversations.retrieve(conversation.id).metadata == {"task": "talk"}
    client.conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        client.responses.create(model="tiny", input="more", conversation=conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


# ---- stored responses ----


def test_a_response_is_kept(client: openai.OpenAI, saying: Replies) -> None:
    """A response can be retrieved unchanged, its items listed in pages, and deleted."""
    first = client.responses.create(model="tiny", input="hello", extra_body=saying("One."))
    second = client.responses.create(
        model="tiny", input="again", previous_response_id=first.id, extra_body=saying("Two.")
    )
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    page = client.responses.input_items.list(second.id, limit=2)
    assert len(page.data) == 2
    assert [item.id for item in page.data] == [
        item.id for item in client.responses.input_items.list(second.id)
    ][:2]
    assert len(list(client.responses.input_items.list(second.id, limit=1))) == 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="continues, is not stored"):
        client.responses.create(model="tiny", input="more", previous_response_id=second.id)


def test_a_response_that_is_not_to_be_stored_is_not(client: openai.OpenAI, saying: Replies) -> None:
    """With ``store: false`` nothing is stored."""
    answer = client.responses.create(model="tiny", input="hello", store=False, extra_body=saying("One."))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_items_can_be_referred_to(client: openai.OpenAI, saying: Replies) -> None:
    """An item_reference is replaced by a stored item, of the client or of the model."""
    first = client.responses.create(
        model="tiny", input=LONG, tools=[BASH], extra_body=saying(call_text("bash", command="ls"))
    )
    [said] = list(client.responses.input_items.list(first.id))
    [call] = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.id is not None
    second = client.responses.create(
        model="tiny",
        tools=[BASH],
        input=[
            {"type": "item_reference", "id": said.id},
            {"type": "item_reference", "id": call.id},
            {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"},
        ],
        extra_body=saying("Done."),
    )
    assert covers(second, first)


def test_input_tokens_are_counted(client: openai.OpenAI, saying: Replies) -> None:
    """The count equals the input tokens of the response that follows."""
    count = client.responses.input_tokens.count(model="tiny", input=LONG, tools=[BASH])
    answer = client.responses.create(model="tiny", input=LONG, tools=[BASH], extra_body=saying("One."))
    assert answer.usage is not None
    assert count.input_tokens == answer.usage.input_tokens


def test_truncation_leaves_out_the_oldest(client: openai.OpenAI, saying: Replies) -> None:
    """Too long an input is an error, unless the client allows truncation of the oldest messages."""
    turns: list[ResponseInputItemParam] = [{"role": "system", "content": "Be brief."}]
    for _ in range(20):
        turns += [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Yes."}]
    turns.append({"role": "user", "content": "And now?"})
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.responses.create(model="tiny", input=turns, extra_body=saying("Fine."))
    answer = client.responses.create(model="tiny", input=turns, truncation="auto", extra_body=saying("Fine."))
    assert answer.output_text == "Fine."
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 1024


# ---- in the background ----


def test_a_background_response_ends_by_itself(client: openai.OpenAI, saying: Replies) -> None:
    """A background response exists at once, and completes without its client."""
    begun = client.responses.create(
        model="tiny", input="hello", background=True, extra_body=saying("All by myself.")
    )
    assert begun.status == "queued"
    ended = until_ended(client, begun.id)
    assert ended.status == "completed"
    assert ended.output_text == "All by myself."
    assert client.responses.cancel(begun.id).status == "completed"


def until_ended(client: openai.OpenAI, response_id: str) -> Response:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
    raise AssertionError("the response did not end")


ENDLESS = {"ignore_eos": True, "min_tokens": 900}


def test_a_background_response_can_be_cancelled(client: openai.OpenAI, http: httpx.Client) -> None:
    """A cancelled response stops using the engine and has the status cancelled."""
    begun = client.responses.create(model="tiny", input="hello", background=True, extra_body=ENDLESS)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert http.get("/load").json()["server_load"] == 0


def test_a_background_response_says_that_it_runs(client: openai.OpenAI) -> None:
    """A background response is queued, then in progress, and ends, also if no one reads its events."""
    begun = client.responses.create(model="tiny", input="hello", background=True, extra_body=ENDLESS)
    deadline = time.monotonic() + 60
    while (status := client.responses.retrieve(begun.id).status) == "queued":
        assert time.monotonic() < deadline
    assert status == "in_progress"
    assert client.responses.cancel(begun.id).status == "cancelled"


def test_a_cancelled_stream_ends_with_an_event(client: openai.OpenAI) -> None:
    """The last event of a cancelled stream has the response with the status cancelled."""
    with client.responses.create(
        model="tiny", input="hello", background=True, stream=True, extra_body=ENDLESS
    ) as stream:
        created = next(iter(stream))
        assert created.type == "response.created"
        assert client.responses.cancel(created.response.id).status == "cancelled"
        events = [created, *stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "cancelled"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert client.responses.retrieve(created.response.id).to_dict() == events[-1].response.to_dict()


def test_only_background_responses_can_be_cancelled(client: openai.OpenAI, saying: Replies) -> None:
    """Other responses end with their connection."""
    answer = client.responses.create(model="tiny", input="hello", extra_body=saying("One."))
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(answer.id)


def test_a_background_stream_can_be_taken_up_again(client: openai.OpenAI, saying: Replies) -> None:
    """A client that lost its stream resumes after its last event; no event is lost or repeated."""
    text = "A long answer, which is given in many pieces."
    lost: list[ResponseStreamEvent] = []
    with client.responses.create(
        model="tiny", input="hello", background=True, stream=True, extra_body=saying(text)
    ) as stream:
        for event in stream:
            lost.append(event)
            if len(lost) == 5:
                break
    assert [event.type for event in lost[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert lost[0].type == "response.created"
    response_id = lost[0].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=4))
    numbers = [event.sequence_number for event in (*lost, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == text
    deltas = [event.delta for event in (*lost, *rest) if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text


def test_events_that_nobody_asked_for_are_not_kept(client: openai.OpenAI, saying: Replies) -> None:
    """Only a streamed background response can be streamed again."""
    answer = client.responses.create(model="tiny", input="hello", extra_body=saying("One."))
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.retrieve(answer.id, stream=True)


# ---- errors ----

BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "top_logprobs": 21}, "top_logprobs"),
    ({"input": "x", "truncation": "some"}, "truncation"),
    ({"input": "x", "temperature": 1000}, "temperature"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "background": True, "store": False}, "background"),
    ({"input": "x", "previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
    ({"input": "x", "conversation": "conv_1", "store": False}, "conversation"),
    ({"input": "x", "text": {"format": {"type": "poem"}}}, "text.format"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"input": "x", "text": {"format": {"type": []}}}, "text.format"),
    ({"input": [{"type": "telepathy"}]}, "input[0].type"),
    ({"input": [{"type": []}]}, "input[0].type"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": ["text"]}, "input[0]"),
    ({"input": {"role": "user", "content": "x"}}, "input"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input"),
    ({"input": "x", "max_output_tokens": 10**9}, "max_output_tokens"),
    ({"input": "x", "max_tokens": 10**9}, "max_tokens"),
    ({"input": "x", "metadata": {"a": 1}}, "metadata"),
    ({"input": "x", "metadata": {"a": "x" * 513}}, "metadata"),
    ({"input": "x", "metadata": {"a" * 65: "x"}}, "metadata"),
    ({"input": "x", "metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "local_shell_call_output", "id": "c", "output": "x"}]}, "input[0].id"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[0].output"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
    ({"input": [{"type": "shell_call", "call_id": "c"}]}, "input[0].action"),
    ({"input": [{"type": "shell_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "encrypted_content": "ctm1:?"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "compaction_trigger"}]}, "input[0].type"),
    ({"input": [{"type": "additional_tools", "tools": 1}]}, "input[0].tools"),
    ({"input": "x", "tools": [{}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": ["function"]}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools[0].parameters"),
    ({"input": "x", "tools": [{"type": "custom", "name": "f", "format": {}}]}, "tools[0].format.type"),
    (
        {"input": "x", "tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
        "tools[0].format",
    ),
    ({"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    (
        {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
        "tools[0].tools[0].type",
    ),
    ({"input": "x", "tools": [dict(BASH), {"type": "custom", "name": "bash"}]}, "tools[1].name"),
    ({"input": "x", "tool_choice": "sometimes"}, "tool_choice"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"input": "x", "tool_choice": {"type": "allowed_tools", "tools": {}}}, "tool_choice.tools"),
    (
        {
            "input": "x",
            "tools": [dict(BASH)],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]},
        },
        "tool_choice.tools[0].name",
    ),
]


@pytest.mark.parametrize(
    ("body", "field"), BAD_BODIES, ids=[f"{n}-{field}" for n, (_, field) in enumerate(BAD_BODIES)]
)
def test_a_bad_body_is_told_which_field(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    """The error is one sentence with status 400 and the field, streamed or not."""
    for stream in (False, True):
        answer = http.post("/v1/responses", json={**body, "stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == field, error


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (5, "input must be a string or a list of items."),
        ([{}], "input[0].type is missing."),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "No tool call found"),
        ([{"type": "reasoning", "summary": []}], "nothing to show to the model"),
    ],
)
def test_a_bad_input_is_told_what_is_wrong(http: httpx.Client, given: object, says: str) -> None:
    """The error uses the words of the request, not of the code that reads it."""
    answer = http.post("/v1/responses", json={"input": given})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_an_output_may_be_of_a_call_of_an_earlier_turn(http: httpx.Client) -> None:
    """The call may be in a stored response or in a conversation's first items, not in another job."""
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
    conversation = http.post("/v1/conversations", json={"items": [call]}).json()["id"]
    said = {"input": [call, output], "max_output_tokens": 1}
    previous = http.post("/v1/responses", json=said).json()["id"]
    for before in ({"conversation": conversation}, {"previous_response_id": previous}):
        answer = http.post("/v1/responses", json={"input": [output], "max_output_tokens": 1, **before})
        assert answer.status_code == 200, answer.text
    assert http.post("/v1/responses", json={"input": [output]}).status_code == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": "x", "model": "gpt-99"}, "model"),
        ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id"),
        ({"input": "x", "conversation": {"id": "conv_0"}}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id"),
        ({"input": [{"id": "msg_" + "0" * 36}]}, "input[0].id"),
    ],
)
def test_what_is_not_there_is_not_found(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    """A missing object gives status 404 and the field."""
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 404, answer.text
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=nobody"])
def test_a_bad_page(http: httpx.Client, query: str) -> None:
    """The error names the wrong query parameter."""
    response_id = http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1}).json()["id"]
    answer = http.get(f"/v1/responses/{response_id}/input_items?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]
