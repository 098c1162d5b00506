"""A failure in one request ends that request with a sentence; other requests and the engine go on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from continuum.cli.main import main
from engine.errors import RequestError
from engine.frontend.detokenizer import IncrementalDetokenizer
from engine.frontend.llm import LLM
from engine.frontend.request_output import CompletionOutput
from engine.records.row_failures import GRAMMAR_LEFT, NOT_NUMBERS, NOTHING_ALLOWED
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.structured_output.backend import MatcherGrammar
from engine.tokenization.tokenizer import Tokenizer
from tests.broken_models import with_poisoned_token, with_tokens_beyond

POISON = 65
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SOUND = [[7, 8, 9], list(range(100, 140)), list(range(200, 217))]
"""Prompts of different lengths, none a multiple of the block size."""
POISONED = [[*range(300, 320), POISON, 5, 6], [POISON]]
DIGITS = StructuredOutputsParams(regex="[0-9]{3}")


def run(llm: LLM, prompts: Any, params: Any) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of each prompt run alone."""
    return [run(llm, [prompt], GREEDY)[0].token_ids for prompt in prompts]


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(model_folder, multiprocess=False, num_gpu_blocks_override=300) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, math.nan),
        ({}, math.inf),
        ({"async_scheduling": True}, math.nan),
        ({"attention_backend": "torch"}, math.nan),
        ({"tensor_parallel_size": 2}, math.nan),
        ({"dtype": "bfloat16"}, math.nan),
    ],
    ids=["default", "infinity", "async", "torch", "two-ranks", "bf16"],
)
def test_logits_that_are_no_numbers_end_their_request(
    model_folder: Path, tmp_path: Path, options: dict[str, Any], value: float
) -> None:
    """Poisoned requests of any parameters end with an error; requests next to them, and those that later use
    the same memory, get the tokens that they get alone."""
    folder = with_poisoned_token(model_folder, tmp_path / "poisoned", POISON, value)
    wrong = [
        SamplingParams(temperature=1.0, max_tokens=6, logprobs=2, top_k=5),
        SamplingParams(temperature=0, max_tokens=6, bad_words=["x"], presence_penalty=1.0),
    ]
    with LLM(folder, multiprocess=False, max_model_len=96, num_gpu_blocks_override=12, **options) as llm:
        alone = tokens_of(llm, SOUND)
        for params in (*wrong, GREEDY):
            llm.reset_prefix_cache()
            mixed = [SOUND[0], POISONED[0], SOUND[1], POISONED[1], SOUND[2]]
            outputs = run(llm, mixed, [GREEDY, params, GREEDY, params, GREEDY])
            assert [outputs[i].token_ids for i in (0, 2, 4)] == alone
            for output in (outputs[1], outputs[3]):
                assert (output.finish_reason, output.stop_reason) == ("error", NOT_NUMBERS)
                assert output.token_ids == []
        for _ in range(3):
            run(llm, POISONED, GREEDY)
            llm.reset_prefix_cache()
            assert [output.token_ids for output in run(llm, SOUND, GREEDY)] == alone
        llm.engine.check_invariants()


@pytest.mark.slow
def test_on_a_gpus_path_logits_that_are_no_numbers_end_their_request(
    model_folder: Path, tmp_path: Path
) -> None:
    """NaN logits end their requests although the next step is already under way; others go on."""
    folder = with_poisoned_token(model_folder, tmp_path / "poisoned", POISON)
    drawn = SamplingParams(max_tokens=3, top_k=5)
    with LLM(
        folder,
        multiprocess=False,
        device="cpu",
        attention_backend="triton",
        max_model_len=32,
        num_gpu_blocks_override=12,
        max_num_seqs=4,
        async_scheduling=True,
    ) as llm:
        outputs = run(llm, [SOUND[0], [POISON, 3], [POISON]], [drawn, drawn, GREEDY])
    assert [output.finish_reason for output in outputs] == ["length", "error", "error"]
    assert [output.stop_reason for output in outputs[1:]] == [NOT_NUMBERS] * 2
    assert [output.token_ids for output in outputs[1:]] == [[], []]


def test_a_request_that_fails_later_keeps_what_it_said(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request that fails later keeps its tokens, and its trace replays without a difference."""
    folder = with_poisoned_token(model_folder, tmp_path / "poisoned", POISON)
    params = SamplingParams(max_tokens=9, replay_token_ids=[70, 71, POISON, 72], logprobs=1)
    trace = tmp_path / "trace.jsonl"
    with LLM(folder, multiprocess=False, num_gpu_blocks_override=300, trace_path=str(trace)) as llm:
        failing, other = run(llm, [SOUND[0], SOUND[1]], [params, GREEDY])
    assert (failing.finish_reason, failing.token_ids) == ("error", [70, 71, POISON])
    assert len(failing.logprobs or ()) == 3
    assert (other.finish_reason, len(other.token_ids)) == ("length", 6)
    assert main(["trace", "replay", str(trace)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["trace", "validate", str(trace)]) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "limits",
    [
        {"allowed_token_ids": [258], "stop_token_ids": [258], "min_tokens": 2},
        {"allowed_token_ids": [70], "bad_words": ["{70}"]},
        {"allowed_token_ids": [70, 258], "bad_words": ["{70}"], "stop_token_ids": [258], "min_tokens": 1},
    ],
    ids=["min-tokens", "bad-words", "both"],
)
def test_limits_that_leave_no_token_are_refused(
    llm: LLM, tokenizer: Tokenizer, limits: dict[str, Any], temperature: float
) -> None:
    """Limits that contradict each other are refused before the request runs."""
    if "bad_words" in limits:
        words = [tokenizer.token_text(int(word[1:-1])) for word in limits["bad_words"]]
        limits = limits | {"bad_words": words}
    with pytest.raises(RequestError, match="No token is left"):
        run(llm, [SOUND[0]], SamplingParams(temperature=temperature, max_tokens=4, **limits))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "temperature"), [("auto", 0.0), ("auto", 1.0), ("triton", 0.0), ("triton", 1.0)]
)
def test_limits_that_leave_no_token_later_end_the_request(
    model_folder: Path, tokenizer: Tokenizer, temperature: float, backend: str
) -> None:
    """Limits that leave no token in the middle of an answer (a word of several tokens, a grammar) end the
    request; its earlier tokens stay, and no token is made up."""
    g = tokenizer.token_text(70)
    cases: list[tuple[dict[str, Any], list[int], str]] = [
        ({"allowed_token_ids": [70], "bad_words": [g * 2]}, [70], NOTHING_ALLOWED),
        (
            {"allowed_token_ids": [70], "bad_words": [g * 3], "presence_penalty": 1.0},
            [70, 70],
            NOTHING_ALLOWED,
        ),
        ({"allowed_token_ids": [70], "structured_outputs": DIGITS}, [], GRAMMAR_LEFT),
        ({"allowed_token_ids": [70], "top_k": 3, "top_p": 0.5, "bad_words": [g * 2]}, [70], NOTHING_ALLOWED),
    ]
    params = [SamplingParams(temperature=temperature, max_tokens=6, **limits) for limits, _, _ in cases]
    with LLM(
        model_folder,
        multiprocess=False,
        device="cpu",
        attention_backend=backend,
        max_model_len=32,
        num_gpu_blocks_override=20,
        max_num_seqs=8,
    ) as llm:
        outputs = run(llm, [SOUND[0]] * (len(cases) + 1), [*params, GREEDY])
    assert [(o.finish_reason, o.token_ids, o.stop_reason) for o in outputs[:-1]] == [
        ("error", tokens, reason) for _, tokens, reason in cases
    ]
    assert outputs[-1].finish_reason == "length"


def test_a_replayed_output_is_bound_by_no_limit(llm: LLM) -> None:
    """A replayed output equals the recording, also where the limits would leave no token."""
    params = SamplingParams(
        temperature=0,
        max_tokens=2,
        replay_token_ids=[5, 6],
        allowed_token_ids=[9],
        stop_token_ids=[9],
        min_tokens=2,
    )
    assert run(llm, [SOUND[0]], params)[0].token_ids == [5, 6]


def test_tokens_that_only_the_tokenizer_knows(model_folder: Path, tmp_path: Path) -> None:
    """A token beyond the vocabulary is ignored as a bad word, ends no text, and is refused elsewhere."""
    folder = with_tokens_beyond(model_folder, tmp_path / "beyond", ["<end>", "<extra>"])
    digits = SamplingParams(temperature=0, max_tokens=9, structured_outputs=DIGITS)
    with LLM(folder, multiprocess=False, num_gpu_blocks_override=300) as llm:
        plain = run(llm, [SOUND[0]], GREEDY)[0].token_ids
        for word in ("<extra>", "<end>", "a<extra>", "<extra>a"):
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, bad_words=[word])
            assert run(llm, [SOUND[0]] * 2, params)[0].token_ids == plain
        for ignore_eos in (False, True):
            digits.ignore_eos = ignore_eos
            assert run(llm, [SOUND[0]], digits)[0].text.isdigit()
        with pytest.raises(RequestError, match="outside the vocabulary"):
            run(llm, ["hello <extra>"], GREEDY)
        for field in ("stop_token_ids", "allowed_token_ids", "replay_token_ids"):
            for token in (512, -1, 2**40):
                beyond: dict[str, Any] = {field: [token]}
                with pytest.raises(RequestError, match=field):
                    run(llm, [SOUND[0]], SamplingParams(**beyond))
        assert run(llm, [SOUND[0]], GREEDY)[0].token_ids == plain


@pytest.mark.parametrize("method", ["accept", "set_endings"])
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["sync", "async"])
def test_a_grammar_that_fails_ends_its_request(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any]
) -> None:
    """A grammar that fails on accepting a token or on its endings ends its request; other grammars go on."""
    real = getattr(MatcherGrammar, method)

    def failing(grammar: MatcherGrammar, argument: Any) -> Any:
        if 77 in grammar._ending_token_ids:
            raise ValueError("this grammar was told to fail")
        return real(grammar, argument)

    monkeypatch.setattr(MatcherGrammar, method, failing)
    wrong = SamplingParams(temperature=0, max_tokens=9, structured_outputs=DIGITS, stop_token_ids=[77])
    right = SamplingParams(temperature=0, max_tokens=9, structured_outputs=DIGITS)
    with LLM(model_folder, multiprocess=False, num_gpu_blocks_override=300, **options) as llm:
        outputs = run(llm, [SOUND[0]] * 3, [wrong, right, GREEDY])
        llm.engine.check_invariants()
    assert outputs[0].finish_reason == "error"
    assert "told to fail" in str(outputs[0].stop_reason)
    assert (outputs[1].finish_reason, len(outputs[1].text)) == ("stop", 3)
    assert outputs[2].finish_reason == "length"


def test_a_text_that_cannot_be_made_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core stops computing the failed request; other requests get their own tokens."""
    real = IncrementalDetokenizer.update

    def failing(reader: IncrementalDetokenizer, token_ids: list[int], **options: Any) -> str | None:
        if reader._min_tokens == 2 and len(reader.token_ids) == 2:
            raise ValueError("this text was told to fail")
        return real(reader, token_ids, **options)

    monkeypatch.setattr(IncrementalDetokenizer, "update", failing)
    wrong = SamplingParams(temperature=0, max_tokens=200, min_tokens=2, ignore_eos=True, n=1, logprobs=1)
    outputs = run(llm, [SOUND[0]] * 2, [wrong, GREEDY])
    assert (outputs[0].finish_reason, len(outputs[0].token_ids)) == ("error", 2)
    assert "told to fail" in str(outputs[0].stop_reason)
    assert outputs[1].finish_reason == "length"
    assert llm.statistics().num_running == 0
    llm.engine.check_invariants()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("top_k", 2.5),
        ("stop", [5]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [2**70]),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: math.inf}),
        ("logit_bias", {5: -math.inf}),
        ("logit_bias", {"x": 1.0}),
        ("max_tokens", "6"),
        ("n", 2**70),
        ("seed", 1.5),
    ],
)
def test_parameters_of_another_type_are_refused(llm: LLM, field: str, value: Any) -> None:
    """Wrong parameters are refused with a sentence and do not reach the core."""
    with pytest.raises(RequestError):
        run(llm, [SOUND[0]], SamplingParams(**{field: value}))
    assert len(run(llm, [SOUND[0]], GREEDY)[0].token_ids) == 6


def test_a_request_that_cannot_be_added_leaves_none_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call raises, requests added before the failing one stop, and the next call works."""
    real = IncrementalDetokenizer.__init__

    def failing(reader: IncrementalDetokenizer, tokenizer: Any, params: Any, prompt: list[int]) -> None:
        if prompt == SOUND[1]:
            raise ValueError("this request was told to fail")
        real(reader, tokenizer, params, prompt)

    monkeypatch.setattr(IncrementalDetokenizer, "__init__", failing)
    with pytest.raises(ValueError, match="told to fail"):
        run(llm, SOUND[:2], SamplingParams(max_tokens=200, ignore_eos=True))
    [output] = run(llm, [SOUND[0]], GREEDY)
    assert len(output.token_ids) == 6
    assert llm.statistics().num_running == 0
