"""Promises about histories that a client cannot change: whatever they contain, the job goes on, in every
API."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import httpx
import pytest

Body = dict[str, Any]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO: Body = {"role": "user", "content": "hello"}


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


PNG = base64_of(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 640, 480) + b"\x08\x02\0\0\0")
JPEG = base64_of(b"\xff\xd8\xff\xe0\0\x04ab\xff\xc0\0\x11\x08" + struct.pack(">HH", 30, 40) + b"\x03")
GIF = base64_of(b"GIF89a" + struct.pack("<HH", 7, 9) + b"\0\0\0")
WEBP = base64_of(b"RIFF\x24\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\x0f\0\0" + b"\x1f\0\0")
PDF = base64_of(b"%PDF-1.7 " + b"x" * 2000)


def prompt_of(http: httpx.Client, path: str, body: Body) -> tuple[str, list[str]]:
    """Returns the prompt text that the model got, and the receipt's ``left_out``."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    answer = http.post(path, json={limit: 1, "return_token_ids": True, "job_id": "pictures", **body})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    left_out: list[str] = told["usage"]["receipt"].get("left_out", [])
    if path == RESPONSES:  # It reports no tokens of its prompt.
        assert told["usage"]["input_tokens"]
        return "", left_out
    text = http.post("/detokenize", json={"tokens": told["prompt_token_ids"]}).json()["prompt"]
    return text, left_out


def chat_of(result: object) -> Body:
    """A chat in which a tool returned ``result``."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return {
        "messages": [
            HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": result},
        ]
    }


def response_of(result: object) -> Body:
    return {
        "input": [
            HELLO,
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": result},
        ]
    }


def message_of(result: object) -> Body:
    return {
        "messages": [
            HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}]},
        ]
    }


PARTS: dict[str, tuple[str, Body, str]] = {
    "chat picture": (
        CHAT,
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        "640x480",
    ),
    "chat picture at an address": (
        CHAT,
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        "image, https://example.com/a.png",
    ),
    "chat sound": (
        CHAT,
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "audio/wav",
    ),
    "chat file": (
        CHAT,
        {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF}},
        "application/pdf, 2 kB, a.pdf",
    ),
    "chat video": (CHAT, {"type": "video_url", "video_url": {"url": "https://example.com/a"}}, "video"),
    "chat, MCP's picture": (
        CHAT,
        {"type": "image", "data": JPEG, "mimeType": "image/jpeg"},
        "image/jpeg, 40x30",
    ),
    "responses picture": (
        RESPONSES,
        {"type": "input_image", "image_url": f"data:image/gif;base64,{GIF}"},
        "image/gif, 7x9",
    ),
    "responses file": (RESPONSES, {"type": "input_file", "file_id": "file-1"}, "file, file-1"),
    "messages picture": (
        MESSAGES,
        {"type": "image", "source": {"type": "base64", "media_type": "image/webp", "data": WEBP}},
        "image/webp, 16x32",
    ),
    "messages document": (
        MESSAGES,
        {
            "type": "document",
            "title": "T",
            "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
        },
        "application/pdf, 2 kB, T",
    ),
    "messages file": (
        MESSAGES,
        {"type": "image", "source": {"type": "file", "file_id": "f_1"}},
        "image, f_1",
    ),
    "messages, a resource": (
        MESSAGES,
        {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "font/ttf", "blob": "AAAA"}},
        "font/ttf, 3 bytes, file:///a",
    ),
    "messages, what nobody knows yet": (MESSAGES, {"type": "hologram"}, "hologram"),
}


@pytest.mark.parametrize(("path", "part", "what"), PARTS.values(), ids=PARTS.keys())
def test_a_line_stands_for_what_a_tool_has_shown(
    http: httpx.Client, path: str, part: Body, what: str
) -> None:
    """If a tool returns a picture, a text-only model gets a line that describes it, the receipt reports it,
    and the job goes on."""
    text_kind = "input_text" if path == RESPONSES else "text"
    result = [{"type": text_kind, "text": "Done."}, part]
    body = {CHAT: chat_of, RESPONSES: response_of, MESSAGES: message_of}[path](result)
    text, left_out = prompt_of(http, path, body)
    [note] = left_out
    assert what in note
    if text:
        assert f"Done.\n[{note.partition(': ')[2]}, left out: this model reads text only]" in text


USERS_PARTS: dict[str, tuple[str, Body, str]] = {
    CHAT: (
        CHAT,
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        "messages[0].content[1]",
    ),
    RESPONSES: (
        RESPONSES,
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
        "input[0].content[1]",
    ),
    MESSAGES: (
        MESSAGES,
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        "messages.0.content.1",
    ),
}


@pytest.mark.parametrize("path", USERS_PARTS)
def test_the_users_new_picture_is_refused_and_an_old_one_is_not(http: httpx.Client, path: str) -> None:
    """A picture in the user's latest message is refused with its field; an earlier one becomes a line."""
    _, part, field = USERS_PARTS[path]
    text_kind = "input_text" if path == RESPONSES else "text"
    asked = {"role": "user", "content": [{"type": text_kind, "text": "What is this?"}, part]}
    messages = "input" if path == RESPONSES else "messages"
    refused = http.post(path, json={"max_tokens": 1, messages: [asked]})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert field in (error["message"] if path == MESSAGES else error["param"])
    said = {"role": "assistant", "content": "A picture."}
    for later in ([asked, said, HELLO], [asked, HELLO]):
        text, left_out = prompt_of(http, path, {messages: later})
        assert left_out == [f"{field}: image/png, 640x480"]
        assert not text or "What is this?\n[image/png, 640x480, left out" in text


def test_a_picture_behind_results_is_the_tools(http: httpx.Client) -> None:
    """A user's picture right after tool results counts as theirs: some agents must send it so."""
    _, picture, _ = USERS_PARTS[CHAT]
    body = chat_of("see below")
    body["messages"].append({"role": "user", "content": [picture]})
    assert len(prompt_of(http, CHAT, body)[1]) == 1
    _, picture, _ = USERS_PARTS[MESSAGES]
    body = message_of("see below")
    body["messages"][-1]["content"].append(picture)
    assert len(prompt_of(http, MESSAGES, body)[1]) == 1
    _, picture, _ = USERS_PARTS[RESPONSES]
    body = response_of("see below")
    body["input"].append({"role": "user", "content": [picture]})
    assert len(prompt_of(http, RESPONSES, body)[1]) == 1


def test_a_stored_picture_does_not_end_its_job(http: httpx.Client) -> None:
    """Turns stored on the server follow the same rule."""
    _, picture, _ = USERS_PARTS[RESPONSES]
    first = http.post(RESPONSES, json={**response_of([picture]), "max_output_tokens": 1}).json()
    assert first["usage"]["receipt"]["left_out"] == ["input[2].output[0]: image/png, 640x480"]
    body = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 1}
    answer = http.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    [note] = answer.json()["usage"]["receipt"]["left_out"]
    assert note.endswith(".input[2].output[0]: image/png, 640x480")


def test_what_other_servers_did_is_left_out_and_told(http: httpx.Client) -> None:
    """Calls of tools that ran on another server are left out, and the receipt says so."""
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Found."},
    ]
    messages = [HELLO, {"role": "assistant", "content": searched}, HELLO]
    text, left_out = prompt_of(http, MESSAGES, {"messages": messages})
    assert "Found." in text
    assert left_out == [
        "messages.1.content.0: server_tool_use",
        "messages.1.content.1: web_search_tool_result",
    ]
    shot = {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{PNG}"}
    items = [
        HELLO,
        {"type": "computer_call", "call_id": "c", "id": "cu_1", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c", "output": shot},
        {"type": "holographic_call", "id": "h"},
        {"type": "compaction", "encrypted_content": "only who wrote it reads it"},
    ]
    _, left_out = prompt_of(http, RESPONSES, {"input": items})
    assert left_out == [
        "input[2].output[0]: image/png, 640x480",
        "input[3]: holographic_call",
        "input[4]: compaction",
    ]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_tool_that_returned_nothing_ends_no_job(http: httpx.Client, path: str) -> None:
    """Null or missing tool results are accepted."""
    body = {CHAT: chat_of, RESPONSES: response_of, MESSAGES: message_of}[path](None)
    assert prompt_of(http, path, body)[1] == []


def test_a_receipt_stays_short(http: httpx.Client) -> None:
    """Of hundreds of pictures the receipt names the first ones and counts the rest."""
    _, left_out = prompt_of(http, CHAT, chat_of([{"type": "smell"}] * 25))
    assert len(left_out) == 21
    assert left_out[-1] == "and 5 more"


# ---- templates that raise ----

STRICT = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{%- endfor %}"
)
ALTERNATING = (
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Roles must alternate user/assistant.') }}{%- endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{%- endfor %}"
)
CALLED: Body = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def said(role: str, text: str) -> Body:
    return {"role": role, "content": text}


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


SYSTEMS: dict[str, tuple[str, list[Body], str]] = {
    "two at the front": (
        STRICT,
        [said("system", "A"), said("developer", "B"), said("user", "hi")],
        "<system>A\n\nB</system><user>hi</user>",
    ),
    "in the middle": (
        STRICT,
        [
            said("system", "A"),
            said("user", "hi"),
            said("assistant", "yo"),
            said("system", "B"),
            said("user", "on"),
        ],
        f"<system>A</system><user>hi</user><assistant>yo</assistant><user>{reminder('B')}\non</user>",
    ),
    "behind the user": (
        STRICT,
        [said("user", "hi"), said("developer", "B")],
        f"<user>hi\n{reminder('B')}</user>",
    ),
    "at the end": (
        STRICT,
        [said("user", "hi"), said("assistant", "yo"), said("system", "B")],
        f"<user>hi</user><assistant>yo</assistant><user>{reminder('B')}</user>",
    ),
    "between a call and its result": (
        STRICT,
        [said("user", "hi"), CALLED, said("system", "B"), {**said("tool", "x"), "tool_call_id": "c"}],
        f"<user>hi</user><assistant></assistant><tool>x\n{reminder('B')}</tool>",
    ),
    "two users in turn": (
        ALTERNATING,
        [said("user", "a"), said("user", "b"), said("assistant", "c"), said("user", "d")],
        "<user>a\n\nb</user><assistant>c</assistant><user>d</user>",
    ),
    "no system at all": (
        ALTERNATING,
        [said("system", "S"), said("user", "a"), said("assistant", "c"), said("user", "d")],
        "<user>S\n\na</user><assistant>c</assistant><user>d</user>",
    ),
}


@pytest.mark.parametrize(("template", "messages", "prompt"), SYSTEMS.values(), ids=SYSTEMS.keys())
def test_a_template_that_raises_ends_no_job(
    http: httpx.Client, template: str, messages: list[Body], prompt: str
) -> None:
    """A message that makes the template raise is merged into a neighbor, and the job goes on."""
    text, _ = prompt_of(http, CHAT, {"messages": messages, "chat_template": template})
    assert text == prompt


def test_reminders_in_a_chat_leave_the_prefix_alone(http: httpx.Client) -> None:
    """Each turn's prompt begins with the previous one, also with system messages in between."""
    first = [said("system", "A"), said("user", "hi"), said("system", "B")]
    then = [*first, said("assistant", "yo"), said("system", "C"), said("user", "on")]
    one, two = (
        prompt_of(http, CHAT, {"messages": turn, "chat_template": STRICT})[0] for turn in (first, then)
    )
    assert two.startswith(one)


def test_responses_take_a_system_message_anywhere(http: httpx.Client) -> None:
    """The same rule applies to responses."""
    items = [said("user", "hi"), said("assistant", "yo"), said("developer", "B"), said("user", "on")]
    counted = http.post("/v1/responses/input_tokens", json={"input": items}).json()["input_tokens"]
    chat = [said("user", "hi"), said("assistant", "yo"), said("user", f"{reminder('B')}\non")]
    tokens = http.post("/tokenize", json={"messages": chat}).json()["tokens"]
    assert counted == len(tokens)


# ---- halves of surrogate pairs ----

HALVES: dict[str, tuple[str, Body]] = {
    "chat": (
        CHAT,
        {"max_tokens": 1, "messages": [said("user", "cut HALF")], "user": "HALF", "stop": ["HALF"]},
    ),
    "chat, a call": (CHAT, {"max_tokens": 1, "job_id": "j HALF", **chat_of("x HALF")}),
    "chat, names": (
        CHAT,
        {
            "max_tokens": 1,
            "messages": [HELLO],
            "tools": [{"type": "function", "function": {"name": "fHALF", "description": "HALF"}}],
            "metadata": {"HALF": "HALF", "user_id": "HALF"},
            "prompt_cache_key": "HALF",
        },
    ),
    "completions": ("/v1/completions", {"max_tokens": 1, "prompt": "cut HALF", "session_id": "HALF"}),
    "responses": (
        RESPONSES,
        {"max_output_tokens": 1, "instructions": "HALF", "metadata": {"a": "HALF"}, **response_of("HALF")},
    ),
    "messages": (
        MESSAGES,
        {"max_tokens": 1, "system": "HALF", "stop_sequences": ["HALF"], **message_of("HALF")},
    ),
    "tokenize": ("/tokenize", {"prompt": "HALF"}),
    "conversations": ("/v1/conversations", {"items": [said("user", "HALF")]}),
}


@pytest.mark.parametrize(("path", "body"), HALVES.values(), ids=HALVES.keys())
@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\ud83d\\ud83d\\ude00"])
def test_half_of_a_surrogate_pair_is_read_as_unreadable(
    http: httpx.Client, path: str, body: Body, half: str
) -> None:
    """Half of a surrogate pair, from text cut within a character, becomes a replacement character."""
    content = json.dumps(body).replace("HALF", half)
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd"),
        (rb"\\ud83d", "\\ud83d"),
        (rb"\\\ud83d", "\\\ufffd"),
        (rb"\\ud83d\ude00", "\\ud83d\ufffd"),
        (b"\xed\xa0\xbd", "\ufffd"),
        (b"\xed\xa0\xbd\xed\xb8\x80", "\U0001f600"),
    ],
)
def test_only_halves_are_replaced(http: httpx.Client, sent: bytes, read: str) -> None:
    """Whole pairs, and backslashes that escape something else, stay unchanged."""
    body = (
        b'{"messages": [{"role": "user", "content": "'
        + sent
        + b'"}], "chat_template": "{{ messages[0].content }}"}'
    )
    tokens = http.post("/tokenize", content=body).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == read


def test_calls_from_before_there_were_tools_are_read(http: httpx.Client) -> None:
    """``function_call`` and the role ``function`` of old histories are read."""
    messages = [
        HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "a cat"},
    ]
    name = "{{ m.tool_calls[0].function.name if m.tool_calls }}"
    template = "{% for m in messages %}{{ m.role }} " + name + ";{% endfor %}"
    text, _ = prompt_of(http, CHAT, {"messages": messages, "chat_template": template})
    assert text == "user ;assistant look;tool ;"


def test_tools_that_nobody_runs_are_told(http: httpx.Client) -> None:
    """Tools that the server does not run are hidden from the model and listed in the receipt."""
    hosted = [{"type": kind} for kind in ("mcp", "file_search", "web_search", "image_generation")]
    answer = http.post(RESPONSES, json={"input": "hi", "tools": hosted, "max_output_tokens": 1}).json()
    assert len(answer["warnings"]) == len(hosted)
    assert answer["usage"]["receipt"]["left_out"] == answer["warnings"]
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    body = {"messages": [HELLO], "tools": tools, "mcp_servers": [{"type": "url", "url": "https://x"}]}
    _, left_out = prompt_of(http, MESSAGES, body)
    assert [note.partition(":")[0] for note in left_out] == ["tools.0", "mcp_servers"]
