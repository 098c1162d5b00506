"""``enable_return_routed_experts``: each token's experts are those that transformers' routers choose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, RequestError
from engine.frontend.llm import LLM
from engine.frontend.request_output import RequestOutput
from engine.records.routed_experts import ExpertArray, RoutedExperts, RoutedExpertsSpec
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.loader import load_model
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from engine.worker.models.moe import MixtureOfExperts
from engine.worker.models.routing import Router
from tests.worker.conftest import ModelFolders
from tests.worker.cpu.compiled_steps import has_compiled_steps
from tests.worker.generation import Reference, random_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SPARSE = (
    *("qwen3-moe", "qwen3-moe-every-other", "mixtral", "glm4-moe"),
    *("deepseek-v2", "deepseek-v3", "gpt-oss", "llama4", "minimax-m2", "glm4-moe-lite"),
)
SIZES: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 64, "max_model_len": 128}


def open_llm(folder: Path, **options: Any) -> LLM:
    options = {"multiprocess": False, "device": "cpu", "enable_return_routed_experts": True, **options}
    return LLM(folder, **SIZES | options)


@pytest.fixture(params=SPARSE)
def folder(request: pytest.FixtureRequest, model_folders: ModelFolders) -> Path:
    return model_folders(request.param)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


def in_order(experts: ExpertArray) -> ExpertArray:
    """Each token's experts by number: their order is that of ``topk``, which a router may not define."""
    return np.sort(experts, axis=-1)


def check(output: RequestOutput, folder: Path) -> None:
    """Asserts that the output's experts are transformers' for prompt and answer, without the last token."""
    answer = output.outputs[0]
    assert answer.routed_experts is not None
    told = Reference(folder).routed_experts(output.prompt_token_ids + answer.token_ids)
    assert answer.routed_experts.dtype == np.uint8
    assert np.array_equal(in_order(answer.routed_experts), in_order(told))


def test_experts_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    """The batch has prompts of several lengths; a mix-up of two layers would be noticed."""
    prompts = [random_tokens(length, seed=length) for length in (1, 8, 43)]
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        check(output, folder)


def test_cached_and_preempted_tokens_have_their_experts(model_folders: ModelFolders) -> None:
    """Tokens of a prefix that another request computed have theirs; preemption changes none."""
    folder = model_folders("qwen3-moe")
    shared = random_tokens(27, seed=1)
    prompts = [shared[: 9 * (i % 4)] + random_tokens(7 + 5 * i, seed=10 + i) for i in range(7)]
    with open_llm(folder, num_gpu_blocks_override=18, max_num_batched_tokens=24) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        again = llm.generate(prompts[3], GREEDY, use_tqdm=False)
    assert again[0].num_cached_tokens > 0
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    for output in [*outputs, *again]:
        check(output, folder)


def test_async_steps_return_the_same(model_folders: ModelFolders) -> None:
    """A step is planned while another runs, and its array is not that of the step before."""
    folder = model_folders("qwen3-moe")
    with open_llm(folder, async_scheduling=True, max_num_batched_tokens=16) as llm:
        for output in llm.generate([random_tokens(40, seed=n) for n in range(3)], GREEDY, use_tqdm=False):
            check(output, folder)


def test_answers_that_share_a_prompt_and_stop_strings(model_folders: ModelFolders) -> None:
    """Each of n answers has its own; tokens after a stop string have none."""
    folder = model_folders("mixtral")
    with open_llm(folder, async_scheduling=True) as llm:
        prompt = random_tokens(20, seed=2)
        hot = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, ignore_eos=True)
        (output,) = llm.generate([prompt], hot, use_tqdm=False)
        for answer in output.outputs:
            assert answer.routed_experts is not None
            told = Reference(folder).routed_experts(prompt + answer.token_ids)
            assert np.array_equal(in_order(answer.routed_experts), in_order(told))
        text = llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].text
        stopping = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[text[4:6]])
        (stopped,) = llm.generate([prompt], stopping, use_tqdm=False)
        assert stopped.outputs[0].finish_reason == "stop"
        check(stopped, folder)


@pytest.mark.parametrize("start", [1, 13, 20])
def test_a_prompt_that_is_known_can_be_left_out(model_folders: ModelFolders, start: int) -> None:
    """The first tokens of the prompt have no rows; all others have the same as without the option."""
    prompt = random_tokens(20, seed=8)
    with open_llm(model_folders("mixtral")) as llm:
        params = [msgspec.structs.replace(GREEDY, routed_experts_prompt_start=n) for n in (0, start)]
        whole, rest = llm.generate([prompt, prompt], params, use_tqdm=False)
        with pytest.raises(RequestError, match="at most the prompt's 20 tokens, got 21"):
            llm.generate([prompt], msgspec.structs.replace(GREEDY, routed_experts_prompt_start=21))
    told, expected = rest.outputs[0].routed_experts, whole.outputs[0].routed_experts
    assert told is not None
    assert expected is not None
    assert len(told) == 20 + 12 - 1 - start
    assert np.array_equal(told, expected[start:])


@pytest.mark.slow
@pytest.mark.parametrize("by_rank", [False, True], ids=["tensor-parallel", "expert-parallel"])
def test_ranks_return_what_one_does(model_folders: ModelFolders, by_rank: bool) -> None:
    """The first rank returns the experts of all ranks by their numbers in the model."""
    for name in ("qwen3-moe", "glm4-moe"):
        folder = model_folders(name)
        with open_llm(folder, tensor_parallel_size=2, enable_expert_parallel=by_rank) as llm:
            for output in llm.generate([random_tokens(21, seed=4)], GREEDY, use_tqdm=False):
                check(output, folder)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiled_steps(), reason="this CPU does not multiply pairs of bf16")
def test_packed_experts_tell_the_experts_that_they_compute(tmp_path: Path) -> None:
    """In bf16, where steps are otherwise one compiled call, routers run layer by layer."""
    fields = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
    folder = make_model_folder(
        tmp_path / "bf16", "qwen3_moe", hidden_size=128, head_dim=64, dtype="bfloat16", extra_config=fields
    )
    with open_llm(folder) as llm:
        (output,) = llm.generate([random_tokens(30, seed=6)], GREEDY, use_tqdm=False)
    experts = output.outputs[0].routed_experts
    assert experts is not None
    assert experts.shape == (41, 2, 3)
    assert (np.diff(in_order(experts).astype(np.int64)) > 0).all()
    assert experts.max() < 8
    told = Reference(folder).routed_experts(output.prompt_token_ids + output.outputs[0].token_ids)
    assert (in_order(experts) == in_order(told)).mean() > 0.9


def test_without_the_flag_routers_are_as_they_were(model_folders: ModelFolders) -> None:
    """No router has a recorder, and outputs have no experts."""
    folder = model_folders("qwen3-moe")
    with open_llm(folder, enable_return_routed_experts=False) as llm:
        (output,) = llm.generate([random_tokens(9, seed=5)], GREEDY, use_tqdm=False)
    assert output.outputs[0].routed_experts is None
    model = load_model(ModelConfig(model=str(folder), device="cpu")).model
    assert isinstance(model, Decoder)
    sparse = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    assert sparse
    assert all(isinstance(mlp.router, Router) for mlp in sparse)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("qwen3", {}, "needs a mixture of experts with a native implementation"),
        (
            "mixtral",
            {"model_impl": "transformers"},
            "needs a mixture of experts with a native implementation",
        ),
        ("mixtral-window", {}, "set disable_hybrid_kv_cache_manager"),
        ("mixtral", {"kv_offloading_size": 1.0}, "kv_offloading_size cannot be combined"),
    ],
)
def test_what_it_cannot_be_had_for_names_the_flag(
    model_folders: ModelFolders, name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"enable_return_routed_experts .*{words}"):
        open_llm(model_folders(name), **options)


def test_windows_of_all_layers_need_one_block_table(model_folders: ModelFolders) -> None:
    """The option that the error recommends works."""
    folder = model_folders("mixtral-window")
    with open_llm(folder, disable_hybrid_kv_cache_manager=True) as llm:
        (output,) = llm.generate([random_tokens(40, seed=7)], GREEDY, use_tqdm=False)
    check(output, folder)


def test_memory_for_experts_is_part_of_the_pool(model_folders: ModelFolders) -> None:
    """With the flag a pool of equal bytes has fewer blocks: by 3 experts of 4 layers in a byte each."""
    folder = model_folders("qwen3-moe")
    kv_bytes, num_bytes = 2 * 4 * 2 * 24 * 4, 4 << 20
    for flag, per_token in ((False, kv_bytes), (True, kv_bytes + 12)):
        options = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": num_bytes}
        with open_llm(folder, enable_return_routed_experts=flag, **options) as llm:
            assert llm.statistics().num_blocks == num_bytes // (8 * per_token) - 1


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, "uint8"), (257, "uint16")])
def test_numbers_of_experts_survive_the_message(num_experts: int, dtype: str) -> None:
    """The highest number is kept in the smallest type that holds it."""
    spec = RoutedExpertsSpec(num_layers=3, experts_per_token=2, num_experts=num_experts)
    experts = spec.empty(5)
    experts[4, 2] = (num_experts - 1, 1)
    assert spec.bytes_per_token == 6 * experts.itemsize
    message = RoutedExperts.of(experts)
    assert message.dtype == dtype
    assert np.array_equal(message.array(), experts)
