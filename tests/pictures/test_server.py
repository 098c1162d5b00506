"""Screenshots over HTTP to a real model, sent by clients' own libraries, from turn to turn; and how a bad
picture affects others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from tests.api.server import Server, posting, running_server
from tests.child_processes import children_of
from tests.media.pictures import data_url, file_of, flat_png, image_block, image_url, noise, png
from tests.pictures.conftest import PictureFolders
from tests.pictures.reference import PictureReference

pytestmark = pytest.mark.slow

CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def folder(picture_folders: PictureFolders) -> Path:
    return picture_folders("qwen2_5_vl")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running_server(folder, "--num-gpu-blocks-override", "1200") as running:
        yield running
        (own,) = folders_of(running)
        assert running.interrupt() == 0
    assert not own.exists()


def folders_of(server: Server) -> set[Path]:
    """The folders of this server's pixels, found by its open files, in shared memory or temporary ones."""
    found = set()
    for descriptor in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(Path(os.readlink(descriptor)).parent)
    return {path for path in found if path.name.startswith("continuum-media-")}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def screenshot(seed: int) -> bytes:
    """A screenshot of 1280x720 in three quarters of a megabyte: flat parts, and some noise."""
    picture = Image.new("RGB", (1280, 720), (20 * seed % 256, 90, 160))
    picture.paste(noise(600, 400, seed=seed), (100, 100))
    return file_of(picture)


@pytest.mark.parametrize("size", [(30, 50), (300, 200)])
def test_answers_are_those_of_transformers(server: Server, folder: Path, size: tuple[int, int]) -> None:
    """Answers to a picture's file equal those of transformers' processor and model."""
    data = file_of(noise(*size, seed=3))
    with posting(server) as post:
        answer = post(
            "/v1/chat/completions",
            messages=[user(text("what"), image_url(data), text("is it?"))],
            max_tokens=12,
            temperature=0,
            return_token_ids=True,
        ).json()
    reference = PictureReference(folder)
    inputs = reference.processor(images=[Image.open(BytesIO(data))], return_tensors="pt")
    prompt = answer["prompt_token_ids"]
    pad: Any = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|image_pad|>")
    assert prompt.count(pad) == int(inputs["image_grid_thw"].prod()) // 4
    input_ids = torch.tensor([prompt])
    tokens = reference.model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        mm_token_type_ids=torch.eq(input_ids, pad).int(),
        **inputs,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    assert answer["choices"][0]["token_ids"] == tokens[0, len(prompt) :].tolist()


def test_a_screenshot_agents_history_hits_its_cache(server: Server) -> None:
    """Twenty screenshots come with each turn; the second turn computes only the new one and later tokens."""
    shots = [screenshot(seed) for seed in range(20)]
    messages: list[Any] = [{"role": "user", "content": "book a flight"}]
    for turn, shot in enumerate(shots):
        messages.append({"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": f"c{turn}"}]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": [image_url(shot)]})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        messages.append({"role": "assistant", "content": first.choices[0].message.content or "x"})
        messages.append(user(text("and now?"), image_url(screenshot(20))))
        second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    before, after = first.usage, second.usage
    assert before is not None
    assert after is not None
    assert after.prompt_tokens_details is not None
    assert before.prompt_tokens > 20 * 48
    cached = after.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached > before.prompt_tokens - 16 - 8, "all but the block that was not full"
    assert "left_out" not in json.dumps(after.model_dump())


def test_anthropics_library_sends_pictures_in_results(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        messages: list[Any] = [
            user(image_block(png(40, 40)), text("look again")),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
            user({"type": "tool_result", "tool_use_id": "t1", "content": [image_block(screenshot(1))]}),
        ]
        counted = client.messages.count_tokens(model="tiny", messages=messages)
        answer = client.messages.create(model="tiny", messages=messages, max_tokens=4)
        bad: list[Any] = [user(image_block(png()[:-60]))]
        with pytest.raises(anthropic.BadRequestError, match=r"messages.0.content.0 is broken"):
            client.messages.create(model="tiny", messages=bad, max_tokens=4)
    usage = answer.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    total = usage.input_tokens + cached
    assert total == counted.input_tokens > 25 + 48


def test_responses_show_pictures_of_stored_turns(server: Server) -> None:
    """A turn with ``previous_response_id`` reads the pictures of earlier turns from the stored items."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        part: Any = {"type": "input_image", "image_url": data_url(screenshot(7)), "detail": "auto"}
        first = client.responses.create(model="tiny", input=[user(part)], max_output_tokens=4)  # type: ignore[list-item]
        second = client.responses.create(
            model="tiny", input="and now?", previous_response_id=first.id, max_output_tokens=4
        )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens > 48
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 16 - 8


def test_a_bomb_costs_its_own_request_only(server: Server) -> None:
    """A huge picture is decoded and a larger one refused while another request streams to its end."""
    bomb = {"type": "image_url", "image_url": {"url": data_url(flat_png(8000, 7999, "RGBA"))}}
    body = {"model": "tiny", "messages": [user(text("a"), image_url(png()))], "max_tokens": 200}
    body |= {"stream": True, "ignore_eos": True}
    with (
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        with posting(server) as post:
            large = post("/v1/chat/completions", model="tiny", messages=[user(bomb)], max_tokens=1)
            too_large = post(
                "/v1/chat/completions",
                model="tiny",
                messages=[user(image_url(flat_png(9000, 8000)))],
                max_tokens=1,
            )
        said = list(lines)
    assert large.status_code == 200, "the largest that is decoded"
    assert too_large.status_code == 400
    assert "has 9000x8000 pixels" in too_large.json()["error"]["message"]
    assert said[-2] == "data: [DONE]"
    assert any('"finish_reason":"length"' in line for line in said), "it ended as it should"


def test_a_decoder_that_was_killed_costs_no_request(server: Server) -> None:
    with posting(server) as post:

        def ask(seed: int) -> int:
            messages = [user(image_url(png(seed=seed)))]
            return post("/v1/chat/completions", model="tiny", messages=messages, max_tokens=1).status_code

        assert ask(500) == 200
        (decoder,) = children_of(server.process.pid, "engine.media.decoder_process")
        os.kill(decoder, signal.SIGKILL)
        assert ask(501) == 200
        assert ask(502) == 200
        assert ask(500) == 200
        (another,) = children_of(server.process.pid, "engine.media.decoder_process")
        assert another != decoder


def test_forgotten_pictures_are_read_again(server: Server) -> None:
    """A reset evicts encoder outputs and pixels but not cached blocks; pictures are read again."""
    with posting(server) as post:

        def ask() -> dict[str, Any]:
            messages = [user(image_url(screenshot(33)), text("what is it?"))]
            body = {"messages": messages, "max_tokens": 3, "temperature": 0}
            answered: dict[str, Any] = post("/v1/chat/completions", **body).json()
            return answered

        first = ask()
        assert post("/reset_mm_cache").json() == {"success": True}
        second = ask()
        assert post("/reset_mm_cache").json() == {"success": True}
        assert post("/reset_prefix_cache").json() == {"success": True}
        third = ask()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 32
    assert not (third["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
    answers = [each["choices"][0]["message"]["content"] for each in (first, second, third)]
    assert answers[0] == answers[1] == answers[2]


def test_flags_limit_pictures_and_name_hosts(folder: Path) -> None:
    """Flags limit the number and size of pictures and name hosts, with two API server processes."""
    flags = (
        *("--limit-mm-per-prompt", '{"image": 2}', "--mm-processor-kwargs", '{"max_pixels": 1024}'),
        *("--allowed-media-domains", "127.0.0.1", "--mm-processor-cache-gb", "0.01"),
        *("--api-server-count", "2", "--num-gpu-blocks-override", "600"),
    )
    with running_server(folder, *flags) as server, posting(server) as post:
        big = image_url(png(400, 400))
        for _ in range(6):
            counted = post("/tokenize", messages=[user(big, big)]).json()
            assert counted["count"] < 2 * 16 + 40
            answer = post("/v1/chat/completions", model="tiny", messages=[user(big, big)], max_tokens=1)
            assert answer.json()["usage"]["prompt_tokens"] == counted["count"]
        refused = post("/v1/chat/completions", model="tiny", messages=[user(big, big, big)])
        assert "is one of 3 pictures in the last message; this server takes 2" in refused.text
        here = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
        assert "could not be fetched: ConnectError" in post("/tokenize", messages=[user(here)]).text


def test_such_a_model_can_be_served_as_text(folder: Path) -> None:
    flags = ("--language-model-only", "--num-gpu-blocks-override", "600")
    with running_server(folder, *flags) as server, posting(server) as post:
        answer = post("/v1/chat/completions", model="tiny", messages=[user(image_url(png()))])
        assert answer.status_code == 400
        assert "this server takes text only" in answer.text
        assert post("/reset_mm_cache").json() == {"success": True}
        assert children_of(server.process.pid, "engine.media.decoder_process") == []
