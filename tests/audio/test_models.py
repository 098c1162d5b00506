"""Answers to prompts with audio are those of transformers, however they are computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.errors import ModelLoadError
from engine.frontend.llm import LLM
from engine.records.media import AudioModel, ClipSize, TokenRule
from engine.records.row_failures import MEDIA_LOST
from tests.audio.audio_engine import Part, audio_engine, clips_in, pictures_in
from tests.audio.audio_folders import CONFIGS, RATE, sound
from tests.audio.conftest import AudioFolders
from tests.audio.reference import AudioReference
from tests.pictures.picture_engine import SIZES, tokens_of
from tests.pictures.picture_folders import picture
from tests.worker.loading.multimodal_folders import renamed

A, B, C = sound(1.3, 1), sound(0.513, 2), sound(2.0, 3)
PROMPTS: list[tuple[Part, ...]] = [(7, A, 13, B, 20), (A, 5), (3, C, 2, B, 4, C, 1), (30,)]
FILE = "model.safetensors"
OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_tokens_are_those_of_transformers(
    model_type: str, audio_folders: AudioFolders, tmp_path: Path
) -> None:
    """Tokens are the same in whole steps and in chunks that end within clips, alone and in a batch."""
    folder = audio_folders(model_type)
    reference = AudioReference(folder)
    with audio_engine(folder, tmp_path) as engine:
        prompts = [engine.prompt(*parts, seed=index) for index, parts in enumerate(PROMPTS)]
        wanted = [
            reference.greedy(tokens, clips_in(parts), 12)
            for (tokens, _), parts in zip(prompts, PROMPTS, strict=True)
        ]
        assert tokens_of(engine.ask(prompts[0])) == wanted[0]
        assert tokens_of(engine.ask(engine.prompt(7, 0 * A, 13, B, 20, seed=0))) != wanted[0]
    others: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 9},
        {"attention_backend": "torch", "max_num_seqs": 2},
    ]
    for options in others:
        with audio_engine(folder, tmp_path, **options) as engine:
            for index, prompt in enumerate(prompts):
                engine.add(str(index), prompt)
            outputs = engine.run()
            assert [tokens_of(outputs[str(index)]) for index in range(len(prompts))] == wanted, options


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "multiprocess": True},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 13, "max_model_len": 192},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"enable_prefix_caching": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_so_they_are_with(options: dict[str, Any], audio_folders: AudioFolders, tmp_path: Path) -> None:
    """Tokens stay the same with each option; ``num_gpu_blocks_override`` causes preemption."""
    folder = audio_folders("qwen3_omni_moe_thinker")
    with audio_engine(folder, tmp_path) as engine:
        prompts = [engine.prompt(*parts, seed=index) for index, parts in enumerate(PROMPTS)]
        wanted = [tokens_of(engine.ask(prompt, 24)) for prompt in prompts]
    with audio_engine(folder, tmp_path, **options) as engine:
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, 24)
        outputs = engine.run()
        assert [tokens_of(outputs[str(index)]) for index in range(len(prompts))] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OMNI)
def test_pictures_and_clips_of_one_prompt(
    model_type: str, audio_folders: AudioFolders, tmp_path: Path
) -> None:
    """Both kinds in a prompt, in any order, and in the same step as prompts of one kind."""
    folder = audio_folders(model_type)
    reference = AudioReference(folder)
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
    around = 533, 534  # the ids say where a clip or picture begins, to transformers' positions only
    mixes: list[tuple[Part, ...]] = [(5, picture(3, 4, 1), 6, A, 4), (4, B, 3, picture(2, 5, 2), 9, C, 2)]
    ids = json.loads((folder / "config.json").read_text())
    with audio_engine(folder, tmp_path) as engine:
        prompts = [engine.prompt(*parts, seed=index) for index, parts in enumerate(mixes)]
        for tokens, media in prompts:
            for span in media:
                kind = "audio" if isinstance(span.size, ClipSize) else "vision"
                tokens[span.offset - 1] = ids.get(f"{kind}_start_token_id", around[0])
                tokens[span.end] = ids.get(f"{kind}_end_token_id", around[1])
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt)
        engine.add("text", engine.prompt(20, seed=9))
        outputs = engine.run()
    for index, ((tokens, _), parts) in enumerate(zip(prompts, mixes, strict=True)):
        inputs = dict(processor(images=pictures_in(parts), do_resize=False, return_tensors="pt"))
        wanted = reference.greedy(tokens, clips_in(parts), 12, **inputs)
        assert tokens_of(outputs[str(index)]) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OMNI)
def test_a_whole_folder_as_it_is_published(
    model_type: str, audio_folders: AudioFolders, tmp_path: Path
) -> None:
    """Published folders have older names of tensors, and parts that speak, which are left out."""
    thinker = audio_folders(model_type)
    folder = renamed(thinker, tmp_path / "whole", as_published)
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), "talker.codec_head.weight": torch.zeros(4, 4)}, weights)
    config = json.loads((thinker / "config.json").read_text())
    whole = {"model_type": model_type.removesuffix("_thinker"), "thinker_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    with audio_engine(thinker, tmp_path) as engine:
        wanted = tokens_of(engine.ask(engine.prompt(*PROMPTS[0])))
    with audio_engine(folder, tmp_path) as engine:
        assert tokens_of(engine.ask(engine.prompt(*PROMPTS[0]))) == wanted


def as_published(name: str) -> str:
    """A tensor's name in folders of Qwen-Omni as they were published."""
    name = name.replace("model.language_model.", "model.")
    for part in ("audio_tower", "visual"):
        name = name.replace(f"model.{part}.", f"{part}.")
    return f"thinker.{name}"


@pytest.mark.slow
def test_it_sleeps_and_takes_other_weights(audio_folders: AudioFolders, tmp_path: Path) -> None:
    """After sleep and an update of weights, no encoder output of the old weights is reused."""
    folder = audio_folders("qwen2_5_omni_thinker")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = {name: x * (1.3 if "audio" in name else 1) for name, x in load_file(other / FILE).items()}
    save_file(weights, other / FILE)
    with audio_engine(other, tmp_path) as engine:
        wanted = tokens_of(engine.ask(engine.prompt(7, A, 9)))
    with audio_engine(folder, tmp_path) as engine:
        before = tokens_of(engine.ask(engine.prompt(7, A, 9)))
        engine.llm.sleep(2)
        engine.llm.wake_up()
        assert tokens_of(engine.ask(engine.prompt(7, A, 9))) == before != wanted
        engine.llm.update_weights(other)
        assert tokens_of(engine.ask(engine.prompt(7, A, 9))) == wanted


@pytest.mark.slow
def test_equal_tokens_of_other_clips_share_nothing(audio_folders: AudioFolders, tmp_path: Path) -> None:
    with audio_engine(audio_folders("qwen2_audio"), tmp_path) as engine:
        one = engine.ask(engine.prompt(20, A, 20))
        same = engine.ask(engine.prompt(20, A, 20))
        changed = engine.ask(engine.prompt(20, sound(1.3, 9), 20))
    assert tokens_of(one) == tokens_of(same) != tokens_of(changed)
    assert same.num_cached_tokens == 64
    assert changed.num_cached_tokens == 16  # the block before the clip's first block


@pytest.mark.slow
def test_samples_that_are_gone_end_their_request_alone(audio_folders: AudioFolders, tmp_path: Path) -> None:
    with audio_engine(audio_folders("voxtral"), tmp_path) as engine:
        other = engine.prompt(9, A, 9, seed=4)
        alone = tokens_of(engine.ask(other))
        lost = engine.prompt(20, C, 20)
        Path(lost[1][0].path).write_bytes(b"1234")
        engine.add("lost", lost)
        engine.add("other", other)
        outputs = engine.run()
    assert outputs["lost"].outputs[0].stop_reason == MEDIA_LOST
    assert tokens_of(outputs["other"]) == alone


@pytest.mark.slow
def test_what_is_said_of_a_clip_is_checked(audio_folders: AudioFolders, tmp_path: Path) -> None:
    """The core itself validates clips, because other programs send requests to it, too."""
    with audio_engine(audio_folders("qwen2_audio"), tmp_path, max_clips=2) as engine:
        tokens, (span,) = engine.prompt(5, A, 5)
        wrong: dict[str, dict[str, Any]] = {
            "has 31 tokens, which does not match the size of this clip": {"length": 31},
            "has no size or file": {"path": ""},
            "has more than 2 s; this model reads clips of 0.1 s to 2 s": {"size": ClipSize(3 * RATE)},
            "has 0 s; this model": {"size": ClipSize(0)},
        }
        for sentence, fields in wrong.items():
            engine.add("wrong", (tokens, (msgspec.structs.replace(span, **fields),)))
            assert sentence in str(engine.run()["wrong"].outputs[0].stop_reason)
        engine.add("many", (tokens, (span, span, span)))
        assert "3 clips; this model takes 2" in str(engine.run()["many"].outputs[0].stop_reason)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"feature_size": 80}, "have 80 numbers; its encoder reads 16"),
        ({"feature_size": 2**30}, "feature_size in the configs .* must be at most 1024"),
        ({"hop_length": 0}, "hop_length in the configs .* must be an integer from 1"),
        ({"feature_extractor_type": "Other"}, "must be WhisperFeatureExtractor, got 'Other'"),
    ],
)
def test_a_folder_is_checked(
    fields: dict[str, Any], sentence: str, audio_folders: AudioFolders, tmp_path: Path
) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(audio_folders("qwen2_audio"), folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ModelLoadError, match=sentence):
        LLM(str(folder), multiprocess=False, **SIZES)


@given(st.integers(1600, 32_000))
def test_numbers_of_tokens_are_those_of_transformers(num_samples: int) -> None:
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import (
        _get_feat_extract_output_lengths as halved_twice,
    )
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        _get_feat_extract_output_lengths as chunks,
    )

    size = ClipSize(num_samples)
    halved: Any = halved_twice
    in_chunks: Any = chunks
    padded = AudioModel(5, RATE, 160, TokenRule.HALVED_TWICE, 32_000, 1)
    assert padded.num_tokens(size) == int(halved(torch.tensor(-(-num_samples // 160))))
    chunked = AudioModel(5, RATE, 160, TokenRule.CHUNKS, 32_000, 1)
    assert chunked.num_tokens(size) == int(in_chunks(torch.tensor(num_samples // 160)))
