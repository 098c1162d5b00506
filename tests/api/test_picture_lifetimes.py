"""How long pictures are kept and for whom: held while a request runs, however it ends; cached per owner;
compared by content."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.api.config import AccessConfig, ServerConfig
from engine.api.processes.listener import bound_socket
from engine.api.processes.startup_messages import say_ready
from engine.config.media import MediaConfig
from engine.records.media import PictureModel
from engine.testing import FakeExecutorFactory
from tests.api.picture_site import PictureSite, picture_site
from tests.media.picture_folder import folder_with_pictures
from tests.media.picture_host import PictureSiteHandler, picture_host
from tests.media.pictures import image_block, image_url, png

Folder = tuple[Path, PictureModel]
CHAT = "/v1/chat/completions"

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folder_with_pictures(model, tmp_path_factory.mktemp("pictures") / "model")


@pytest_asyncio.fixture
async def endless(folder: Folder) -> AsyncIterator[PictureSite]:
    async with picture_site(*folder, executor=FakeExecutorFactory(max_model_len=30_000)) as site:
        yield site


def asking(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], **more}


async def others_run() -> None:
    """Lets all other tasks run one step."""
    await asyncio.sleep(0)


async def until_held(site: PictureSite, count: int) -> None:
    while site.num_held != count:
        await others_run()


async def test_a_client_that_leaves_holds_nothing(endless: PictureSite) -> None:
    body = asking(image_url(png()), max_tokens=20_000, ignore_eos=True)
    request = asyncio.create_task(endless.post(CHAT, **body))
    await until_held(endless, 1)
    request.cancel()
    await asyncio.wait([request])
    await until_held(endless, 0)


async def test_a_request_that_is_ended_holds_nothing(endless: PictureSite) -> None:
    """A request ended by the server, as at the end of its grace period, releases its picture."""
    body = asking(image_url(png()), max_tokens=20_000, ignore_eos=True)
    request = asyncio.create_task(endless.post(CHAT, **body))
    await until_held(endless, 1)
    await endless.model.end_all()
    assert (await request).status_code == 503
    await until_held(endless, 0)


async def test_a_client_that_leaves_while_its_picture_is_decoded_holds_nothing(endless: PictureSite) -> None:
    """A disconnect releases the picture, whether its decoding had begun or is skipped."""
    large = image_url(png(2000, 2000))
    request = asyncio.create_task(endless.post(CHAT, **asking(large, max_tokens=20_000, ignore_eos=True)))
    assert endless.model.media is not None
    store = endless.model.media.store
    while not store._pending and endless.num_decoded == 0:
        await others_run()
    request.cancel()
    await asyncio.wait([request])
    while store._pending:
        await others_run()
    assert endless.num_held == 0


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 10**6},
        {"temperature": -1},
        {"structured_outputs": {"regex": "("}},
        {"stop_token_ids": [10**6]},
        {"chat_template": "{{ nothing"},
    ],
)
async def test_a_refused_request_holds_nothing(endless: PictureSite, more: dict[str, Any]) -> None:
    answer = await endless.post(CHAT, **asking(image_url(png()), **more))
    assert answer.status_code == 400
    assert endless.num_held == 0


async def test_several_answers_hold_one_picture(endless: PictureSite) -> None:
    body = asking(image_url(png()), image_url(png()), n=3, max_tokens=20_000, ignore_eos=True)
    request = asyncio.create_task(endless.post(CHAT, **body))
    await until_held(endless, 1)
    request.cancel()
    await asyncio.wait([request])
    await until_held(endless, 0)


async def test_a_shorter_conversation_holds_its_own_pictures(folder: Folder) -> None:
    """``truncation: auto`` renders several shorter prompts, and no pictures stay held."""
    async with picture_site(*folder) as site:
        messages: list[Any] = []
        for turn in range(40):
            part = {"type": "input_image", "image_url": image_url(png(64, 64, seed=turn))["image_url"]["url"]}
            messages.append({"role": "user", "content": [{"type": "input_text", "text": "a" * 900}, part]})
            messages.append({"role": "assistant", "content": "yes"})
        messages.append({"role": "user", "content": "and now?"})
        answer = await site.post("/v1/responses", model="tiny", input=messages, truncation="auto")
        assert answer.status_code == 200, answer.text
        assert site.num_held == 0


async def test_owners_share_neither_blocks_nor_pixels(folder: Folder) -> None:
    access = AccessConfig(api_keys=("ann:one", "bob:two"))
    async with picture_site(*folder, access=access) as site:
        decoded, cached = [], []
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            body = asking(image_url(png(64, 64)), max_tokens=1)
            answer = await site.http.post(CHAT, json=body, headers=headers)
            usage = answer.json()["usage"]
            cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
            decoded.append(site.num_decoded)
        assert decoded == [1, 2, 2]
        assert cached[:2] == [0, 0]
        assert cached[2] >= 64


async def test_prompts_are_compared_by_what_their_pictures_show(folder: Folder) -> None:
    """Diagnostics report a changed picture, and nothing else."""
    async with picture_site(*folder) as site:

        async def told(previous: str | None, seed: int) -> Any:
            body = asking(image_block(png(64, 64, seed=seed)), max_tokens=1)
            body["diagnostics"] = {"previous_message_id": previous}
            return (await site.post("/v1/messages", **body)).json()

        first = await told(None, 1)
        same = await told(first["id"], 1)
        other = await told(same["id"], 2)
    assert "messages_changed" not in str(same["diagnostics"])
    assert "messages_changed" in str(other["diagnostics"])


async def test_a_picture_at_a_url_is_fetched_once(folder: Folder) -> None:
    """A picture in the history is fetched once; where it is sent again it is fetched again."""
    media = MediaConfig(allowed_media_domains=("127.0.0.1",))
    with picture_host() as host:
        part = {"type": "image_url", "image_url": {"url": f"http://{host}/picture.png"}}
        asked = PictureSiteHandler.num_requests
        async with picture_site(*folder, media=media) as site:
            before = asked["/picture.png"]
            messages: list[Any] = [{"role": "user", "content": [part]}]
            for expected in (1, 1, 1, 2):
                if expected == 2:
                    messages.append({"role": "user", "content": [part]})
                answer = await site.post(CHAT, model="tiny", messages=messages, max_tokens=1)
                assert answer.status_code == 200, answer.text
                assert asked["/picture.png"] - before == expected
                if len(messages) == 1:
                    messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
            assert site.num_decoded == 1
    elsewhere = {"type": "image_url", "image_url": {"url": f"http://{host}/picture.png"}}
    async with picture_site(*folder) as site:
        refused = await site.post(CHAT, **asking(elsewhere))
        assert "which --allowed-media-domains does not name" in refused.text


async def test_metrics_tell_how_many_pictures_were_known(folder: Folder) -> None:
    async with picture_site(*folder) as site:
        for seeds in ((1,), (1, 2), (1, 2)):
            parts = [image_url(png(seed=seed)) for seed in seeds]
            await site.post(CHAT, **asking(*parts, max_tokens=1))
        await site.post("/v1/messages/count_tokens", **asking(image_block(png(seed=1))))
        exposed = (await site.http.get("/metrics")).text
    assert re.search(r"^vllm:mm_cache_queries_total\{.*\} 5.0$", exposed, re.MULTILINE)
    assert re.search(r"^vllm:mm_cache_hits_total\{.*\} 3.0$", exposed, re.MULTILINE)


async def test_the_store_is_cleared_on_request(folder: Folder) -> None:
    async with picture_site(*folder) as site:
        await site.post(CHAT, **asking(image_url(png()), max_tokens=1))
        assert site.model.media is not None
        assert site.model.media.store.statistics().num_idle == 1
        assert (await site.post("/reset_mm_cache")).json() == {"success": True}
        assert site.model.media.store.statistics().num_idle == 0


async def test_without_memory_for_more_pictures_a_request_may_come_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.media.store.MIN_HELD_BYTES", 3000)
    media = MediaConfig(mm_processor_cache_gb=0)
    executor = FakeExecutorFactory(max_model_len=30_000)
    async with picture_site(*folder, media=media, executor=executor) as site:
        body = asking(image_url(png()), max_tokens=20_000, ignore_eos=True)
        request = asyncio.create_task(site.post(CHAT, **body))
        await until_held(site, 1)
        refused = await site.post(CHAT, **asking(image_url(png(seed=1))))
        assert refused.status_code == 503
        assert "Pictures and clips of running requests take" in refused.text
        assert refused.headers["retry-after"] == "1"
        assert (
            await site.post(CHAT, **asking({"type": "text", "text": "a"}, max_tokens=1))
        ).status_code == 200
        request.cancel()
        await asyncio.wait([request])
        await until_held(site, 0)
        assert (await site.post(CHAT, **asking(image_url(png(seed=1)), max_tokens=1))).status_code == 200


async def test_without_pillow_pictures_are_left_out_and_the_start_says_so(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.media.reader.can_decode", lambda kind: False)
    monkeypatch.setattr("engine.api.processes.startup_messages.can_decode", lambda kind: False)
    async with picture_site(*folder) as site:
        answer = await site.post(CHAT, **asking(image_url(png())))
        assert "this server takes text only" in answer.text
        config = ServerConfig(served_model_names=("tiny",), host="127.0.0.1", port=0)
        with bound_socket(config) as sock:
            say_ready(config, sock, site.model.engine.ready)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'continuum-engine[pictures]'" in said
