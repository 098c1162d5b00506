"""Layers with different windows or chunks have separate block tables, and compute the same as before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.frontend.llm import LLM
from engine.records.kv_cache_groups import KVCacheGroup, groups_of, one_group
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models import decoder
from engine.worker.models.base import CausalModel
from engine.worker.models.families import table
from engine.worker.models.shape import DecoderShape
from tests.worker.cpu.compiled_steps import has_compiled_steps
from tests.worker.generation import Reference, SmallEngine, random_tokens
from tests.worker.hand_plans import HandPlans
from tests.worker.test_other_attention import saved

PROMPTS = {"a": random_tokens(61, seed=1), "b": random_tokens(9, seed=2), "c": random_tokens(35, seed=3)}
NUM_OUTPUTS = 30

NATIVE: dict[str, dict[str, Any]] = {
    "mistral": {"family": "mistral", "extra_config": {"sliding_window": 12}},
    "qwen2": {
        "family": "qwen2",
        "num_layers": 4,
        "extra_config": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    },
    "llama4": {
        "family": "llama4_text",
        "num_layers": 8,
        "intermediate_size": 48,
        "extra_config": {
            "attention_chunk_size": 20,
            "floor_scale": 16,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
        },
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 12, "head_dim": 16, "num_hidden_layers": 4, "attn_logit_softcapping": 2.0},
    "gemma3_text": {
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "head_dim": 16,
        "num_hidden_layers": 7,
    },
    "gpt_oss": {"sliding_window": 12, "head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 4},
}
NUM_GROUPS = {"mistral": 1, "qwen2": 2, "llama4": 4, "gemma2": 2, "gemma3_text": 4, "gpt_oss": 2}


def groups_by_window(model: CausalModel) -> tuple[KVCacheGroup, ...]:
    return groups_of(model.windows, model.chunks)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def run_all(engine: HandPlans, num_outputs: int = NUM_OUTPUTS) -> dict[str, list[int]]:
    """Runs chunks of prompts with decodes; one request joins late, one ends early."""
    outputs = {}
    engine.add("a", PROMPTS["a"])
    engine.add("b", PROMPTS["b"])
    for step in range(200):
        if step == 3:
            engine.add("c", PROMPTS["c"])
        live = {name: 1000 if name != "a" else 17 for name in PROMPTS if name not in outputs}
        if step < 3:
            live.pop("c", None)
        engine.step(live)
        for name in live:
            if engine.num_outputs(name) >= num_outputs:
                outputs[name] = engine.finish(name)
        if len(outputs) == len(PROMPTS):
            return outputs
    raise AssertionError("no end")


@pytest.fixture(params=[*NATIVE, *OTHERS])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name: str = request.param
    if name in NATIVE:
        return name, make_model_folder(tmp_path, **NATIVE[name])
    saved(tmp_path, name, **OTHERS[name])
    return name, tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_tokens_are_those_of_transformers(model: tuple[str, Path], attention: str) -> None:
    """Tokens are right in chunks and batches, although blocks that a window left are reused, or NaN."""
    name, folder = model
    engine = HandPlans(folder, groups_by_window, attention=attention)
    assert len(engine.groups) == NUM_GROUPS[name]
    outputs, reference = run_all(engine), Reference(folder)
    for request, prompt in PROMPTS.items():
        assert outputs[request] == reference.greedy(prompt, NUM_OUTPUTS), request


@pytest.mark.slow
@pytest.mark.skipif(not has_compiled_steps(), reason="this CPU does not multiply pairs of bf16")
@pytest.mark.parametrize(("max_window_layers", "num_groups"), [(0, 1), (3, 3)])
def test_compiled_steps_give_the_same_tokens_over_one_block_table(
    max_window_layers: int, num_groups: int, tmp_path: Path
) -> None:
    """No bit depends on where the KV is."""
    window = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": max_window_layers}
    folder = make_model_folder(
        tmp_path, "qwen2", num_layers=5, hidden_size=128, dtype="bfloat16", extra_config=window
    )
    several = HandPlans(folder, groups_by_window)
    assert len(several.groups) == num_groups
    one = HandPlans(folder, lambda model: one_group(model.num_layers))
    assert several.has_compiled_steps
    assert run_all(several) == run_all(one)


def with_chunks(monkeypatch: pytest.MonkeyPatch, *chunks: int | None) -> None:
    """Gives each layer of Qwen2 a chunk, to test chunks in code that supports only layers like Llama's."""
    plain = table.decoder_shape

    def shape_of(config: Any) -> DecoderShape:
        return replace(plain(config), chunks=chunks)

    monkeypatch.setattr(decoder, "decoder_shape", shape_of)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiled_steps(), reason="this CPU does not multiply pairs of bf16")
def test_compiled_steps_attend_to_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bit depends on where the KV is, but some depend on the chunks."""
    folder = make_model_folder(tmp_path, "qwen2", num_layers=4, hidden_size=128, dtype="bfloat16")
    plain = run_all(HandPlans(folder, groups_by_window))
    with_chunks(monkeypatch, 20, None, 20, None)
    several = HandPlans(folder, groups_by_window)
    assert [group.attention_chunk for group in several.groups] == [None, 20]
    assert several.has_compiled_steps
    outputs = run_all(several)
    assert outputs == run_all(HandPlans(folder, lambda model: one_group(model.num_layers)))
    assert outputs != plain


def test_a_window_needs_few_blocks(tmp_path: Path) -> None:
    """For a long sequence, a group with a window holds only the blocks of its window."""
    engine = HandPlans(make_model_folder(tmp_path, **NATIVE["qwen2"]), groups_by_window)
    engine.add("a", PROMPTS["a"])
    free = engine.num_free_blocks
    for _ in range(40):
        engine.step({"a": 16})
    # 100 tokens: 13 blocks of full attention, and at most 3 that a window of 12 tokens touches.
    assert free - engine.num_free_blocks <= 13 + 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_blocks"), [("gemma2", 32), ("gemma3_text", 56), ("gpt_oss", 32)])
def test_mixed_batch_with_chunks_hits_preemption_and_resumption(
    name: str, num_blocks: int, tmp_path: Path
) -> None:
    """The scheduler's own plans are used, with a pool too small for all."""
    saved(tmp_path, name, **OTHERS[name])
    engine = SmallEngine(tmp_path, num_blocks=num_blocks, max_num_batched_tokens=24)
    reference, shared = Reference(tmp_path), random_tokens(27, seed=1)
    prompts = [shared[: 9 * (i % 4)] + random_tokens(7 + 5 * i, seed=10 + i) for i in range(7)]
    for index, prompt in enumerate(prompts):
        engine.add(f"r{index}", prompt, greedy(20 + index))
        engine.step()
    outputs = engine.run()
    assert engine.num_preemptions > 0
    assert engine.num_cached_tokens > 0
    assert engine.num_chunked_steps > 0
    for index, prompt in enumerate(prompts):
        assert outputs[f"r{index}"] == reference.greedy(prompt, 20 + index), index


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "llama4", "gemma3_text", "gpt_oss"])
def test_a_jobs_turns_hit_what_its_windows_left(name: str, async_scheduling: bool, tmp_path: Path) -> None:
    """Through ``LLM``, a second turn hits all of the first, though its window has moved on, and is right."""
    make_model_folder(tmp_path, **NATIVE.get(name, {}))  # with a tokenizer
    if name in OTHERS:
        saved(tmp_path, name, **OTHERS[name])
    reference = Reference(tmp_path)
    firsts = [random_tokens(90 + 7 * i, seed=20 + i) for i in range(3)]
    with LLM(
        str(tmp_path),
        multiprocess=False,
        async_scheduling=async_scheduling,
        max_model_len=250,
        max_num_batched_tokens=64,
        block_size=8,
        num_gpu_blocks_override=600,
    ) as llm:
        answers = [output.outputs[0].token_ids for output in llm.generate(firsts, greedy(20), use_tqdm=False)]
        seconds = [[*first, *answer, 7, 8, 9] for first, answer in zip(firsts, answers, strict=True)]
        turns = llm.generate(seconds, greedy(20), use_tqdm=False)
    for first, answer in zip(firsts, answers, strict=True):
        assert list(answer) == reference.greedy(first, 20)
    for second, turn in zip(seconds, turns, strict=True):
        assert list(turn.outputs[0].token_ids) == reference.greedy(second, 20)
        assert turn.num_cached_tokens == (len(second) - 4) // 8 * 8
