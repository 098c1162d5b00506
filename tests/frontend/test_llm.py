"""``LLM`` over a real model: transformers' greedy tokens, in both modes, in order, with clear errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError
from engine.frontend.beam_search import BeamSearchParams
from engine.frontend.llm import LLM, engine_config
from engine.records.sampling_params import SamplingParams
from engine.testing import FakeExecutorFactory
from engine.tokenization.tokenizer import Tokenizer
from tracing.events import TraceEnd
from tracing.reader import read_trace

PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog", "def main(self):\n    return"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
CHAT = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module", params=[True, False], ids=["multiprocess", "in-process"])
def llm(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[LLM]:
    with LLM(model_folder, multiprocess=request.param, num_gpu_blocks_override=300) as llm:
        yield llm


@pytest.fixture(scope="module")
def fake_llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(str(model_folder), executor_factory=FakeExecutorFactory(), multiprocess=False) as llm:
        yield llm


def reference(model_folder: Path, prompt: list[int]) -> list[int]:
    """The tokens of transformers' own greedy ``generate``."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[misc]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY.max_tokens, do_sample=False
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def test_generate_says_what_transformers_says(llm: LLM, model_folder: Path, tokenizer: Tokenizer) -> None:
    """A batch of texts gets the same greedy tokens as each alone in transformers, in the order of prompts."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.outputs[0].token_ids == reference(model_folder, tokenizer.encode(prompt))
        assert output.finished
    statistics = llm.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks


def test_chat_says_what_transformers_says(llm: LLM, model_folder: Path, tokenizer: Tokenizer) -> None:
    """A conversation is rendered with the model's template, and the model continues it."""
    [output] = llm.chat(CHAT, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.render_chat(CHAT)
    assert output.outputs[0].token_ids == reference(model_folder, output.prompt_token_ids)


def test_a_prefix_that_was_seen_is_not_computed_again(llm: LLM, tokenizer: Tokenizer) -> None:
    """Cached tokens are reported, and a reset evicts them."""
    prompt = tokenizer.encode(" ".join(PROMPTS) * 3)
    assert llm.reset_prefix_cache()
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (len(prompt) - 1) // 16 * 16)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_log_probabilities_are_those_of_the_model(llm: LLM, model_folder: Path, tokenizer: Tokenizer) -> None:
    """Log-probabilities of the chosen token and the best three are exact to fp32."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    [position] = output.outputs[0].logprobs
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer.encode(PROMPTS[0])])).logits[0, -1]
    best = logits.log_softmax(-1).topk(3)
    assert [each.token_id for each in position.top] == best.indices.tolist()
    assert [each.logprob for each in position.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert (position.chosen.token_id, position.chosen.rank) == (best.indices[0].item(), 1)
    assert position.chosen.token == tokenizer.decode([position.chosen.token_id])
    assert output.outputs[0].cumulative_logprob == pytest.approx(position.chosen.logprob)


def test_prompts_may_be_texts_or_token_ids_one_or_many(fake_llm: LLM) -> None:
    """A prompt is a text or token ids, or a list of them; parameters are for all or one each."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    assert len(fake_llm.generate("Hello", params, use_tqdm=False)) == 1
    assert len(fake_llm.generate([1, 2, 3], params, use_tqdm=False)) == 1
    longer = SamplingParams(max_tokens=3, ignore_eos=True)
    mixed: list[str | list[int]] = ["Hello", [1, 2]]
    outputs = fake_llm.generate(mixed, [params, longer], use_tqdm=False, priority=[1, 2])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3]
    assert [output.prompt for output in outputs] == ["Hello", None]
    assert fake_llm.generate([], params, use_tqdm=False) == []
    assert len(fake_llm.chat([CHAT, CHAT], params, use_tqdm=False)) == 2


def test_the_models_own_defaults_mean_as_much_as_there_is_room(
    model_folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Without parameters, in ``chat`` too, an answer may use what the prompt leaves of a long default; an
    explicit request for too much is refused."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    recommended = {"max_new_tokens": 10**6, "temperature": 0.0}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    factory = FakeExecutorFactory(max_model_len=60)
    with LLM(folder, executor_factory=factory, multiprocess=False) as llm:
        prompts: list[str | list[int]] = [[5] * 50, [5] * 59, "Hello"]
        for output in llm.generate(prompts, use_tqdm=False):
            room = 60 - len(output.prompt_token_ids)
            assert 1 <= len(output.outputs[0].token_ids) <= room
        assert llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)[0].finished
        with pytest.raises(RequestError, match="maximum context length is 60 tokens"):
            llm.generate([[5] * 50], llm.get_default_sampling_params(), use_tqdm=False)


def test_one_wrong_prompt_and_none_is_run(fake_llm: LLM) -> None:
    """A wrong request is refused before anything is generated, and the next call works."""
    with pytest.raises(RequestError):
        fake_llm.generate([[1], []], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    with pytest.raises(RequestError, match="2 items for 1 prompts"):
        fake_llm.generate("Hello", [GREEDY, GREEDY], use_tqdm=False)
    [output] = fake_llm.generate("Hello", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("prompts", [5, [5.0], [None, "Hello"]])
def test_what_is_no_prompt_is_refused(fake_llm: LLM, prompts: Any) -> None:
    with pytest.raises(
        RequestError, match=r"A prompt is a text or a list of token ids, got (int|float|None)"
    ):
        fake_llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("prompts", [{"prompt_token_ids": [1, 2]}, [{"prompt": "Hello"}]])
def test_v1s_dictionaries_are_prompts_of_generate_only(fake_llm: LLM, prompts: Any) -> None:
    """Calls other than ``generate`` refuse dictionaries and do not read them as a list of their keys."""
    assert len(fake_llm.generate(prompts, GREEDY, use_tqdm=False)) == 1
    with pytest.raises(RequestError, match="A prompt is a text or a list of token ids, got dict"):
        fake_llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=2))


def test_progress_is_shown_with_rates(fake_llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """The progress bar ends full and shows token rates."""
    fake_llm.generate(["Hello"] * 3, SamplingParams(max_tokens=5))
    shown = capfd.readouterr().err
    assert "3/3" in shown
    assert "in " in shown
    assert "tok/s" in shown


def test_a_dead_core_ends_generate(model_folder: Path) -> None:
    """The waiting call raises, and so does the next."""
    dying = FakeExecutorFactory(kill_at_step=3)
    with LLM(str(model_folder), executor_factory=dying) as llm:
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                llm.generate(PROMPTS, SamplingParams(max_tokens=50), use_tqdm=False)


def test_options_go_to_the_record_that_has_them() -> None:
    """Flat options go to their records, as on the command line; an unknown one is an error that names it."""
    config = engine_config("m", dtype="float32", block_size=8, max_num_seqs=3, trace_path="t")
    assert (config.model.dtype, config.cache.block_size) == ("float32", 8)
    assert (config.scheduler.max_num_seqs, config.trace.trace_path) == (3, "t")
    for unknown in ("max_nun_seqs", "scheduler", "cache"):
        with pytest.raises(ConfigError, match=f"'{unknown}'"):
            engine_config("m", **{unknown: 1})
    with pytest.raises(ConfigError, match="enable_prompt_embeds is V1's, and not supported: prompts are"):
        engine_config("m", enable_prompt_embeds=True)


@pytest.mark.slow
@pytest.mark.parametrize("multiprocess", [True, False])
def test_a_model_that_cannot_be_loaded_is_one_sentence(model_folder: Path, multiprocess: bool) -> None:
    """A core in its own process raises the same error as one in ours."""
    with pytest.raises(ModelLoadError, match="KV"):
        LLM(str(model_folder), num_gpu_blocks_override=2, multiprocess=multiprocess)


def test_a_prompt_that_could_never_start_is_refused_at_the_start(model_folder: Path) -> None:
    """Without chunked prefill a step must have room for the longest prompt."""
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        LLM(
            str(model_folder),
            multiprocess=False,
            executor_factory=FakeExecutorFactory(max_model_len=200),
            enable_chunked_prefill=False,
            max_num_batched_tokens=100,
        )


UNCLOSED = """
import sys
from engine.frontend.llm import LLM

llm = LLM(sys.argv[1], multiprocess=False, num_gpu_blocks_override=300, trace_path=sys.argv[2])
llm.generate("Hello", use_tqdm=False)
"""


@pytest.mark.slow
def test_a_program_may_end_without_closing(model_folder: Path, tmp_path: Path) -> None:
    """The trace is complete although the program ends without closing the engine."""
    trace = tmp_path / "trace"
    arguments = [sys.executable, "-c", UNCLOSED, str(model_folder), str(trace)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, last = read_trace(trace)
    assert isinstance(last, TraceEnd)


def test_half_of_a_surrogate_pair_is_read_as_unreadable(llm: LLM) -> None:
    """A prompt that was cut in the middle of a character is served."""
    params = SamplingParams(max_tokens=2, temperature=0)
    cut, readable = llm.generate(["cut here \ud83d", "cut here \ufffd"], params)
    assert cut.prompt_token_ids == readable.prompt_token_ids
    assert cut.outputs[0].token_ids == readable.outputs[0].token_ids
