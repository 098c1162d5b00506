"""Pictures in ``LLM.generate`` and ``LLM.chat``, with vLLM's names, over a stand-in model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from engine.config.media import media_limits
from engine.errors import ConfigError, RequestError
from engine.frontend.llm import LLM, engine_config
from engine.records.media import MediaModels, PictureModel
from engine.records.sampling_params import SamplingParams
from engine.testing import FakeExecutorFactory
from tests.media.picture_folder import VOCAB_SIZE, folder_with_pictures
from tests.media.pictures import data_url, file_of, image_url, noise, png
from tests.media.templates import WITH_TOOLS

ONE = "<|vision_start|><|image_pad|><|vision_end|>"
SHORT = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PictureModel]:
    return folder_with_pictures(model_folder, tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(scope="module")
def llm(folder: tuple[Path, PictureModel]) -> Iterator[LLM]:
    path, pictures = folder
    executor = FakeExecutorFactory(vocab_size=VOCAB_SIZE, media=MediaModels(pictures))
    with LLM(path, executor_factory=executor, multiprocess=False) as made:
        yield made


def store_of(llm: LLM) -> Any:
    reader = llm._media._reader
    assert reader is not None
    return reader.store


def prompt_of(llm: LLM, given: Any) -> str:
    (output,) = llm.generate(given, SHORT, use_tqdm=False)
    return llm.get_tokenizer().decode(output.prompt_token_ids)


def shown(count: int) -> str:
    return ONE.replace("<|image_pad|>", "<|image_pad|>" * count)


def test_a_prompt_may_have_pictures_of_every_kind(llm: LLM, tmp_path: Path) -> None:
    """Opened pictures, bytes and paths work; a token is 8x8 pixels. Pixels are held until the call ends."""
    path = tmp_path / "picture.png"
    path.write_bytes(png(16, 16))
    for picture, count in ((noise(24, 16), 6), (png(), 12), (str(path), 4), (path, 4), ([png()], 12)):
        prompt = {"prompt": f"a{ONE}b", "multi_modal_data": {"image": picture}}
        assert prompt_of(llm, prompt) == f"a{shown(count)}b"
    assert store_of(llm).statistics().num_held == 0


def test_tokens_with_placeholders_are_a_prompt_too(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(f"{ONE} and {ONE}")
    given = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": [png(8, 8), noise(16, 16)]}}
    assert prompt_of(llm, given) == f"{shown(1)} and {shown(4)}"


def test_an_opened_picture_is_read_as_its_file_would_be(llm: LLM) -> None:
    """An opened picture gives the same pixels as its file, transparent ones too."""
    picture, files = noise(40, 30, "RGBA"), []
    for given in (picture, file_of(picture)):
        with llm._media.lease() as lease:
            _, (span,) = llm._media.expanded(
                _input({"prompt": ONE, "multi_modal_data": {"image": given}}), lease
            )
            files.append(Path(span.path).read_bytes())
    assert files[0] == files[1]


def _input(given: Any) -> Any:
    from engine.frontend.prompts import as_inputs

    (found,) = as_inputs(given)
    return found


def test_equal_pictures_are_decoded_once(llm: LLM) -> None:
    before = store_of(llm).statistics().num_decoded
    prompt: dict[str, Any] = {"prompt": ONE, "multi_modal_data": {"image": png(seed=77)}}
    prompts: list[Any] = [prompt, prompt, "text only"]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    assert store_of(llm).statistics().num_decoded == before + 1
    assert [output.prompt for output in outputs] == [ONE, ONE, "text only"]


def test_pictures_can_be_forgotten(llm: LLM) -> None:
    llm.generate({"prompt": ONE, "multi_modal_data": {"image": png()}}, SHORT, use_tqdm=False)
    assert store_of(llm).statistics().num_idle > 0
    llm.reset_mm_cache()
    assert store_of(llm).statistics().num_idle == 0


def test_chats_take_parts_with_pictures(llm: LLM) -> None:
    parts: list[Any] = [
        image_url(png()),
        "a",
        {"type": "image_pil", "image_pil": noise(8, 8)},
        {"type": "image", "image": noise(8, 16)},
        {"type": "text", "text": "<|image_pad|>"},
    ]
    messages = [{"role": "user", "content": parts}]
    (output,) = llm.chat(messages, SHORT, use_tqdm=False, chat_template=WITH_TOOLS)
    text = llm.get_tokenizer().decode(output.prompt_token_ids)
    begins = f"<|im_start|>user\n{shown(12)}a{shown(1)}{shown(2)}<|\u200bimage_pad|>"
    assert text == f"{begins}<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt is None


def test_an_event_loop_that_runs_is_no_hindrance(llm: LLM) -> None:
    """``chat`` works while an event loop runs, as in a notebook."""
    import asyncio

    async def ask() -> str:
        messages = [{"role": "user", "content": [image_url(png(8, 8))]}]
        (output,) = llm.chat(messages, SHORT, use_tqdm=False, chat_template=WITH_TOOLS)
        return llm.get_tokenizer().decode(output.prompt_token_ids)

    assert shown(1) in asyncio.run(ask())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": ONE}, None),
        (
            {"prompt": ONE, "multi_modal_data": {"image": b"no"}},
            r"prompts.multi_modal_data.image\[0\] is not a",
        ),
        ([{"prompt": ONE, "multi_modal_data": {"image": 5}}], r"prompts\[0\].* must be a picture of Pillow"),
        ({"prompt": ONE, "multi_modal_data": {"image": "/nowhere.png"}}, "cannot be read: No such file"),
        (
            {"prompt": ONE, "multi_modal_data": {"video": b""}},
            "has 'video'; this engine takes image and audio",
        ),
        ({"prompt": "no", "multi_modal_data": {"image": png()}}, "has 0 placeholders .* for 1 pictures"),
        ({"prompt": ONE * 2, "multi_modal_data": {"image": png()}}, "has 2 placeholders .* for 1 pictures"),
        ({"prompt": ONE, "multi_modal_data": {"image": [png()] * 9}}, r"9 pictures; a prompt takes 8"),
        ({"prompt": ONE, "image": png()}, "must not have 'image' here"),
        ({"prompt": ONE, "mm_processor_kwargs": {"a": 1}}, "must not have 'mm_processor_kwargs' here"),
        ({"multi_modal_data": {}}, "needs prompt, a text, or prompt_token_ids"),
        (5, "A prompt is a text or a list of token ids, got int"),
        ([5.0], "A prompt is a text or a list of token ids, got float"),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, given: Any, message: str | None) -> None:
    if message is None:
        assert prompt_of(llm, given) == ONE
        return
    with pytest.raises(RequestError, match=message):
        llm.generate(given, SHORT, use_tqdm=False)
    assert store_of(llm).statistics().num_held == 0


def test_a_text_model_takes_no_pictures(model_folder: Path) -> None:
    with LLM(model_folder, executor_factory=FakeExecutorFactory(), multiprocess=False) as llm:
        with pytest.raises(RequestError, match="reads text only"):
            llm.generate({"prompt": "a", "multi_modal_data": {"image": png()}}, SHORT, use_tqdm=False)
        with pytest.raises(RequestError, match="takes text only"):
            llm.chat([{"role": "user", "content": [image_url(png())]}], SHORT, use_tqdm=False)
        (output,) = llm.generate({"prompt": "a"}, SHORT, use_tqdm=False)
        assert output.prompt == "a"


def test_options_are_v1s(model_folder: Path) -> None:
    config = engine_config(
        str(model_folder),
        limit_mm_per_prompt={"image": 3, "video": 0},
        mm_processor_kwargs='{"min_pixels": 100, "max_pixels": 200}',
    )
    assert (config.model.max_pictures, config.model.min_pixels, config.model.max_pixels) == (3, 100, 200)
    assert engine_config(str(model_folder), language_model_only=True).model.max_pictures == 0
    assert engine_config(str(model_folder)).model.max_pictures == 64


@pytest.mark.parametrize(
    ("limit", "kwargs", "message"),
    [
        ({"picture": 1}, None, "limit_mm_per_prompt must not set 'picture'"),
        ({"image": -1}, None, "image must be a number from 0"),
        ({"image": True}, None, "image must be a number from 0"),
        ({"video": 1}, None, "video must be 0"),
        ("{", None, "limit_mm_per_prompt must be a JSON object"),
        (None, {"fps": 2}, "mm_processor_kwargs must not set 'fps'; it takes min_pixels and max_pixels"),
        (None, {"max_pixels": 0}, "max_pixels must be a number from 1"),
        (None, {"min_pixels": 5, "max_pixels": 4}, "min_pixels must not exceed max_pixels"),
        (None, "[1]", "mm_processor_kwargs must be a JSON object"),
    ],
)
def test_wrong_options_are_named(limit: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        media_limits(limit, kwargs)


def test_urls_need_a_named_host(llm: LLM) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\] is at host 'example.com'"):
        llm.chat([{"role": "user", "content": [part]}], SHORT, use_tqdm=False)


def test_pictures_of_a_url_in_a_request_are_read(llm: LLM) -> None:
    """Parts in Anthropic's and MCP's form work as well as OpenAI's: frameworks pass on what they have."""
    part = {"type": "image", "source": {"type": "url", "url": data_url(png(8, 8))}}
    messages = [{"role": "user", "content": [part]}]
    (output,) = llm.chat(messages, SHORT, use_tqdm=False, chat_template=WITH_TOOLS)
    assert shown(1) in llm.get_tokenizer().decode(output.prompt_token_ids)


def test_without_pillow_the_error_says_what_to_install(
    folder: tuple[Path, PictureModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.media.reader.can_decode", lambda kind: False)
    path, pictures = folder
    pictures = msgspec.structs.replace(pictures, max_count=1)
    executor = FakeExecutorFactory(vocab_size=VOCAB_SIZE, media=MediaModels(pictures))
    with LLM(path, executor_factory=executor, multiprocess=False) as llm:
        with pytest.raises(RequestError, match=r"pip install 'continuum-engine\[pictures\]'"):
            llm.generate({"prompt": ONE, "multi_modal_data": {"image": png()}}, SHORT, use_tqdm=False)
        (output,) = llm.generate("text", SHORT, use_tqdm=False)
        assert output.finished


def test_pixels_go_with_the_engine(folder: tuple[Path, PictureModel]) -> None:
    path, pictures = folder
    executor = FakeExecutorFactory(vocab_size=VOCAB_SIZE, media=MediaModels(pictures))
    with LLM(path, executor_factory=executor, multiprocess=False, mm_processor_cache_gb=0.5) as llm:
        llm.generate(
            {"prompt": ONE, "multi_modal_data": {"image": Image.new("L", (9, 9))}}, SHORT, use_tqdm=False
        )
        kept = store_of(llm)._folder
        assert Path(kept).is_dir()
    assert not Path(kept).exists()
