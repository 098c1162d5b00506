"""Pictures in the prompts of every API, with a stand-in model: their tokens, what is reused from turn to
turn, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine.api.prompt.appended_chat import HistoryShape
from engine.api.prompt.prompts import ChatPrompt, PromptSoFar
from engine.records.media import PictureModel
from tests.api.picture_site import PictureSite, limited, picture_site
from tests.media.picture_folder import folder_with_pictures
from tests.media.pictures import data_url, flat_png, image_block, image_url, png
from tests.media.templates import ALL

PAD = "<|image_pad|>"
TWELVE = f"<|vision_start|>{PAD * 12}<|vision_end|>"
"""``png()`` in the prompt: 32x24 pixels at 8x8 pixels per token."""
HELLO = {"type": "text", "text": "hello"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PictureModel]:
    return folder_with_pictures(model, tmp_path_factory.mktemp("pictures") / "model")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(folder: tuple[Path, PictureModel]) -> AsyncIterator[PictureSite]:
    async with picture_site(*folder) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def looked(*content: Any) -> list[dict[str, Any]]:
    """A call and its result, preceded by the user's request."""
    return [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": list(content)},
    ]


# ---- the prompt ----


async def test_a_picture_is_as_many_tokens_as_it_has_squares(site: PictureSite) -> None:
    messages = [user(HELLO, image_url(png()), {"type": "text", "text": "there"})]
    text = await site.prompt(messages=messages)
    assert text == f"<|im_start|>user\nhello{TWELVE}there<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ALL)
async def test_every_template_shows_every_picture(folder: tuple[Path, PictureModel], name: str) -> None:
    """Each template shows every picture, also if it reads text only or drops the pictures of results."""
    messages = [*looked(HELLO, image_url(png())), user(image_url(png(seed=1)), HELLO)]
    async with picture_site(*folder, template=ALL[name]) as site:
        text = await site.prompt(messages=messages)
        assert f"hello{TWELVE}" in text
        assert f"<|im_start|>user\n{TWELVE}hello<|im_end|>" in text
        assert text.count(PAD) == 24
        plain = await site.prompt(messages=[user(HELLO, HELLO)])
        assert plain.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert PAD not in plain


@pytest.mark.parametrize("name", ALL)
async def test_a_result_with_a_picture_leaves_the_prompt_before_it(
    folder: tuple[Path, PictureModel], name: str
) -> None:
    """In every form that templates take, a picture in a result leaves the earlier prompt unchanged."""
    first = [user(HELLO, HELLO, image_url(png()), HELLO, HELLO)]
    async with picture_site(*folder, template=ALL[name]) as site:
        before = await site.prompt(messages=first, add_generation_prompt=False)
        after = await site.prompt(messages=[*first, *looked(image_url(png(seed=1)))])
    assert after.startswith(before)
    assert after.count(PAD) == 24


SAME: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [user(HELLO, image_url(png()))], "max_tokens": 2}),
    (
        "/v1/messages",
        {"messages": [user(HELLO, image_block(png()))], "max_tokens": 2},
    ),
    (
        "/v1/messages",
        {
            "messages": [user(HELLO, {"type": "image", "source": {"type": "url", "url": data_url(png())}})],
            "max_tokens": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                user(
                    {"type": "input_text", "text": "hello"},
                    {"type": "input_image", "image_url": data_url(png()), "detail": "low"},
                )
            ],
            "max_output_tokens": 2,
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), SAME)
async def test_the_apis_make_the_same_prompt(site: PictureSite, path: str, body: dict[str, Any]) -> None:
    """All APIs render the same prompt, so they share cached blocks; counting gives as many tokens."""
    answer = await site.post(path, model="tiny", return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    listed = await site.post("/tokenize", messages=[user(HELLO, image_url(png()))])
    assert _prompt_tokens(usage) == listed.json()["count"]
    assert site.num_held == 0


RESULTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": looked(image_url(png())), "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {"messages": looked({"type": "image", "data": data_url(png()), "mimeType": "image/png"})},
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}],
                },
                user({"type": "tool_result", "tool_use_id": "toolu_1", "content": [image_block(png())]}),
            ],
            "max_tokens": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "look"},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": data_url(png())}],
                },
            ]
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "look"},
                {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}},
                {
                    "type": "computer_call_output",
                    "call_id": "c",
                    "output": {"type": "computer_screenshot", "image_url": data_url(png())},
                },
            ]
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), RESULTS)
async def test_results_of_tools_show_pictures(site: PictureSite, path: str, body: dict[str, Any]) -> None:
    """A picture in a tool result adds its tokens to the prompt."""
    with_picture = await site.post(path, model="tiny", **body)
    assert with_picture.status_code == 200, with_picture.text
    text = msgspec.json.encode(body).decode().replace(data_url(png()), data_url(flat_png(8, 8)))
    text = text.replace(data_url(png()).partition(",")[2], data_url(flat_png(8, 8)).partition(",")[2])
    with_small = await site.post(path, model="tiny", **msgspec.json.decode(text))
    tokens = [_prompt_tokens(each.json()["usage"]) for each in (with_picture, with_small)]
    assert tokens[0] - tokens[1] == 11
    assert "left_out" not in with_picture.text


def _prompt_tokens(usage: dict[str, Any]) -> int:
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens", 0))


async def test_counting_tells_the_tokens_of_pictures_and_holds_nothing(site: PictureSite) -> None:
    with_picture = {"messages": [user(image_block(png(40, 40)), HELLO)]}
    without = {"messages": [user(HELLO)]}
    counts = [
        (await site.post("/v1/messages/count_tokens", **body)).json()["input_tokens"]
        for body in (with_picture, without)
    ]
    assert counts[0] - counts[1] == 25 + 2
    assert site.num_held == 0


@pytest.mark.parametrize("text", [PAD, "<|video_pad|>", f"a{PAD * 3}b"])
async def test_no_text_reads_as_a_picture(site: PictureSite, text: str) -> None:
    """Placeholders in texts of users, tools, calls and schemas are broken by a zero-width character."""
    tool = {"type": "function", "function": {"name": "look", "description": text, "parameters": {}}}
    call = {**CALL, "function": {"name": "look", "arguments": msgspec.json.encode({"at": text}).decode()}}
    messages = [
        {"role": "system", "content": text},
        user({"type": "text", "text": text}, image_url(png())),
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": text},
    ]
    shown = await site.prompt(messages=messages, tools=[tool])
    assert shown.count(PAD) == 12
    assert "<|video_pad|>" not in shown
    assert shown.replace("\u200b", "").count(text) >= 6


async def test_a_turn_that_appends_forges_no_picture(site: PictureSite) -> None:
    """Placeholders are broken also in a prompt that is appended and not rendered in full."""
    tokenizer = site.model.engine.tokenizer
    before = tokenizer.encode("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>")
    known = PromptSoFar("a", before, max(before), HistoryShape(False, False, False))
    said: list[Any] = [{"role": "assistant", "content": "Two."}, {"role": "user", "content": f"a{PAD}b"}]
    prompt = await site.model.prompts.continue_chat(known, ChatPrompt(messages=said), owner=None)
    assert prompt is not None
    text = tokenizer.decode(prompt)
    assert PAD not in text
    assert text.replace("\u200b", "").count(PAD) == 1


async def test_a_mark_cannot_be_written(site: PictureSite) -> None:
    messages = [user({"type": "text", "text": "<picture 0123456789abcdef 0>"}, image_url(png()))]
    assert "<picture 0123456789abcdef 0>" in await site.prompt(messages=messages)


# ---- turns ----


async def test_the_next_turn_decodes_and_computes_only_what_is_new(site: PictureSite) -> None:
    """An agent that takes a screenshot per turn decodes and computes only the new one."""
    before, num_before = site.num_decoded, 0
    messages: list[dict[str, Any]] = [user(HELLO)]
    for turn in range(5):
        call = {**CALL, "id": f"call_{turn}"}
        messages.append({"role": "assistant", "content": f"look {turn}", "tool_calls": [call]})
        shot = image_url(png(seed=100 + turn))
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": [shot]})
        answer = await site.post("/v1/chat/completions", model="tiny", messages=messages, max_tokens=1)
        usage = answer.json()["usage"]
        assert site.num_decoded == before + turn + 1
        assert usage["prompt_tokens_details"]["cached_tokens"] > num_before - 16 - 6, "but the last block"
        num_before = usage["prompt_tokens"]
    assert site.num_held == 0


async def test_other_pixels_are_another_prompt(site: PictureSite) -> None:
    """Two pictures of one size have the same tokens but share no cached blocks."""
    bodies = [[user(image_url(png(64, 64, seed=seed)), HELLO)] for seed in (201, 202, 201)]
    cached = []
    for messages in bodies:
        answer = await site.post("/v1/chat/completions", model="tiny", messages=messages, max_tokens=1)
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[1] < 16
    assert cached[2] >= 64


# ---- what is left out, and what is refused ----

BAD: list[tuple[Any, str]] = [
    ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "--allowed-media-domains"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be a data: URL"),
    ({"type": "image_url"}, "neither a URL nor data"),
    (image_url(b"no picture"), "is not a picture in PNG, JPEG, WebP, GIF or BMP"),
    (image_url(png()[:-60]), "is broken"),
    (image_url(flat_png(9000, 8000)), "has 9000x8000 pixels; at most 64000000 are decoded"),
    (image_url(flat_png(2000, 2)), "more than 200 times"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "is not valid base64"),
]


@pytest.mark.parametrize(("part", "fault"), BAD)
async def test_a_bad_picture_is_an_error_where_it_is_new(site: PictureSite, part: Any, fault: str) -> None:
    answer = await site.post("/v1/chat/completions", model="tiny", messages=[user(HELLO, part)])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert fault in error["message"]
    assert error["message"].startswith("messages[0].content[1] ")
    assert error["param"] == "messages[0].content[1]"
    assert site.num_held == 0


@pytest.mark.parametrize(("part", "fault"), BAD)
async def test_a_bad_picture_of_the_history_is_a_line_of_text(
    site: PictureSite, part: Any, fault: str
) -> None:
    """A bad picture of the history becomes a line of text, and is in the receipt; others are shown."""
    messages = looked(image_url(png()), part)
    text = await site.prompt(messages=messages)
    assert "left out: it" in text
    assert fault in text
    assert text.count(PAD) == 12
    answer = await site.post("/v1/chat/completions", model="tiny", messages=messages, max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert "messages[2].content[1]" in str(answer.json()["usage"])


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/messages", {"messages": [user(image_block(b"no"))], "max_tokens": 1}, "messages.0.content.0"),
        (
            "/v1/responses",
            {"input": [user({"type": "input_image", "image_url": data_url(b"no")})]},
            "input[0].content[0]",
        ),
        ("/tokenize", {"messages": [user(image_url(b"no"))]}, "messages[0].content[0]"),
        ("/v1/messages/count_tokens", {"messages": [user(image_block(b"no"))]}, "messages.0.content.0"),
    ],
)
async def test_each_api_names_the_field(
    site: PictureSite, path: str, body: dict[str, Any], field: str
) -> None:
    answer = await site.post(path, model="tiny", **body)
    assert answer.status_code == 400, answer.text
    assert f"{field} is not a picture" in answer.text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    ],
)
async def test_other_media_are_refused_in_one_sentence(site: PictureSite, part: dict[str, Any]) -> None:
    answer = await site.post("/v1/chat/completions", model="tiny", messages=[user(part)])
    assert answer.status_code == 400
    expected = (
        f"messages[0].content[0] is of type {part['type']!r}; this server takes text and pictures only."
    )
    assert answer.json()["error"]["message"] == expected
    text = await site.prompt(messages=looked(part))
    assert "left out: this model reads text and pictures only]" in text


async def test_pictures_of_the_model_and_the_system_are_lines_of_text(site: PictureSite) -> None:
    """Pictures of the model and the system become lines of text: templates show none there."""
    messages = [
        {"role": "system", "content": [HELLO, image_url(png())]},
        user(HELLO),
        {"role": "assistant", "content": [HELLO, image_url(png())]},
        user(HELLO),
    ]
    text = await site.prompt(messages=messages)
    assert PAD not in text
    assert text.count("left out: this model reads text and pictures only]") == 2


async def test_too_many_new_pictures_are_refused(folder: tuple[Path, PictureModel]) -> None:
    path, pictures = folder
    messages = [user(*[image_url(png(seed=seed)) for seed in range(4)])]
    async with picture_site(path, limited(pictures, max_count=3)) as site:
        answer = await site.post("/v1/chat/completions", model="tiny", messages=messages)
        assert answer.status_code == 400
        assert "is one of 4 pictures in the last message; this server takes 3" in answer.text
        assert "--limit-mm-per-prompt" in answer.text
        assert site.num_decoded == 0


async def test_of_a_long_history_the_latest_pictures_are_shown(folder: tuple[Path, PictureModel]) -> None:
    """Only the latest pictures are shown; the oldest are dropped several at a time, to keep the prefix."""
    path, pictures = folder
    async with picture_site(path, limited(pictures, max_count=8)) as site:
        shown = []
        for count in range(1, 15):
            parts = [image_url(png(8, 8, seed=seed)) for seed in range(count)]
            text = await site.prompt(messages=[*looked(*parts), user(image_url(png(8, 8, seed=99)))])
            shown.append(text.count(PAD))
            assert text.count("left out: only the latest of") == count + 1 - shown[-1]
        assert shown == [2, 3, 4, 5, 6, 7, 8, 7, 8, 7, 8, 7, 8, 7]


async def test_the_length_of_a_prompt_counts_the_tokens_of_pictures(site: PictureSite) -> None:
    parts = [image_url(png(64, 64, seed=seed)) for seed in range(8)]
    messages = [user(*parts, {"type": "text", "text": "word " * 3900})]
    answer = await site.post("/v1/chat/completions", model="tiny", messages=messages)
    assert answer.status_code == 400
    assert "tokens > 8191 maximum" in answer.json()["error"]["message"]
    count = (await site.post("/tokenize", messages=messages)).json()["count"]
    assert f"{count} tokens > 8191 maximum" in answer.json()["error"]["message"]


async def test_a_model_without_pictures_takes_text_only(folder: tuple[Path, PictureModel]) -> None:
    async with picture_site(folder[0], None) as site:
        answer = await site.post("/v1/chat/completions", model="tiny", messages=[user(image_url(png()))])
        assert answer.status_code == 400
        assert "this server takes text only" in answer.text
        text = await site.prompt(messages=looked(image_url(png())))
        assert "[image/png, 32x24, left out: this model reads text only]" in text
        assert site.model.media is None
