"""Promises of /v1/conversations/{id}/items, with the openai client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

Item = Any


def said(text: str, role: str = "user") -> Item:
    return {"type": "message", "role": role, "content": text}


def texts_of(client: openai.OpenAI, conversation_id: str, **query: Any) -> list[str]:
    items = client.conversations.items.list(conversation_id, **query)
    return [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]


def test_items_are_added_read_and_taken_out(client: openai.OpenAI) -> None:
    """Items are listed in the order they were said, across pages, and are found by id."""
    conversation = client.conversations.create(items=[said("one")], metadata={"task": "talk"})
    added = client.conversations.items.create(
        conversation.id, items=[said("two", "assistant"), said("three")]
    )
    assert [item.id for item in added.data] == [added.first_id, added.last_id]
    assert texts_of(client, conversation.id, order="asc", limit=2) == ["one", "two", "three"]
    assert texts_of(client, conversation.id) == ["three", "two", "one"]
    two = client.conversations.items.retrieve(str(added.data[0].id), conversation_id=conversation.id)
    assert two.type == "message"
    assert (two.role, two.status, two.content[0].type) == ("assistant", "completed", "output_text")
    left = client.conversations.items.delete(two.id, conversation_id=conversation.id)
    assert (left.id, left.metadata) == (conversation.id, {"task": "talk"})
    assert texts_of(client, conversation.id, order="asc") == ["one", "three"]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(two.id, conversation_id=conversation.id)


def test_a_response_goes_on_from_added_items(client: openai.OpenAI, http: httpx.Client) -> None:
    """A response continues from added items; its output becomes items that can be deleted."""
    conversation = client.conversations.create()
    client.conversations.items.create(conversation.id, items=[said("Ada has 3 cats.")])
    answer = client.responses.create(
        model="tiny", input="How many?", conversation=conversation.id, max_output_tokens=2
    )
    whole = [said("Ada has 3 cats."), said("How many?")]
    count = http.post("/v1/responses/input_tokens", json={"input": whole}).json()["input_tokens"]
    assert answer.usage is not None
    assert answer.usage.input_tokens == count
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.id for item in items][-1] == answer.output[-1].id
    client.conversations.items.delete(str(items[0].id), conversation_id=conversation.id)
    client.conversations.items.delete(str(items[-1].id), conversation_id=conversation.id)
    assert texts_of(client, conversation.id, order="asc") == ["How many?"]
    body = {"input": "Well?", "conversation": conversation.id, "max_output_tokens": 1}
    assert http.post("/v1/responses", json=body).status_code == 200


def test_an_output_may_be_added_after_its_call(client: openai.OpenAI) -> None:
    """A call and its output may be added in separate requests."""
    conversation = client.conversations.create(items=[said("Look.")])
    call: Item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    client.conversations.items.create(conversation.id, items=[call])
    output: Item = {"type": "function_call_output", "call_id": "c", "output": "x"}
    client.conversations.items.create(conversation.id, items=[output])
    kinds = [item.type for item in client.conversations.items.list(conversation.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]
    with pytest.raises(openai.BadRequestError, match="No tool call found"):
        client.conversations.items.create(
            conversation.id,
            items=[output | {"call_id": "other"}],
        )


def test_what_is_noted_of_a_conversation_can_be_changed(client: openai.OpenAI) -> None:
    """A conversation's metadata can be changed; its items stay."""
    conversation = client.conversations.create(items=[said("one")], metadata={"a": "b"})
    client.conversations.items.create(conversation.id, items=[said("two")])
    changed = client.conversations.update(conversation.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"}
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    assert texts_of(client, conversation.id, order="asc") == ["one", "two"]


@pytest.mark.parametrize(
    ("method", "path", "said_of_it"),
    [
        ("POST", "/v1/responses/compact", "does not compact conversations"),
        ("GET", "/v1/responses/compact", "not the id of a response"),
        ("GET", "/v1/responses/resp_1", "not stored"),
        ("GET", "/v1/conversations/resp_1", "not the id of a conversation"),
        ("GET", "/v1/conversations/conv_1/items", "not stored"),
        ("POST", "/v1/conversations/conv_1/items", "not stored"),
        ("DELETE", "/v1/conversations/conv_1/items/msg_1", "not stored"),
        ("POST", "/v1/conversations/conv_1", "not stored"),
    ],
)
def test_what_is_not_there_says_so(http: httpx.Client, method: str, path: str, said_of_it: str) -> None:
    """An unknown path is never taken for an id."""
    body = {"items": [said("x")], "metadata": {}} if method == "POST" else None
    answer = http.request(method, path, json=body)
    assert answer.status_code == 404, answer.text
    assert said_of_it in answer.json()["error"]["message"]
