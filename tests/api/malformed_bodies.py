"""Malformed request bodies: seeded changes to a valid body of each endpoint."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
"""Where a value is in a body: keys and indices from the top."""

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": _SCHEMA}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
_CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "user", "content": "And now?"},
]
_SAMPLING = {
    "model": "tiny",
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 1,
    "stop": ["x"],
    "n": 1,
    "logit_bias": {"5": 1.0},
    "presence_penalty": 0.1,
    "stop_token_ids": [7],
    "bad_words": ["bad"],
    "priority": 0,
    "job_id": "job",
    "parent_job_id": "parent",
    "vllm_xargs": {"job_id": "job", "parent_job_id": "parent"},
}
_TURN = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ulm"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]},
]
_PROMPT = {
    "model": "tiny",
    "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
    "messages": _TURN,
    "tools": [{"name": "weather", "description": "d", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
    {"role": "user", "content": "And now?"},
]
_RESPONSE = {
    "model": "tiny",
    "input": _ITEMS,
    "instructions": "Be short.",
    "max_output_tokens": 2,
    "temperature": 0.5,
    "tools": [
        {"type": "function", "name": "weather", "parameters": _SCHEMA, "strict": False},
        {"type": "custom", "name": "patch", "description": "d"},
        {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
}

VALID_BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {**_SAMPLING, "messages": _CHAT, "tools": [_TOOL], "tool_choice": "auto", "logprobs": True},
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
            "reasoning_effort": "low",
        },
    ],
    "/v1/completions": [
        {**_SAMPLING, "prompt": "Once", "echo": False, "logprobs": 2},
        {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True, "structured_outputs": {"regex": "a+"}},
        {"prompt": [5, 6, 7], "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}},
    ],
    "/v1/chat/completions/render": [{**_SAMPLING, "messages": _CHAT, "tools": [_TOOL]}],
    "/v1/completions/render": [{**_SAMPLING, "prompt": [[5, 6], [7]]}],
    "/inference/v1/generate": [
        {"token_ids": [5, 6], "sampling_params": {**_SAMPLING, "logprobs": 2}, "request_id": "mine"},
        {"token_ids": [7], "sampling_params": {"max_tokens": 2}, "stream": True},
    ],
    "/tokenize": [{"model": "tiny", "messages": _CHAT, "tools": [_TOOL]}, {"prompt": "Once"}],
    "/detokenize": [{"model": "tiny", "tokens": [5, 6, 7]}],
    "/trace": [{"enabled": False}, {"enabled": False, "name": "trace.jsonl"}],
    "/v1/jobs/{job_id}/signals": [
        {"state": "started", "tool": "weather", "call_id": "call_1", "expected_s": 2.0, "fraction": 0.5}
    ],
    "/v1/messages": [
        {
            **_PROMPT,
            "max_tokens": 2,
            "stop_sequences": ["x"],
            "temperature": 0.5,
            "metadata": {"user_id": "u"},
        },
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True},
    ],
    "/v1/messages/count_tokens": [_PROMPT],
    "/v1/responses": [_RESPONSE, {"input": "hi", "max_output_tokens": 2, "stream": True}],
    "/v1/responses/input_tokens": [_RESPONSE],
    "/v1/conversations": [{"items": _ITEMS[:1], "metadata": {"a": "b"}}],
    "/v1/conversations/{conversation_id}": [{"metadata": {"a": "b"}}],
    "/v1/conversations/{conversation_id}/items": [{"items": _ITEMS[:1]}],
}
"""Some valid bodies for each endpoint that takes one."""

_RANKED = {"model": "tiny", "query": "a", "documents": ["a", {"text": "b"}], "top_n": 2}
_SCORED = {"model": "tiny", "queries": "a", "documents": ["a", "b"], "truncate_prompt_tokens": 16}
POOLING_BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [
        {"model": "tiny", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8, "user": "u"},
        {"input": [[5, 6], [7]], "normalize": False, "priority": 0, "cache_salt": "s"},
        {"input": "a", "prompt_name": "query", "truncate_prompt_tokens": -1, "add_special_tokens": False},
        {"messages": [{"role": "user", "content": "a"}], "truncate_prompt_tokens": -1},
    ],
    "/pooling": [{"model": "tiny", "input": [5, 6], "task": "token_embed", "use_activation": True}],
    "/classify": [{"model": "tiny", "input": ["a", "b"]}],
    "/score": [_SCORED, {"text_1": ["a"], "text_2": "b"}],
    "/v1/score": [_SCORED],
    "/rerank": [_RANKED],
    "/v1/rerank": [_RANKED],
    "/v2/rerank": [{**_RANKED, "return_documents": False}],
}
"""Some valid bodies for each endpoint of models that pool."""


@dataclass(frozen=True, slots=True)
class MalformedBody:
    """A request that is most likely invalid, and what was changed to make it so."""

    path: str
    body: bytes
    content_type: str
    change: str


def malformed_bodies(
    number: int, seed: int, valid_bodies: dict[str, list[dict[str, Any]]] = VALID_BODIES
) -> Iterator[MalformedBody]:
    """Yields ``number`` bodies, the same ones for the same seed; cycles through all endpoints and changes."""
    chance = random.Random(seed)
    targets = [(path, body) for path, bodies in valid_bodies.items() for body in bodies]
    for index in range(number):
        path, valid = targets[index % len(targets)]
        yield _malformed(chance, path, valid, index)


def _malformed(chance: random.Random, path: str, valid: dict[str, Any], index: int) -> MalformedBody:
    if index % 5 < 3:
        body, change = _with_changed_values(chance, valid)
        return MalformedBody(path, body, "application/json", change)
    if index % 5 == 3:
        spoil = chance.choice(_SPOILERS)
        text = json.dumps(valid).encode()
        return MalformedBody(path, spoil(chance, text), "application/json", spoil.__name__)
    content_type = chance.choice(_CONTENT_TYPES)
    body, change = _with_changed_values(chance, valid)
    return MalformedBody(path, body, content_type, f"{change} as {content_type!r}")


# ---- values ----

_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400),
    *(0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", " ", "0", "-1", "NaN", "null", "true", "x" * 70_000, "\x00", "\ud800", "\udfff\ud800", "\ufeff"),
    *(
        "\U0001f984" * 100,
        "../../etc/passwd",
        "{{ 7 * 7 }}",
        "{% for i in range(9) %}",
        "<tool_call>",
        "%s%n",
    ),
    *([], {}, [[]], [{}], {"": ""}, [None], ["\ud800"], {"\ud800": 1}, [[[[[[[]]]]]]], {"type": "nothing"}),
    *([0] * 3000, [""] * 3000, [{}] * 3000, {str(number): number for number in range(3000)}),
    *({"type": "object"}, {"type": []}, {"$ref": "#"}, {"role": "nobody", "content": "x"}, {"content": 5}),
    *(
        "nobody",
        "developer",
        "required",
        {"type": "function"},
        {"type": "tool"},
        "(a{1,99}){1,99}",
        "(",
        "[z-a]",
    ),
]


def _nested(chance: random.Random) -> Any:
    value: Any = chance.choice([1, "x", None])
    for _ in range(chance.choice([20, 100, 190])):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return value


def _with_changed_values(chance: random.Random, valid: dict[str, Any]) -> tuple[bytes, str]:
    """Changes, removes, moves or extends one to three values."""
    body: Any = copy.deepcopy(valid)
    changes = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        where = chance.choice(list(_paths(body)))
        change = chance.choice(_CHANGES)
        change(chance, _parent(body, where), where[-1])
        changes.append(f"{change.__name__} {'.'.join(map(str, where))}")
        if not any(_paths(body)):
            break
    return _encoded(body), ", ".join(changes)


def _encoded(body: Any) -> bytes:
    """Encodes as JSON that may hold NaN, lone surrogates and integers of any length."""
    return json.dumps(body).encode()


def _paths(value: Any, above: Path = ()) -> Iterator[Path]:
    """Yields the path of each value below the top; skips values that are very long or deeply nested."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    if len(items) > 100 or len(above) > 8:
        return
    for key, item in items:
        yield (*above, key)
        yield from _paths(item, (*above, key))


def _parent(body: Any, path: Path) -> Any:
    for key in path[:-1]:
        body = body[key]
    return body


def replace(chance: random.Random, parent: Any, key: str | int) -> None:
    parent[key] = _nested(chance) if chance.random() < 0.05 else copy.deepcopy(chance.choice(_VALUES))


def take_out(chance: random.Random, parent: Any, key: str | int) -> None:
    del parent[key]


def wrap(chance: random.Random, parent: Any, key: str | int) -> None:
    parent[key] = [parent[key]] if chance.random() < 0.5 else {"value": parent[key]}


def as_text(chance: random.Random, parent: Any, key: str | int) -> None:
    parent[key] = str(parent[key])


def negate(chance: random.Random, parent: Any, key: str | int) -> None:
    value = parent[key]
    parent[key] = -value - 1 if isinstance(value, int | float) else copy.deepcopy(chance.choice(_VALUES))


def repeat(chance: random.Random, parent: Any, key: str | int) -> None:
    value = parent[key]
    parent[key] = value * chance.choice([2, 50]) if isinstance(value, str | list) else [value] * 3


def rename(chance: random.Random, parent: Any, key: str | int) -> None:
    if isinstance(parent, dict):
        parent[chance.choice(["", "type", "role", "content", "name", str(key).upper()])] = parent.pop(key)
    else:
        parent.insert(0, copy.deepcopy(chance.choice(_VALUES)))


_CHANGES: list[Callable[[random.Random, Any, str | int], None]] = [
    *(replace, replace, replace, replace, take_out, wrap, as_text, negate, repeat, rename)
]

# ---- texts ----


def cut_off(chance: random.Random, text: bytes) -> bytes:
    return text[: chance.randrange(len(text))]


def flipped_bytes(chance: random.Random, text: bytes) -> bytes:
    spoilt = bytearray(text)
    for _ in range(chance.choice([1, 1, 3, 20])):
        spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
    return bytes(spoilt)


def inserted_bytes(chance: random.Random, text: bytes) -> bytes:
    at = chance.randrange(len(text))
    pieces = [
        b"\xff",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\x00",
        b'"',
        b"{",
        b"]",
        b",",
        b"\\",
        b"\\u",
        b"NaN",
        b"//",
    ]
    return text[:at] + chance.choice(pieces) + text[at:]


def duplicate_keys(chance: random.Random, text: bytes) -> bytes:
    fields = [
        (key, value) for key, value in json.loads(text).items() for _ in range(chance.choice([1, 2, 3]))
    ]
    values = [(key, value if chance.random() < 0.5 else chance.choice(_VALUES)) for key, value in fields]
    return b"{" + b",".join(json.dumps(k).encode() + b":" + _encoded(v) for k, v in values) + b"}"


def other_encoding(chance: random.Random, text: bytes) -> bytes:
    return text.decode().encode(chance.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-be", "cp037"]))


def appended(chance: random.Random, text: bytes) -> bytes:
    return text + chance.choice([b"x", b"{}", text, b"\x00", b",", b"\xff" * 100])


def very_deep(chance: random.Random, text: bytes) -> bytes:
    opening, closing = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = chance.choice([201, 5000, 200_000])
    return text[:-1] + b', "metadata": ' + opening * depth + b"1" + closing * chance.choice([0, depth]) + b"}"


def very_long_number(chance: random.Random, text: bytes) -> bytes:
    number = chance.choice(
        [b"1" * 5000, b"1e999999", b"-" + b"9" * 400, b"0." + b"0" * 5000 + b"1", b"1E+400"]
    )
    keys = [key for key, value in json.loads(text).items() if not isinstance(value, list)] or ["max_tokens"]
    return text[:-1] + b", " + json.dumps(chance.choice(keys)).encode() + b": " + number + b"}"


def very_many_values(chance: random.Random, text: bytes) -> bytes:
    key = json.dumps(chance.choice(list(json.loads(text)))).encode()
    piece = chance.choice([b"1,", b"[],", b'"",', b"[1],", b"null,"])
    return text[:-1] + b", " + key + b": [" + piece * chance.choice([10_000, 100_000]) + piece[:-1] + b"]}"


def not_an_object(chance: random.Random, text: bytes) -> bytes:
    return chance.choice([b"", b" ", b"null", b"1", b'"x"', b"[]", b"[" + text + b"]", b"true", b"undefined"])


_SPOILERS = [
    *(
        cut_off,
        cut_off,
        flipped_bytes,
        flipped_bytes,
        inserted_bytes,
        duplicate_keys,
        other_encoding,
        appended,
    ),
    *(very_deep, very_long_number, very_many_values, not_an_object),
]

_CONTENT_TYPES = [
    *("application/json", "application/json", "application/json; charset=utf-16", "text/plain", "text/html"),
    *("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/octet-stream"),
    *("application/xml", "", ";", "a/" + "b" * 2000),
]
