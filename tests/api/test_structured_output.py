"""Structured output over HTTP, from a model with random weights: all structure comes from the grammar."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Tell me about a person."}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["tall", "old", "kind"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FREE = {"max_tokens": 500, "temperature": 1.0}


def json_schema(schema: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **options}}


def ask(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "A person: "}
    response = http.post(path, json={**body, **FREE, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_response_format_is_kept(http: httpx.Client, path: str, seed: int) -> None:
    """The answer is valid JSON of the schema, and ends with it."""
    choice = ask(http, path, response_format=json_schema(PERSON, strict=True), seed=seed)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text_of(choice)), PERSON)


def test_a_client_parses_streamed_json(client: openai.OpenAI) -> None:
    """With OpenAI's client the streamed pieces form the JSON; the last chunk's finish reason is stop."""
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Someone?"}],
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
            max_tokens=500,
            seed=3,
            stream=True,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), PERSON)
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["red", "green", "blå"]}, "red|green|blå"),
        ({"grammar": 'start: "<" NAME ">"\nNAME: /[a-z]{1,6}/'}, "<[a-z]{1,6}>"),
        ({"grammar": 'root ::= ("yes" | "no") "!"'}, "(yes|no)!"),
        ({"json": {"enum": [1, "two", None]}, "disable_any_whitespace": True}, '1|"two"|null'),
        ({"json": json.dumps({"type": "boolean"})}, "true|false"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_structured_outputs_are_followed(
    http: httpx.Client, path: str, wanted: dict[str, Any], pattern: str
) -> None:
    """Each kind of constraint holds for the whole output."""
    choice = ask(http, path, structured_outputs=wanted)
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, text_of(choice))


def test_any_json_object(http: httpx.Client) -> None:
    """json_object begins an object, and ends it if the limit allows."""
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        choice = ask(http, CHAT, **fields, max_tokens=60)
        assert text_of(choice).startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text_of(choice)), dict)


def test_constrained_and_plain_requests_share_a_batch(http: httpx.Client) -> None:
    """Twelve concurrent requests, constrained or not; the plain ones answer as they do alone."""
    plain = {"temperature": 0.0, "max_tokens": 40}
    alone = text_of(ask(http, CHAT, **plain))
    forms: list[dict[str, Any]] = [
        plain,
        {"response_format": json_schema(PERSON)},
        {"structured_outputs": {"regex": "(ab|cd){5,9}"}},
        {"structured_outputs": {"choice": ["x", "yy", "zzz"]}},
    ]
    with ThreadPoolExecutor(12) as threads:
        choices = list(threads.map(lambda form: ask(http, CHAT, **form), forms * 3))
    texts = [text_of(choice) for choice in choices]
    assert texts[0::4] == [alone] * 3
    for text in texts[1::4]:
        jsonschema.validate(json.loads(text), PERSON)
    assert all(re.fullmatch("(ab|cd){5,9}", text) for text in texts[2::4])
    assert set(texts[3::4]) <= {"x", "yy", "zzz"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": json_schema({"type": "strin"})}, "response_format.json_schema.schema"),
        (
            {"response_format": json_schema({"type": "array", "uniqueItems": True}, strict=True)},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": json_schema({}), "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "x"}}},
            "response_format.format.type",
        ),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"grammar": "start: /a/"}, "grammar"),
        ({"regex": "a"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"structural_tag": {"type": "x"}}, "structural_tag"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "json_object", "grammar": "x"}}, "response_format.grammar"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_form_is_refused_before_anything_is_sent(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    """A wrong constraint gets 400 with the field and one sentence, streamed or not."""
    body = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    response = http.post(path, json={**body, **fields, "stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert len(error["message"]) < 600


def test_an_old_field_names_the_new_one(http: httpx.Client) -> None:
    """guided_* fields are refused with an error that names the new field."""
    response = http.post(COMPLETIONS, json={"prompt": "x", "guided_choice": ["a"]})
    assert "structured_outputs.choice" in response.json()["error"]["message"]


def test_a_schema_that_is_not_strict_is_followed_as_far_as_it_can_be(http: httpx.Client) -> None:
    """Without strict, an unenforceable keyword such as uniqueItems is no error."""
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3}
    choice = ask(http, CHAT, response_format=json_schema(schema))
    assert set(json.loads(text_of(choice))) <= {1, 2}


COLOURS = ["red", "blå", 'say "x"']
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {
                    "colour": {"enum": COLOURS},
                    "layers": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["colour", "layers"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "wait",
            "parameters": {
                "type": "object",
                "properties": {"units": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
                "required": ["units"],
                "additionalProperties": False,
                "uniqueItems": True,
            },
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
PAINT = {"type": "function", "function": {"name": "paint"}}


def calls_of(choice: dict[str, Any]) -> list[str]:
    """Names of the calls, after checking each against its tool's schema."""
    calls = choice["message"]["tool_calls"]
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return [call["function"]["name"] for call in calls]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_required_call_is_made(http: httpx.Client, seed: int) -> None:
    """A model with random weights calls one of the tools with valid arguments, and says nothing else."""
    choice = ask(http, CHAT, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert calls_of(choice) in (["paint"], ["wait"])


def test_a_named_tool_is_called(http: httpx.Client) -> None:
    """The named tool is called once; the reply then ends with stop, as in V1."""
    for tool in TOOLS:
        named = {"type": "function", "function": {"name": tool["function"]["name"]}}
        choice = ask(http, CHAT, tools=TOOLS, tool_choice=named)
        assert choice["finish_reason"] == "stop"
        assert calls_of(choice) == [tool["function"]["name"]]


def test_several_calls_may_be_required(http: httpx.Client) -> None:
    """At least one call is made, and all calls are complete."""
    for seed in range(3):
        choice = ask(http, CHAT, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=400)
        assert len(calls_of(choice)) >= 1


def test_a_forced_call_is_streamed(client: openai.OpenAI) -> None:
    """OpenAI's client assembles from the deltas the same call as without streaming."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": PAINT,
        "max_tokens": 300,
        "seed": 5,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert [delta.function.name for delta in deltas if delta.function and delta.function.name] == ["paint"]
    arguments = "".join(delta.function.arguments or "" for delta in deltas if delta.function)
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_a_form_leaves_room_for_calls(http: httpx.Client) -> None:
    """With tools and a schema a reply is either JSON or a call; with tool_choice none it is JSON."""
    made = set()
    for seed in range(8):
        choice = ask(http, CHAT, tools=TOOLS, response_format=json_schema(PERSON), seed=seed)
        made.add(choice["finish_reason"])
        if choice["message"].get("tool_calls"):
            calls_of(choice)
        else:
            jsonschema.validate(json.loads(text_of(choice)), PERSON)
    assert made == {"stop", "tool_calls"}
    choice = ask(http, CHAT, tools=TOOLS, tool_choice="none", response_format=json_schema(PERSON))
    jsonschema.validate(json.loads(text_of(choice)), PERSON)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": PAINT}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "fly"}}}, "tool_choice"),
        (
            {
                "tools": [
                    {
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {"properties": {"a": {"type": "?"}}},
                        }
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_a_choice_that_cannot_be_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """An impossible tool choice gets 400 with the field."""
    response = http.post(CHAT, json={"messages": HELLO, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


ODD = [
    {"type": "string", "pattern": "^(?!x)y$"},
    {"type": "string", "pattern": r"\bfoo\b"},
    {"type": "string", "pattern": r"\A[a-z]+\Z"},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**64},
    {"$ref": "#/definitions/Nope"},
    {"$ref": "http://127.0.0.1:9/x.json"},
    {"type": "any"},
    {"type": None},
    None,
]
"""Schemas of agents' tools that the grammar library does not support."""


def odd_tool(schema: Any, **fields: Any) -> dict[str, Any]:
    properties = {"a": schema, "b": {"const": 1}}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["b"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": "odd", "parameters": parameters, **fields}}


@pytest.mark.parametrize("schema", ODD)
def test_an_odd_schema_costs_its_tool_a_part(http: httpx.Client, schema: Any) -> None:
    """In forced calls and with a response format, only the unenforceable part of a schema is dropped."""
    named = {"type": "function", "function": {"name": "odd"}}
    body = {"messages": HELLO, "tools": [odd_tool(schema), *TOOLS], "max_tokens": 300, "temperature": 0}
    choice = ask(http, CHAT, **{**body, "tool_choice": named})
    [call] = choice["message"]["tool_calls"]
    if choice["finish_reason"] == "stop":  # A model with random weights may never end a string.
        said = json.loads(call["function"]["arguments"])
        assert said["b"] == 1
        assert set(said) <= {"a", "b"}
    short = {**body, "max_tokens": 2}
    assert http.post(CHAT, json={**short, "tool_choice": "required"}).status_code == 200
    assert http.post(CHAT, json={**short, "response_format": {"type": "json_object"}}).status_code == 200
    parameters = odd_tool(schema)["function"]["parameters"]
    assert http.post(CHAT, json={**short, "response_format": json_schema(parameters)}).status_code == 200
    anthropic = {
        "messages": HELLO,
        "max_tokens": 2,
        "tools": [{"name": "odd", "input_schema": parameters}],
        "tool_choice": {"type": "any"},
    }
    assert http.post("/v1/messages", json=anthropic).status_code == 200
    responses = {
        "input": "Hello",
        "max_output_tokens": 2,
        "tools": [{"type": "function", "name": "odd", "parameters": parameters}],
        "tool_choice": "required",
    }
    assert http.post("/v1/responses", json=responses).status_code == 200


def test_a_strict_tool_that_cannot_be_enforced_is_named(http: httpx.Client) -> None:
    """The message names the tool, in the client's words."""
    for index, schema in enumerate(ODD):
        tools = [*TOOLS, odd_tool(schema, strict=True)]
        answer = http.post(CHAT, json={"messages": HELLO, "tools": tools, "tool_choice": "required"})
        assert answer.status_code == 400, ODD[index]
        error = answer.json()["error"]
        assert error["param"] == "tools"
        assert "'odd'" in error["message"]
        assert "call_" not in error["message"]


@pytest.mark.slow
def test_a_tool_that_is_too_complex_costs_no_request(http: httpx.Client) -> None:
    """A schema that would take minutes to compile is not enforced, and the request is served."""
    eater = {"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(1, 30)]}
    body = {
        "messages": HELLO,
        "tools": [odd_tool(eater), *TOOLS],
        "tool_choice": "required",
        "max_tokens": 2,
        "chat_template": "{{ messages[0].content }}",
    }
    answer = http.post(CHAT, json=body, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("form", "matches"),
    [
        ({"syntax": "regex", "definition": "x{3}"}, "x{3}"),
        ({"syntax": "regex", "definition": r"^(say \"x\"|\\)$"}, r'say "x"|\\'),
        ({"syntax": "lark", "definition": 'start: "add" /[0-9]{2}/ ";"'}, "add[0-9]{2};"),
        ({"syntax": "lark", "definition": 'start: line+\nline: "a\\n" | "b\\n"'}, "(a\n|b\n)+"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_gets_text_of_its_grammar(
    client: openai.OpenAI, form: dict[str, Any], matches: str, stream: bool
) -> None:
    """A named custom tool is called with a text that follows its grammar, streamed or not."""
    body: dict[str, Any] = {
        "model": "tiny",
        "input": "Hello",
        "tools": [{"type": "custom", "name": "ap", "format": {"type": "grammar", **form}}],
        "tool_choice": {"type": "custom", "name": "ap"},
        "max_output_tokens": 400,
    }
    if stream:
        with client.responses.stream(**body) as events:
            response = events.get_final_response()
    else:
        response = client.responses.create(**body)
    item = response.output[-1]
    assert item.type == "custom_tool_call"
    assert item.name == "ap"
    if response.status == "completed":
        assert re.fullmatch(matches, item.input), item.input
    assert not (response.model_extra or {}).get("warnings")


def test_a_grammar_that_is_not_enforced_is_spoken_of(http: httpx.Client) -> None:
    """If the tool choice is free, a warning says that the Lark grammar is not enforced; if a call is
    required, the grammar is refused with its field."""
    form = {"type": "grammar", "definition": "a"}
    tools = [
        {"type": "custom", "name": name, "format": {**form, "syntax": syntax}}
        for name, syntax in (("l", "lark"), ("r", "regex"))
    ]
    body = {"input": "Hello", "tools": tools, "max_output_tokens": 2}
    warnings = http.post("/v1/responses", json=body).json()["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == ["tools[0].format"]
    refused = http.post("/v1/responses", json={**body, "tool_choice": "required"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[0].format"
    wrong = {**tools[0], "format": {**form, "syntax": "lark", "definition": "start: nothing"}}
    named = {**body, "tools": [wrong], "tool_choice": {"type": "custom", "name": "l"}}
    refused = http.post("/v1/responses", json=named)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].format")


@pytest.mark.parametrize("field", ["grammar", "regex", "ebnf", "json_schema", "structural_tag"])
def test_constraints_of_other_servers_are_refused_in_every_dialect(http: httpx.Client, field: str) -> None:
    """Constraints of other servers are refused, since ignoring them would give output of another form."""
    for path, body in (
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/responses", {"input": "Hello"}),
    ):
        answer = http.post(path, json={**body, field: "x"})
        assert answer.status_code == 400
        assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_strict_tools_are_kept_where_the_model_may_choose(http: httpx.Client, path: str) -> None:
    """A voluntary call of a strict tool follows its schema; text is free."""
    asked = {"prompt": "<tool_call>", "add_special_tokens": False}
    [calls] = http.post("/tokenize", json=asked).json()["tokens"]
    parameters = {
        "type": "object",
        "properties": {"colour": {"enum": COLOURS}, "n": {"enum": [1, 2]}},
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
    function = {"name": "dye", "parameters": parameters, "strict": True}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": HELLO, "tools": [{"type": "function", "function": function}], "max_tokens": 300},
        "/v1/responses": {
            "input": "Hello",
            "tools": [{"type": "function", **function}],
            "max_output_tokens": 300,
        },
        "/v1/messages": {
            "messages": HELLO,
            "tools": [{"name": "dye", "input_schema": parameters, "strict": True}],
            "max_tokens": 300,
        },
    }
    body = {**bodies[path], "seed": 1}
    if path != "/v1/messages":  # It has no such field: the model may call or not.
        body["logit_bias"] = {calls: 100}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    if path == CHAT:
        found = said["choices"][0]["message"]["tool_calls"]
        arguments = [call["function"]["arguments"] for call in found]
    elif path == "/v1/responses":
        arguments = [item["arguments"] for item in said["output"] if item["type"] == "function_call"]
    else:
        arguments = [json.dumps(block["input"]) for block in said["content"] if block["type"] == "tool_use"]
    assert arguments or path == "/v1/messages"
    for text in arguments[:-1] or arguments:  # The last may be cut off by the length.
        jsonschema.validate(json.loads(text), parameters)
    assert "left_out" not in said["usage"]["receipt"]
