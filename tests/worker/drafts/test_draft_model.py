"""A small model as drafter: its drafts, its cost in the pool, and its limits."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from continuum.cli.main import main
from engine.config.speculative import SpeculativeConfig
from engine.core.drafts.lengths import MIN_CHANCE
from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.drafts.head_folders import sharpen
from tests.worker.drafts.recorded_drafts import DraftRecord, RecordingExecutor

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
NUM_DRAFTS = 3
PROMPTS = [[(7 * seed + 3 * i) % 400 for i in range(20 + 9 * seed)] for seed in range(5)]


def _drafting(draft: Path) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="draft_model", model=str(draft), num_speculative_tokens=NUM_DRAFTS, weigh_costs=False
    )


def _llm(folder: Path, draft: Path | None, **options: Any) -> LLM:
    wanted = None if draft is None else _drafting(draft)
    return LLM(
        folder,
        executor_factory=RecordingExecutor,
        multiprocess=False,
        device="cpu",
        speculative_config=wanted,
        **options,
    )


def _tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    with llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(make_model_folder(tmp_path_factory.mktemp("models") / "sure"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another small model with the same vocabulary."""
    path = tmp_path_factory.mktemp("models") / "other"
    return sharpen(make_model_folder(path, num_layers=1, seed=5))


SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "torch": {"attention_backend": "torch"},
    "chunked prefill": {"max_num_batched_tokens": 16},
    "preemption": {"num_gpu_blocks_override": 12, "block_size": 16, "max_model_len": 128},
    "overlapping steps": {"async_scheduling": True},
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 4},
}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_model_that_drafts_for_itself_is_right(setup: str, model: Path) -> None:
    """All drafts are accepted, whatever a step holds, and steps are saved."""
    options = SETUPS[setup]
    plain = _tokens(_llm(model, None, **options), PROMPTS)
    num_steps = RecordingExecutor.last.num_steps
    assert _tokens(_llm(model, model, **options), PROMPTS) == plain
    executor = RecordingExecutor.last
    assert len(executor.record.pairs()) > 100
    assert executor.record.accepted_share() == 1.0
    assert executor.num_steps < 0.6 * num_steps
    assert (executor.num_preemptions > 0) == (setup == "preemption")


def test_a_step_brings_a_token_more_than_drafts(model: Path) -> None:
    """After the prefill, which yields one token, each step yields the drafts and one more."""
    params = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)
    _tokens(_llm(model, model), PROMPTS[:1], params)
    assert RecordingExecutor.last.num_steps == 1 + 40 // (NUM_DRAFTS + 1)


def test_drafts_in_16_bits_are_nearly_all_right(model: Path) -> None:
    """Not every draft is right, because a step of several tokens rounds differently from one of one."""
    _tokens(_llm(model, model, dtype="bfloat16"), PROMPTS)
    assert RecordingExecutor.last.record.accepted_share() > 0.95


@pytest.mark.parametrize("setup", SETUPS)
def test_a_model_that_is_always_wrong_changes_nothing(setup: str, model: Path, other: Path) -> None:
    """Greedy tokens equal those without drafts although nearly all drafts are rejected."""
    options = SETUPS[setup]
    plain = _tokens(_llm(model, None, **options), PROMPTS)
    assert _tokens(_llm(model, other, **options), PROMPTS) == plain
    record = RecordingExecutor.last.record
    assert len(record.pairs()) > 50
    assert record.accepted_share() < 0.1


def test_sampled_tokens_with_seeds_stay_the_same(tmp_path: Path) -> None:
    """With a seed each place has its own random number, whether it is verified or not. Some drafts of an
    unsure model are right."""
    unsure = sharpen(make_model_folder(tmp_path / "unsure"), 4.0)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=40, ignore_eos=True)
    plain = _tokens(_llm(unsure, None), PROMPTS, params)
    num_steps = RecordingExecutor.last.num_steps
    assert _tokens(_llm(unsure, unsure), PROMPTS, params) == plain
    assert 0.1 < RecordingExecutor.last.record.accepted_share() < 0.9
    assert RecordingExecutor.last.num_steps < num_steps


def test_chances_are_the_draft_models_own(tmp_path: Path) -> None:
    """A chance is the product of the model's probabilities up to that draft; drafting stops after one that is
    too unlikely to be verified."""
    folder = sharpen(make_model_folder(tmp_path / "unsure"), 4.0)
    _tokens(_llm(folder, folder), PROMPTS[:1])
    record = RecordingExecutor.last.record
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (said,) = record.said.values()
    for (_, start, drafts), chances in zip(record.drafted, record.chances, strict=True):
        tokens = PROMPTS[0] + said[:start] + drafts
        with torch.no_grad():
            ways = model(torch.tensor([tokens])).logits[0].softmax(dim=-1)
        places = range(len(tokens) - len(drafts) - 1, len(tokens) - 1)
        own = [float(ways[place, token]) for place, token in zip(places, drafts, strict=True)]
        assert chances == pytest.approx(list(accumulate(own, mul)), rel=1e-3)
        assert all(chance >= MIN_CHANCE for chance in chances[:-1])
    assert len({len(drafts) for _, _, drafts in record.drafted}) > 1


def test_an_aborted_request_leaves_the_drafters_kv_right(model: Path) -> None:
    """Another request gets its row and its blocks, and a request with its prompt hits its computed KV."""
    with _llm(model, model, max_num_seqs=2, max_num_batched_tokens=32) as llm:
        engine = llm.engine
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, GREEDY)
        for _ in range(4):
            engine.step()
        engine.abort_request("0")
        engine.add_request("again", PROMPTS[0], GREEDY)
        while engine.has_unfinished_requests():
            engine.step()
    record = RecordingExecutor.last.record
    assert len(record.said) == len(PROMPTS) + 1
    assert record.accepted_share() == 1.0


def test_a_prefix_that_is_found_has_the_drafters_kv_too(model: Path) -> None:
    """A second turn hits the first one's blocks, prompt and answer, and its drafts are right at once."""
    with _llm(model, model) as llm:
        for prompt in PROMPTS[:3]:
            answer = list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids)
            record = RecordingExecutor.last.record = DraftRecord()
            again = llm.generate([[*prompt, *answer, 5, 6, 7]], GREEDY)[0]
            assert again.num_cached_tokens >= len(prompt) + len(answer) - 16
            assert len(record.pairs()) > 20
            assert record.accepted_share() == 1.0


def test_another_tier_has_the_drafters_kv_too(model: Path) -> None:
    """KV from host memory is loaded for both models."""
    prompts = [[(11 * seed + i) % 400 for i in range(90)] for seed in range(4)]
    with _llm(
        model, model, num_gpu_blocks_override=12, max_model_len=144, num_host_blocks_override=64
    ) as llm:
        first = llm.generate(prompts, GREEDY)
        record = RecordingExecutor.last.record = DraftRecord()
        again = llm.generate(prompts, GREEDY)
        assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in first]
        assert sum(each.num_cached_tokens or 0 for each in again) > 200
        assert record.accepted_share() == 1.0


def test_the_drafters_kv_is_within_the_memory_that_is_given(model: Path, other: Path) -> None:
    """``kv_cache_memory_bytes`` is the size of both models' KV together."""
    given = 1_000_000
    blocks = {}
    for draft in (None, other, model):
        with _llm(model, draft, kv_cache_memory_bytes=given, max_model_len=256):
            blocks[draft] = RecordingExecutor.last.info.num_gpu_blocks
    # 16 tokens of 2 layers, of 2 vectors of 2 heads of 16 numbers of 4 bytes; the other model has one layer.
    of_layer = 16 * 2 * 2 * 16 * 4
    assert blocks[None] == given // (2 * of_layer)
    assert blocks[other] == given // (3 * of_layer)
    assert blocks[model] == given // (4 * of_layer)


def test_what_cannot_draft_is_refused(model: Path, tmp_path: Path) -> None:
    """Unsuitable models are refused in one sentence that names the model, or an option that excludes it."""
    larger = make_model_folder(tmp_path / "larger", vocab_size=600)
    with pytest.raises(ConfigError, match="different vocabularies"):
        _llm(model, larger)
    window = make_model_folder(tmp_path / "window", "mistral", extra_config={"sliding_window": 12})
    with pytest.raises(ConfigError, match="layers without full attention"):
        _llm(model, window)
    with pytest.raises(ConfigError, match="a layer with full attention"):
        _llm(window, model)
    with pytest.raises(ConfigError, match="does not exist"):
        _llm(model, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="method draft_model supports only one rank"):
        _llm(model, model, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="needs a model"):
        SpeculativeConfig(method="draft_model")
    with pytest.raises(ConfigError, match="takes no model"):
        SpeculativeConfig(method="ngram", model="x")


def test_its_trace_is_decided_the_same_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay runs no drafter, but reserves the memory of its KV."""
    path = tmp_path / "trace.jsonl"
    _tokens(_llm(model, model, **SETUPS["preemption"], trace_path=str(path)), PROMPTS)
    capsys.readouterr()
    assert main(["trace", "replay", str(path)]) == 0
    assert "no difference" in capsys.readouterr().out
