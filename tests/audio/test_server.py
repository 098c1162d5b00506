"""Audio over HTTP to a real model, sent by clients' own libraries, from turn to turn; and in ``LLM``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from engine.errors import RequestError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.api.server import Server, posting, running_server
from tests.audio.audio_folders import RATE, sound
from tests.audio.conftest import AudioFolders
from tests.audio.reference import AudioReference
from tests.audio.sounds import audio_url, base64_of, file_of, heard, input_audio, wav
from tests.child_processes import children_of
from tests.media.pictures import image_url, png
from tests.pictures.picture_engine import SIZES, tokens_of
from tests.processes.event_subscriber import free_ports, subscriber

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(audio_folders: AudioFolders) -> Path:
    return audio_folders("qwen2_5_omni_thinker")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running_server(folder, "--num-gpu-blocks-override", "600") as running:
        yield running
        assert running.interrupt() == 0


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


@pytest.mark.parametrize("part", [input_audio, audio_url])
def test_answers_are_those_of_transformers(server: Server, folder: Path, part: Any) -> None:
    data = wav(1.1, 3)
    with posting(server) as post:
        body = {"messages": [user(text("what"), part(data), text("is it?"))], "temperature": 0}
        answer = post(CHAT, **body, max_tokens=12, return_token_ids=True).json()
    prompt = answer["prompt_token_ids"]
    wanted = AudioReference(folder).greedy(prompt, [heard(data)], 12)
    assert answer["choices"][0]["token_ids"] == wanted


def test_the_next_turn_finds_the_clip_in_its_cache(server: Server) -> None:
    """OpenAI's library sends a question in speech, and again with the next turn."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        messages: list[Any] = [user(text("a question"), input_audio(wav(1.9, 5)))]
        first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content or "x"},
            user(text("and now?"), input_audio(file_of(sound(0.5, 6), "MP3"), "mp3")),
        ]
        second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens > 47
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached > first.usage.prompt_tokens - 16 - 8, "all but the block that was not full"


def test_gateways_find_the_blocks_of_media(folder: Path) -> None:
    """The tokens, hashes and places of a rendered prompt are those in the KV events of its blocks."""
    published, replayed, pins = (f"tcp://127.0.0.1:{port}" for port in free_ports(3))
    config = {"enable_kv_cache_events": True, "endpoint": published, "replay_endpoint": replayed}
    flags = ("--kv-events-config", json.dumps({**config, "pins_endpoint": pins}))
    body = {"messages": [user(text("which?"), input_audio(wav(1.9, 5)), image_url(png()))], "max_tokens": 1}
    with (
        subscriber(published, replay=replayed) as reads,
        running_server(folder, "--num-gpu-blocks-override", "600", *flags) as running,
        posting(running) as post,
    ):
        rendered = post(f"{CHAT}/render", **body).json()
        answer = post(CHAT, **body, return_token_ids=True).json()
        num_blocks = len(answer["prompt_token_ids"]) // BLOCK
        stored = reads.read_until(lambda events: len(blocks_of(events)) >= num_blocks)
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    features = rendered["features"]
    places = features["mm_placeholders"]
    assert sorted(features["mm_hashes"]) == sorted(places) == ["audio", "image"]
    told = {
        (content_hash, place["offset"])
        for kind, hashes in features["mm_hashes"].items()
        for content_hash, place in zip(hashes, places[kind], strict=True)
    }
    blocks = blocks_of(stored)
    assert [token for tokens, _ in blocks for token in tokens] == rendered["token_ids"][: num_blocks * BLOCK]
    found = {(key[0], i * BLOCK + key[1]) for i, (_, keys) in enumerate(blocks) for key in keys or ()}
    assert found == told


def blocks_of(events: list[dict[str, Any]]) -> list[tuple[list[int], list[Any] | None]]:
    """The tokens and extra keys of the stored blocks of one sequence, in its order."""
    return [
        (event["token_ids"][i * BLOCK : (i + 1) * BLOCK], keys)
        for event in events
        if event["type"] == "BlockStored"
        for i, keys in enumerate(event["extra_keys"])
    ]


def test_responses_take_audio_and_pictures(server: Server) -> None:
    with posting(server) as post:
        picture = {"type": "input_image", "image_url": image_url(png())["image_url"]["url"]}
        said = {"type": "input_text", "text": "listen"}
        both = {"role": "user", "content": [said, input_audio(wav()), picture]}
        first = post("/v1/responses", model="tiny", input=[both], max_output_tokens=4).json()
        follow = {"previous_response_id": first["id"], "input": "and?", "max_output_tokens": 4}
        second = post("/v1/responses", model="tiny", **follow).json()
    assert first["status"] in ("completed", "incomplete"), first
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] > 17 + 12
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 16


def test_a_result_of_a_tool_may_be_a_clip(server: Server) -> None:
    """A template that shows no parts of tools' messages gets the placeholder as text."""
    call = {"id": "call_0", "type": "function", "function": {"name": "listen", "arguments": "{}"}}
    clip = {"type": "audio", "data": base64_of(wav(0.6, 8)), "mimeType": "audio/wav"}
    messages = [
        user(text("what do you hear?")),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": [clip]},
    ]
    with posting(server) as post:
        counted = post("/tokenize", messages=messages).json()
        answer = post(CHAT, messages=messages, max_tokens=2).json()
    assert counted["tokens"].count(512) == 15
    assert answer["usage"]["prompt_tokens"] == counted["count"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (png(), "messages[0].content[0] is not audio in WAV, FLAC, OGG or MP3"),
        (wav()[:30] + b"x" * 40, "messages[0].content[0] is broken"),
        (wav(2.5), "messages[0].content[0] has more than 2 s; this model reads clips of 0.1 s to 2 s"),
        (wav(0.01), "has 0.01 s; this model reads"),
    ],
)
def test_a_clip_that_cannot_be_heard_is_refused(server: Server, data: bytes, sentence: str) -> None:
    """In the last message it is an error that names the part; in the history it is left out."""
    with posting(server) as post:
        refused = post(CHAT, messages=[user(input_audio(data))], max_tokens=2)
        assert refused.status_code == 400
        assert sentence in refused.json()["error"]["message"]
        history = [user(input_audio(data)), {"role": "assistant", "content": "?"}, user(text("again"))]
        answer = post(CHAT, messages=history, max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert "left_out" in answer.text


def test_no_text_can_be_a_placeholder(server: Server) -> None:
    with posting(server) as post:
        counted = post("/tokenize", messages=[user(text("<|AUDIO|> <|IMAGE|> <|VIDEO|>"))]).json()
        many = post(CHAT, messages=[user(*[input_audio(wav())] * 17)], max_tokens=1)
    assert not {512, 515, 516} & set(counted["tokens"])
    assert "is one of 17 clips in the last message; this server takes 16" in many.text


def test_limits_and_text_only(folder: Path) -> None:
    flags = ("--limit-mm-per-prompt", '{"audio": 0, "image": 2}', "--num-gpu-blocks-override", "600")
    with running_server(folder, *flags) as server, posting(server) as post:
        refused = post(CHAT, messages=[user(input_audio(wav()))])
        assert "is of type 'input_audio'; this server takes text and pictures only" in refused.text
        assert post(CHAT, messages=[user(image_url(png()))], max_tokens=1).status_code == 200
        assert children_of(server.process.pid, "engine.media.audio_process") == []
        assert "mm_cache_queries_total" in httpx.get(f"{server.url}/metrics").text


def test_gemmas_clips_have_a_token_on_each_side(audio_folders: AudioFolders) -> None:
    """Its template leaves them to the processor, and so do prompts: they are added, and counted."""
    with LLM(
        str(audio_folders("gemma4")), multiprocess=False, **SIZES | {"num_gpu_blocks_override": 120}
    ) as llm:
        tokenizer = llm.get_tokenizer()
        clip = sound(1.0, 4)
        prompt = {"prompt": "hear <|AUDIO|>!", "multi_modal_data": {"audio": clip}}
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        heard_as = "<|audio_bos|>" + "<|AUDIO|>" * 25 + "<|audio_eos|>"
        assert output.prompt_token_ids == tokenizer.encode(f"hear {heard_as}!")
        (chatted,) = llm.chat([user(text("a"), input_audio(wav(1.0)))], GREEDY, use_tqdm=False)
        assert heard_as in tokenizer.decode(chatted.prompt_token_ids)
        wanted = AudioReference(audio_folders("gemma4")).greedy(list(output.prompt_token_ids), [clip], 8)
        assert tokens_of(output) == wanted


def test_in_python(folder: Path, tmp_path: Path) -> None:
    """Arrays, arrays with their rate, bytes and paths are the same clip; a conversation takes parts."""
    clip = sound(1.0, 4)
    (tmp_path / "clip.wav").write_bytes(data := file_of(clip, subtype="FLOAT"))
    prompt = "hear <|audio_bos|><|AUDIO|><|audio_eos|>"
    with LLM(str(folder), multiprocess=False, **SIZES) as llm:
        given = (clip, (clip, RATE), data, str(tmp_path / "clip.wav"), [tmp_path / "clip.wav"])
        asked = [{"prompt": prompt, "multi_modal_data": {"audio": each}} for each in given]
        answers = {tuple(tokens_of(each)) for each in llm.generate(asked, GREEDY, use_tqdm=False)}
        assert len(answers) == 1
        tokens = llm.get_tokenizer().encode(prompt.replace("<|AUDIO|>", "<|AUDIO|>" * 25))
        assert list(answers.pop()) == AudioReference(folder).greedy(tokens, [clip], 8)
        (chatted,) = llm.chat([user(text("a"), input_audio(data))], GREEDY, use_tqdm=False)
        assert (chatted.prompt_token_ids or []).count(512) == 25
        for wrong, sentence in (
            (np.zeros((5, 2), np.float32), "array of samples"),
            (np.zeros(5, np.int16), "array of samples"),
            (np.zeros(3 * RATE, np.float32), "has more than 2 s; this model reads"),
            (b"abc", "is not audio"),
        ):
            with pytest.raises(RequestError, match=sentence):
                llm.generate({"prompt": prompt, "multi_modal_data": {"audio": wrong}}, use_tqdm=False)
