"""Repetition detection ends a looping output, if its request enables it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from continuum.cli.main import main
from engine.core.append_tokens import append_tokens
from engine.core.repetition import ends_in_repetition
from engine.core.request import Request
from engine.errors import RequestError
from engine.frontend.llm import LLM
from engine.records.sampling_params import RepetitionDetection, SamplingParams
from engine.worker.loading.tiny_models import make_model_folder


@given(
    st.lists(st.integers(0, 2), max_size=24),
    st.integers(0, 24),
    st.integers(0, 5),
    st.integers(1, 5),
    st.integers(2, 4),
)
def test_a_pattern_is_found_where_slices_say_so(
    token_ids: list[int], num_output: int, shortest: int, longest: int, count: int
) -> None:
    num_output = min(num_output, len(token_ids))
    output = token_ids[len(token_ids) - num_output :]
    detection = RepetitionDetection(max_pattern_size=longest, min_pattern_size=shortest, min_count=count)
    found = any(
        len(output) >= size * count and output[-size * count :] == output[-size:] * count
        for size in range(max(1, shortest), longest + 1)
    )
    assert ends_in_repetition(token_ids, num_output, detection) is found


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_pattern_size": 0}, "max_pattern_size must be in"),
        ({"max_pattern_size": 513}, "max_pattern_size must be in"),
        ({"max_pattern_size": 4, "min_pattern_size": 5}, "min_pattern_size must be in"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count must be at least 2"),
    ],
)
def test_what_can_never_be_found_is_refused(fields: dict[str, int], named: str) -> None:
    params = SamplingParams(repetition_detection=RepetitionDetection(**fields))
    with pytest.raises(RequestError, match=f"repetition_detection.{named}"):
        params.verify()


@pytest.mark.parametrize("field", ["repetition_detection", "structured_outputs"])
def test_a_mapping_is_read_as_a_body_has_it(field: str) -> None:
    """``LLM`` accepts the same mappings as HTTP; unknown keys are refused by name."""
    good = {"max_pattern_size": 4, "min_count": 5} if field == "repetition_detection" else {"regex": "a"}
    params = SamplingParams(**{field: good})  # type: ignore[arg-type]
    params.verify()
    assert type(getattr(params, field)) is not dict
    wrong: list[dict[Any, Any]] = [{"nothing": 1}, {next(iter(good)): []}, {1: 2}]
    for bad in wrong:
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: bad}).verify()  # type: ignore[arg-type]


def test_its_stop_reason_is_the_one_of_v1() -> None:
    """The stop reason is V1's, unless the length limit ends the request with the same token."""
    for max_tokens, expected in ((50, "repetition_detected"), (9, None)):
        detection = RepetitionDetection(max_pattern_size=3, min_count=9)
        params = SamplingParams(max_tokens=max_tokens, repetition_detection=detection)
        request = Request("r", [1, 2, 3], params, 0.0)
        append_tokens(request, [7] * 9, 1000)
        assert request.stop_reason == expected


@pytest.mark.slow
def test_its_trace_replays(tmp_path: Path) -> None:
    """The turn ends in the trace as with a stop token."""
    folder, trace = make_model_folder(tmp_path / "model"), tmp_path / "t.jsonl"
    params = SamplingParams(
        allowed_token_ids=[7],
        max_tokens=40,
        ignore_eos=True,
        repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=4),
    )
    with LLM(str(folder), device="cpu", max_model_len=64, trace_path=str(trace)) as llm:
        [output] = llm.generate([[1, 2, 3]], params)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("repetition", 4)
    assert main(["trace", "replay", str(trace)]) == 0
