"""Earlier tool calls that clients send, in the form that templates get."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.prompt.chat_messages import normalize

ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def shown(arguments: str) -> object:
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    [message] = normalize([{"role": "assistant", "content": None, "tool_calls": [call]}])
    return message["tool_calls"][0]["function"]["arguments"]


def read_by_python(arguments: str) -> object:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


@pytest.mark.slow
@settings(max_examples=200)
@given(arguments=st.dictionaries(st.text(), ARGUMENTS, max_size=4), ascii_only=st.booleans())
def test_arguments_are_what_json_says(arguments: dict[str, object], ascii_only: bool) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    assert repr(shown(text)) == repr(read_by_python(text))


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": NaN}', '{"a": 1e400}', '{"a": -0.0}', '{"a": 1, "b": 2, "a": 3}'),
        *('{"a": ' + "9" * 40 + "}", '{"a": ' + "9" * 5000 + "}", "[" * 100_000, "\ufeff{}"),
        *("[1]", '"text"', "{'a': 1}", '{"a": 1', "", " {} ", "ls -l"),
    ],
)
def test_what_is_hardly_json_is_what_python_makes_of_it(text: str) -> None:
    """Unusual or invalid JSON is parsed as Python parses it, or stays text."""
    assert repr(shown(text)) == repr({} if text == "" else read_by_python(text))


@pytest.mark.parametrize(
    "text", ['{"a": "\\ud800"}', '{"\\udfff": NaN}', '{"a": ' + "[" * 70 + "]" * 70 + "}"]
)
def test_what_no_template_could_print_stays_the_text_that_it_was(text: str) -> None:
    """Arguments with half of a surrogate pair (no encoding) or too deep nesting stay text."""
    assert shown(text) == text
