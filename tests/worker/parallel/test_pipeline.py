"""A model in stages: the tokens of one process, whatever the scheduler does meanwhile."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from continuum.cli.main import main
from engine.errors import ConfigError
from engine.frontend.llm import LLM, engine_config
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.parallel.pipeline import PipelineStage
from tests.worker.conftest import VARIANTS, ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.random_loads import LoadDrawer, Oracle, wrong_answers
from tests.worker.test_other_attention import saved
from tests.worker.test_several_groups import OTHERS

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two stages": ({"num_layers": 3}, {"pipeline_parallel_size": 2}),
    "four stages": ({"num_layers": 5}, {"pipeline_parallel_size": 4}),
    "two stages of two ranks": (
        {"family": "qwen3_moe", "extra_config": MOE, "num_layers": 2},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_that_of_its_prompt_alone(case: str, tmp_path: Path) -> None:
    """Duplicates, block boundaries, turns and clients that leave, in a pool for little more than the longest
    of them; evicted KV is loaded from host memory. The trace replays."""
    model, options = CASES[case]
    folder = make_model_folder(tmp_path, **model, dtype="float32", hidden_size=128, num_heads=4)
    oracle = Oracle(folder, dtype="float32")
    load = LoadDrawer(Random(1), oracle, 8, (60, 190)).draw(60)
    num_blocks = -(-load.longest // 8) + 2
    with LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        block_size=8,
        max_model_len=load.longest + 1,
        num_gpu_blocks_override=3 * num_blocks // 2,
        num_host_blocks_override=4 * num_blocks,
        max_num_batched_tokens=256,
        trace_path=str(tmp_path / "trace.jsonl"),
        **options,
    ) as llm:
        assert wrong_answers(llm, load, oracle) == []
        llm.engine.check_invariants()
    oracle.close()
    assert main(["trace", "replay", str(tmp_path / "trace.jsonl")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_layers_of_several_kinds_are_in_each_stage(name: str, tmp_path: Path) -> None:
    """The block tables of a stage are those of the whole model, which has windows."""
    folder = make_model_folder(tmp_path)  # for its tokenizer
    saved(folder, name, **OTHERS[name])
    prompts = [random_tokens(30 + 20 * i, seed=i) for i in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        block_size=8,
        max_model_len=160,
        max_num_batched_tokens=32,
        pipeline_parallel_size=2,
    ) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        llm.engine.check_invariants()
    reference = Reference(folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference.greedy(prompt, 16)


SPLIT_IN_TWO: dict[str, dict[str, Any]] = {
    "gemma4": {
        "num_layers": 8,
        "extra_config": {"layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 2] * 2},
    },
    "glm-5": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_IN_TWO)
def test_heads_and_indexers_that_differ_are_in_each_stage(name: str, tmp_path: Path) -> None:
    """The layers of a stage keep their own heads, or share its indexers."""
    variant, other = VARIANTS[name], SPLIT_IN_TWO[name]
    extra = variant["extra_config"] | other.get("extra_config", {})
    folder = make_model_folder(tmp_path, **(variant | other | {"extra_config": extra}))
    prompts = [random_tokens(30 + 20 * i, seed=i) for i in range(3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"multiprocess": False, "device": "cpu", "block_size": 8, "max_model_len": 128}
    with LLM(str(folder), pipeline_parallel_size=2, max_num_batched_tokens=32, **options) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        llm.engine.check_invariants()
    reference = Reference(folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference.greedy(prompt, 12)


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        ("gemma4-small", 2, "its layers attend to keys and values of others"),
        ("glm-5", 4, "layer [13] would begin a stage, but it attends to the tokens that a layer before it"),
    ],
)
def test_layers_that_need_others_stay_in_one_stage(
    name: str, size: int, sentence: str, model_folders: ModelFolders
) -> None:
    """A stage never begins with a layer that needs a layer of another stage."""
    folder = str(model_folders(name))
    with pytest.raises(ConfigError, match=sentence):
        LLM(folder, multiprocess=False, device="cpu", max_model_len=128, pipeline_parallel_size=size)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be at least 1"),
        ({"async_scheduling": True}, "async_scheduling and pipeline_parallel_size > 1"),
        ({"speculative_config": {"method": "suffix"}}, "speculative_config and pipeline_parallel_size > 1"),
        ({"quantization": "int8"}, "quantization and pipeline_parallel_size > 1"),
    ],
)
def test_what_stages_cannot_do_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        engine_config("model", **({"pipeline_parallel_size": 2} | options))


@pytest.mark.slow
def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, num_layers=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 3, but the model has 2 layers"):
        LLM(str(folder), device="cpu", pipeline_parallel_size=3, max_model_len=64)


@pytest.mark.slow
def test_a_stage_without_layers_of_a_kind_is_refused(tmp_path: Path) -> None:
    """One rank finds the error, while the others wait for it."""
    folder = make_model_folder(tmp_path)
    saved(folder, "gemma3_text", **OTHERS["gemma3_text"])
    with pytest.raises(ConfigError, match="none of layers 0 to 2 attends to the last 12 tokens"):
        LLM(str(folder), device="cpu", pipeline_parallel_size=2, max_model_len=64)


@pytest.mark.parametrize(
    ("num_layers", "counts"),
    [(8, [4, 4]), (9, [4, 5]), (7, [2, 3, 2]), (8, [2, 3, 3]), (6, [1, 2, 2, 1]), (3, [1, 1, 1])],
)
def test_layers_that_are_left_over_go_to_the_middle_first(num_layers: int, counts: list[int]) -> None:
    """The first stage embeds, and the last one has the head."""
    stages = [PipelineStage(index, len(counts)).layers(num_layers) for index in range(len(counts))]
    assert [len(stage) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
