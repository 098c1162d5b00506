"""What an engine does with pictures besides computing them: cache, evict, refuse."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from engine.core.outputs import SchedulerOutput
from engine.core.scheduler import Scheduler
from engine.core.step import Step
from engine.errors import ConfigError, ModelLoadError
from engine.frontend.llm import LLM
from engine.records.media import PictureSize
from engine.records.messages import FinishReason
from engine.records.row_failures import MEDIA_LOST
from engine.worker.media.vision_tower import Picture, VisionTower
from tests.pictures.conftest import PictureFolders
from tests.pictures.picture_engine import SIZES, greedy, picture_engine, tokens_of
from tests.pictures.picture_folders import FACTOR, copied, picture

A, B, C = picture(3, 4, 1), picture(2, 5, 2), picture(6, 3, 3)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of pictures in each run of the encoder."""
    counts: list[int] = []
    plain = VisionTower.encode

    def encode(self: VisionTower, pictures: list[Picture]) -> Any:
        counts.append(len(pictures))
        return plain(self, pictures)

    monkeypatch.setattr(VisionTower, "encode", encode)
    return counts


@pytest.mark.slow
def test_a_history_of_screenshots_is_computed_once(
    picture_folders: PictureFolders, tmp_path: Path, encoded: list[int]
) -> None:
    """After twenty pictures, a turn with one more encodes only that one and prefills only its tokens."""
    shots = [picture(3, 4, seed) for seed in range(21)]
    folder = picture_folders("qwen2_5_vl")
    with picture_engine(folder, tmp_path, num_gpu_blocks_override=200, max_num_batched_tokens=64) as engine:
        history = [part for shot in shots[:20] for part in (4, shot)]
        first = engine.ask(engine.prompt(*history, 3))
        assert first.num_cached_tokens == 0
        assert sum(encoded) == 20
        second = engine.ask(engine.prompt(*history, 3, shots[20], 2))
        assert sum(encoded) == 21
        num_tokens = len(second.prompt_token_ids or ())
        assert second.num_cached_tokens is not None
        assert num_tokens - second.num_cached_tokens < 3 + 12 + 2 + 16
        fresh = engine.prompt(*history, 3, shots[20], 2)
        engine.llm.reset_prefix_cache()
        assert tokens_of(engine.ask(fresh)) == tokens_of(second)


@pytest.mark.slow
def test_equal_tokens_of_other_pictures_share_nothing(
    picture_folders: PictureFolders, tmp_path: Path, encoded: list[int]
) -> None:
    other = picture(3, 4, 99)
    with picture_engine(picture_folders("qwen3_vl"), tmp_path) as engine:
        one = engine.ask(engine.prompt(20, A, 20))
        same = engine.ask(engine.prompt(20, A, 20))
        changed = engine.ask(engine.prompt(20, other, 20))
    assert tokens_of(one) == tokens_of(same) != tokens_of(changed)
    assert same.num_cached_tokens == 48
    assert changed.num_cached_tokens == 16  # the block before the picture's first block
    assert encoded == [1, 1]


@pytest.mark.slow
def test_requests_of_one_step_share_an_output(
    picture_folders: PictureFolders, tmp_path: Path, encoded: list[int]
) -> None:
    with picture_engine(picture_folders("qwen2_vl"), tmp_path, enable_prefix_caching=False) as engine:
        for name in "xyz":
            engine.add(name, engine.prompt(5, A, 3, B, 2, seed=ord(name)))
        outputs = engine.run()
        assert encoded == [2]
        engine.llm.engine._utility("reset_encoder_cache", None)  # type: ignore[arg-type]
        assert tokens_of(engine.ask(engine.prompt(5, A, 3, B, 2, seed=ord("y")))) == tokens_of(outputs["y"])
        assert encoded == [2, 2]


@pytest.mark.slow
def test_sizes_of_the_encoder_are_as_they_are_set(
    picture_folders: PictureFolders, tmp_path: Path, encoded: list[int]
) -> None:
    """With limits of twelve tokens, a step encodes one of two such pictures, and one output is cached."""
    sizes = {"encoder_cache_size": 12, "max_num_encoder_input_tokens": 12, "max_pixels": 12 * FACTOR**2}
    other = picture(4, 3, 8)
    with picture_engine(
        picture_folders("qwen2_vl"), tmp_path, enable_prefix_caching=False, **sizes
    ) as engine:
        first = engine.ask(engine.prompt(5, A, 3, other, 2))
        assert encoded == [1, 1]
        assert tokens_of(engine.ask(engine.prompt(5, A, 3, other, 2))) == tokens_of(first)
        assert encoded == [1, 1, 1, 1]
    with picture_engine(picture_folders("qwen2_vl"), tmp_path, enable_prefix_caching=False) as engine:
        assert tokens_of(engine.ask(engine.prompt(5, A, 3, other, 2))) == tokens_of(first)
        engine.ask(engine.prompt(5, A, 3, other, 2))
        assert encoded == [1, 1, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "steps"), [(False, [16, 11]), (True, [10, 16, 1])])
def test_a_step_is_cut_before_a_picture_if_asked(
    whole: bool,
    steps: list[int],
    picture_folders: PictureFolders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of sixteen tokens take ten of text, twelve of a picture and five of text."""
    totals: list[int] = []
    plain = Scheduler.plan

    def plan(self: Scheduler, step: Step) -> SchedulerOutput:
        made = plain(self, step)
        totals.append(made.total_num_scheduled_tokens)
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    folder, sizes = picture_folders("qwen2_vl"), {"max_pixels": 12 * FACTOR**2, "max_num_batched_tokens": 16}
    with picture_engine(folder, tmp_path, disable_chunked_mm_input=whole, **sizes) as engine:
        prompt = engine.prompt(10, A, 5)
        answer = tokens_of(engine.ask(prompt))
    assert totals[: len(steps)] == steps
    with picture_engine(folder, tmp_path) as engine:
        assert tokens_of(engine.ask(prompt)) == answer


@pytest.mark.slow
def test_pixels_that_are_gone_end_their_request_alone(
    picture_folders: PictureFolders, tmp_path: Path
) -> None:
    """A request whose pixels are lost fails alone, and nothing computed from it is reused."""
    with picture_engine(picture_folders("qwen3_vl"), tmp_path, max_num_batched_tokens=16) as engine:
        lost = engine.prompt(20, C, 20)
        other = engine.prompt(9, A, 9, seed=4)
        alone = tokens_of(engine.ask(other))
        Path(lost[1][0].path).unlink()
        engine.add("lost", lost)
        engine.add("other", other)
        outputs = engine.run()
        failed = outputs["lost"].outputs[0]
        assert (failed.finish_reason, failed.stop_reason) == (str(FinishReason.ERROR), MEDIA_LOST)
        assert tokens_of(outputs["other"]) == alone
        again = engine.ask(engine.prompt(20, C, 20))  # writes the pixels again
        assert again.num_cached_tokens in (0, 16)
    with picture_engine(picture_folders("qwen3_vl"), tmp_path) as engine:
        assert tokens_of(engine.ask(engine.prompt(20, C, 20))) == tokens_of(again)


@pytest.mark.slow
def test_what_is_said_of_a_picture_is_checked(picture_folders: PictureFolders, tmp_path: Path) -> None:
    """The core itself validates pictures, because other programs send requests to it, too."""
    with picture_engine(picture_folders("qwen2_5_vl"), tmp_path, max_pictures=2) as engine:
        tokens, (span,) = engine.prompt(5, A, 5)
        wrong = {
            "has tokens 5 to 29, outside 0 to 22": msgspec.structs.replace(span, length=24),
            "has 11 tokens, which does not match": msgspec.structs.replace(span, length=11),
            "has no size or file": msgspec.structs.replace(span, path=""),
            "needs a content hash": msgspec.structs.replace(span, content_hash=""),
            "is 32x25 pixels; both sides must be multiples of 8": msgspec.structs.replace(
                span, size=PictureSize(25, 32)
            ),
        }
        for sentence, each in wrong.items():
            engine.add("wrong", (tokens, (each,)))
            output = engine.run()["wrong"].outputs[0]
            assert output.finish_reason == "error"
            assert f"media[0] {sentence}" in str(output.stop_reason)
        engine.add("many", (tokens, (span, span, span)))
        assert "3 pictures; this model takes 2" in str(engine.run()["many"].outputs[0].stop_reason)
        assert len(tokens_of(engine.ask((tokens, (span,))))) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_pictures": 0}, "is served as text"),
        pytest.param(
            {"pipeline_parallel_size": 2, "multiprocess": True},
            "not read with pipeline_parallel_size > 1",
            marks=pytest.mark.long,
        ),
    ],
)
def test_without_pictures_it_is_served_as_text(
    options: dict[str, Any],
    sentence: str,
    picture_folders: PictureFolders,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = picture_folders("qwen2_5_vl")
    with picture_engine(folder, folder) as engine:
        wanted = tokens_of(engine.ask(engine.prompt(20)))
    caplog.set_level(logging.INFO, "continuum.start")
    with LLM(str(folder), **{"multiprocess": False, **SIZES, **options}) as llm:
        assert llm.engine.ready.media is None
        (output,) = llm.generate([engine.prompt(20)[0]], greedy(), use_tqdm=False)
        assert tokens_of(output) == wanted
    assert sentence in caplog.text + capfd.readouterr().err  # ranks are processes


@pytest.mark.slow
def test_it_sleeps_and_takes_other_weights(
    picture_folders: PictureFolders, tmp_path: Path, encoded: list[int]
) -> None:
    """After sleep and an update of weights, no encoder output of the old weights is reused."""
    folder = picture_folders("qwen2_5_vl")
    other = copied(folder, tmp_path / "other", "config.json")
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: x * 1.2 if "visual" in name else x for name, x in weights.items()}, other / "model.safetensors"
    )
    with picture_engine(other, tmp_path) as engine:
        wanted = tokens_of(engine.ask(engine.prompt(7, A, 9)))
    with picture_engine(folder, tmp_path) as engine:
        before = tokens_of(engine.ask(engine.prompt(7, A, 9)))
        engine.llm.sleep(2)
        engine.llm.wake_up()
        assert tokens_of(engine.ask(engine.prompt(7, A, 9))) == before != wanted
        engine.llm.update_weights(other)
        assert tokens_of(engine.ask(engine.prompt(7, A, 9))) == wanted
    assert encoded == [1] * 4


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"max_pixels": 63}, ConfigError, "64 <= min_pixels <= max_pixels"),
        ({"min_pixels": 6400, "max_pixels": 640}, ConfigError, "got 6400 and 640"),
        (
            {"disable_chunked_mm_input": True, "max_num_batched_tokens": 11, "max_pixels": 768},
            ConfigError,
            "max_num_batched_tokens of at least 12, the tokens of the largest of its pictures",
        ),
        ({"max_pictures": -1}, ConfigError, "max_pictures must be at least 0"),
        ({"encoder_cache_size": 0}, ConfigError, "encoder_cache_size must be at least 1"),
        (
            {"max_num_encoder_input_tokens": -5},
            ConfigError,
            "encoder_input_tokens must be at least 1",
        ),
    ],
)
def test_limits_are_checked(
    options: dict[str, Any], error: type[Exception], sentence: str, picture_folders: PictureFolders
) -> None:
    with pytest.raises(error, match=sentence):
        LLM(str(picture_folders("qwen2_5_vl")), multiprocess=False, **SIZES, **options)


def test_limits_of_a_folder_are_checked(picture_folders: PictureFolders, tmp_path: Path) -> None:
    """Limits are read under both names that processors have used; without the file there are no pictures."""
    folder, file = picture_folders("qwen2_5_vl"), "preprocessor_config.json"
    old = copied(folder, tmp_path / "old", file, size={}, min_pixels=128, max_pixels=6400)
    with picture_engine(old, tmp_path) as engine:
        assert (engine.model.min_pixels, engine.model.max_pixels) == (128, 6400)
        assert engine.model.factor == FACTOR
    faults: dict[str, dict[str, Any]] = {
        "max_pixels": {"size": {"longest_edge": "many"}},
        "image_mean": {"image_mean": [0.5]},
    }
    for name, fields in faults.items():
        wrong = copied(folder, tmp_path / name, file, **fields)
        with pytest.raises(ModelLoadError, match=name):
            LLM(str(wrong), multiprocess=False, **SIZES)
    bare = copied(folder, tmp_path / "bare", file)
    (bare / file).unlink()
    with LLM(str(bare), multiprocess=False, **SIZES) as llm:
        assert llm.engine.ready.media is None
    torn = copied(folder, tmp_path / "torn", file)
    (torn / file).write_text(json.dumps({})[:1])
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        LLM(str(torn), multiprocess=False, **SIZES)
