"""Promises of ids of calls in a history: a format's templates get ids that they accept."""

from __future__ import annotations

from typing import Any

from engine.tool_parsers.call_ids import KimiIds, MistralIds, with_native_ids


def history(*ids: str) -> list[dict[str, Any]]:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": {}}} for each in ids]
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": each, "content": "r"} for each in ids),
    ]


def ids_of(messages: list[dict[str, Any]]) -> list[str]:
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    return [*calls, *(message["tool_call_id"] for message in messages if "tool_call_id" in message)]


def test_foreign_ids_become_kimis_own_and_its_own_stay() -> None:
    named = with_native_ids(history("call_abc", "functions.f:7"), KimiIds())
    assert ids_of(named) == ["functions.f:0", "functions.f:7"] * 2


def test_the_calls_of_a_conversation_are_counted_through() -> None:
    named = with_native_ids([*history("a"), *history("b")], KimiIds())
    assert ids_of(named) == ["functions.f:0", "functions.f:1"] * 2


def test_mistral_gets_nine_letters_or_digits_the_same_each_time() -> None:
    first, again = (with_native_ids(history("call_abc", "AbCdEfGh1"), MistralIds()) for _ in range(2))
    assert ids_of(first) == ids_of(again)
    assert ids_of(first)[1] == ids_of(first)[3] == "AbCdEfGh1"
    assert all(len(each) == 9 and each.isalnum() for each in ids_of(first))
