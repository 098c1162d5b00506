"""Promises of ``tokenization_kwargs``: prompts are truncated as requested, and unknown values are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.pooling.pooling_folders import make_encoder

PROMPT = list(range(20, 60))
SIX = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(model_folder, multiprocess=False, num_gpu_blocks_override=40, max_model_len=64) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, PROMPT),
        ({"truncate_prompt_tokens": 16}, PROMPT[-16:]),
        ({"truncate_prompt_tokens": 16, "truncation_side": "right"}, PROMPT[:16]),
        ({"truncate_prompt_tokens": 50}, PROMPT),
        ({"truncate_prompt_tokens": None, "add_special_tokens": False}, PROMPT),
    ],
)
def test_a_prompt_is_cut_where_it_is_said(llm: LLM, options: dict[str, Any], kept: list[int]) -> None:
    """A prompt is truncated on the left by default, so that the answer continues its end."""
    [found] = llm.generate([PROMPT], SIX, tokenization_kwargs=options, use_tqdm=False)
    [expected] = llm.generate([kept], SIX, use_tqdm=False)
    assert found.prompt_token_ids == kept
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_what_does_not_fit_can_be_cut_to_what_fits(llm: LLM) -> None:
    """With -1, a long text is cut to its last tokens, which leave room for the answer."""
    text = "The scheduler hands out one budget. " * 40
    with pytest.raises(RequestError, match="maximum context length"):
        llm.generate(text, SIX, use_tqdm=False)
    cut = {"truncate_prompt_tokens": -1}
    [found] = llm.generate(text, SIX, tokenization_kwargs=cut, use_tqdm=False)
    assert found.prompt_token_ids == llm.get_tokenizer().encode(text)[-58:]
    assert len(found.outputs[0].token_ids) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": True}, "must not have 'padding'; it takes add_special_tokens, truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or a number from 1, got 0"),
        ({"truncate_prompt_tokens": True}, "must be -1 or a number from 1, got True"),
        ({"truncation_side": "middle"}, "truncation_side must be one of left, right, got 'middle'"),
        ({"add_special_tokens": 1}, "add_special_tokens must be true or false, got 1"),
        ({"truncate_prompt_tokens": 59}, "must be at most 58, the most that fit, got 59"),
    ],
)
def test_what_has_no_meaning_is_named(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([list(range(20, 90))], SIX, tokenization_kwargs=options, use_tqdm=False)


def test_a_model_that_pools_takes_them_too(tmp_path: Path) -> None:
    """A pooling model truncates inputs at their ends, like ``truncate_prompt_tokens``."""
    with LLM(make_encoder(tmp_path / "model"), multiprocess=False) as llm:
        options = {"truncate_prompt_tokens": 8}
        [cut] = llm.embed("A tool call ends a turn.", tokenization_kwargs=options, use_tqdm=False)
        [same] = llm.embed("A tool call ends a turn.", truncate_prompt_tokens=8, use_tqdm=False)
        [bare] = llm.embed(
            "A tool call ends a turn.", tokenization_kwargs={"add_special_tokens": False}, use_tqdm=False
        )
        with pytest.raises(RequestError, match="truncation_side must be right for a model that pools"):
            llm.embed("A", tokenization_kwargs={"truncation_side": "left"}, use_tqdm=False)
        hf = llm.get_tokenizer().hf
    assert cut.prompt_token_ids == same.prompt_token_ids
    assert len(cut.prompt_token_ids) == 8
    assert bare.prompt_token_ids == hf.encode("A tool call ends a turn.", add_special_tokens=False)
