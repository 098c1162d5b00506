"""Answers to prompts with pictures are those of transformers, however they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.records.media import PictureSize
from engine.records.messages import MediaSpan
from engine.worker.media.positions import rope_positions
from engine.worker.media.vision_tower import PatchTower
from tests.pictures.conftest import PictureFolders
from tests.pictures.picture_engine import Part, greedy, picture_engine, tokens_of
from tests.pictures.picture_folders import CONFIGS, FACTOR, PATCH, Picture, picture
from tests.pictures.reference import PictureReference

A, B, C = picture(3, 4, 1), picture(2, 5, 2), picture(6, 3, 3)
PROMPTS: list[tuple[Part, ...]] = [
    (7, A, 13, B, 20),
    (A, 5),
    (3, C, 2, B, 4, C, 1),
    (30,),
]


def pictures_in(parts: tuple[Part, ...]) -> list[Picture]:
    return [part for part in parts if not isinstance(part, int)]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_tokens_are_those_of_transformers(
    model_type: str, picture_folders: PictureFolders, tmp_path: Path
) -> None:
    """Tokens are the same in whole steps and in chunks that end within pictures, alone and in a batch."""
    folder = picture_folders(model_type)
    reference = PictureReference(folder)
    with picture_engine(folder, tmp_path) as engine:
        prompts = [engine.prompt(*parts, seed=index) for index, parts in enumerate(PROMPTS)]
        wanted = [
            reference.greedy(*prompt, pictures_in(parts), 12)
            for prompt, parts in zip(prompts, PROMPTS, strict=True)
        ]
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt)
        outputs = engine.run()
        assert [tokens_of(outputs[str(index)]) for index in range(len(prompts))] == wanted
    assert wanted[0] != wanted[1]
    for options in ({"max_num_batched_tokens": 9}, {"attention_backend": "torch", "max_num_seqs": 2}):
        with picture_engine(folder, tmp_path, **options) as engine:
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
        {"num_gpu_blocks_override": 9, "max_model_len": 128},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"enable_prefix_caching": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_so_they_are_with(options: dict[str, Any], picture_folders: PictureFolders, tmp_path: Path) -> None:
    """Tokens stay the same with each option; ``num_gpu_blocks_override`` causes preemption."""
    folder = picture_folders("qwen3_vl")
    reference = PictureReference(folder)
    with picture_engine(folder, tmp_path, **options) as engine:
        prompts = [engine.prompt(*parts, seed=index) for index, parts in enumerate(PROMPTS)]
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, greedy(24))
        outputs = engine.run()
        for index, (prompt, parts) in enumerate(zip(prompts, PROMPTS, strict=True)):
            wanted = reference.greedy(*prompt, pictures_in(parts), 24)
            assert tokens_of(outputs[str(index)]) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_compiled_steps_are_close(model_type: str, picture_folders: PictureFolders, tmp_path: Path) -> None:
    """In bf16, where text runs through compiled code and pictures do not, tokens are nearly as probable."""
    folder = picture_folders(model_type, "bfloat16")
    reference = PictureReference(folder)
    model = reference.model.float()
    with picture_engine(folder, tmp_path) as engine:
        tokens, media = engine.prompt(*PROMPTS[0])
        answer = tokens_of(engine.ask((tokens, media)))
    kinds = torch.zeros(1, len(tokens) + len(answer), dtype=torch.int)
    for span in media:
        kinds[0, span.offset : span.end] = 1
    inputs = reference.processed(pictures_in(PROMPTS[0]))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens + answer]), mm_token_type_ids=kinds, **inputs).logits[
            0, len(tokens) - 1 : -1
        ]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.amax(dim=1) - chosen).max() < 0.1 * logits.std()


def test_patches_are_those_of_transformers(picture_folders: PictureFolders) -> None:
    folder = picture_folders("qwen2_5_vl")
    reference = PictureReference(folder)
    with picture_engine(folder, folder) as engine:
        tower: PatchTower = engine.llm.engine._client.core._executor._backend._loaded.towers.vision  # type: ignore[attr-defined]
        for each in (A, B, C):
            wanted = reference.processed([each])
            assert torch.allclose(tower.patches(tower._colors(each)), wanted["pixel_values"], atol=1e-6)
            assert wanted["image_grid_thw"].tolist() == [[1, each.shape[0] // PATCH, each.shape[1] // PATCH]]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 6)), max_size=4),
    st.integers(0, 9),
)
def test_positions_are_those_of_transformers(shapes: list[tuple[int, int, int]], tail: int) -> None:
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    media, kinds, grids = list[MediaSpan](), list[int](), list[list[int]]()
    for number, (text, rows, columns) in enumerate(shapes):
        kinds += [0] * (text + (number > 0 and text == 0))  # transformers tells neighbors by what is between
        span = MediaSpan("", len(kinds), rows * columns, PictureSize(rows * FACTOR, columns * FACTOR))
        media.append(span)
        kinds += [1] * span.length
        grids.append([1, 2 * rows, 2 * columns])
    kinds += [0] * (tail + (not kinds))
    positions, shift = rope_positions(len(kinds), media, FACTOR)
    with torch.device("meta"):
        model = Qwen2_5_VLModel(Qwen2_5_VLConfig(**CONFIGS["qwen2_5_vl"]))
    index: Any = model.get_rope_index
    ids, types = torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds], dtype=torch.int)
    wanted, deltas = index(ids, types, torch.tensor(grids) if grids else None)
    assert positions.tolist() == wanted[:, 0].tolist()
    assert shift == int(deltas)
