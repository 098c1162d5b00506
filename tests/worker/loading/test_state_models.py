"""Models that have layers with states: how memory is divided, how folders are read, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, Qwen3NextConfig

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import ConfigError, ModelLoadError
from engine.executor import ModelInfo
from engine.frontend.llm import LLM
from engine.records.kv_cache_groups import attention_groups, blocks_per_state
from engine.records.sampling_params import SamplingParams
from engine.worker.executor import UniProcExecutor
from engine.worker.loading.loader import load_model
from engine.worker.model_states import attention_beside_states
from engine.worker.models.decoder import Decoder
from engine.worker.models.families.table import decoder_shape, is_native
from engine.worker.models.mixers.state_shapes import DeltaNetShape, MambaShape
from tests.worker.conftest import WITH_STATES, ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.parallel.ranks import LoneRank

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CONV_BYTES, RECURRENT_BYTES = 112 * 3 * 4, 4 * 12 * 16 * 4
BYTES_PER_STATE = 3 * (CONV_BYTES + RECURRENT_BYTES)
"""Bytes of a state of ``qwen3-next``: three layers, in fp32."""
BYTES_PER_BLOCK = 2 * 8 * 2 * 24 * 4
"""Bytes of a block of its one attention layer."""


def info_of(folder: Path, **cache: Any) -> ModelInfo:
    """The executor's description of its pool, for blocks of 8 tokens and 4 running requests."""
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", max_model_len=128),
        cache=CacheConfig(block_size=8, **cache),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    executor = UniProcExecutor(config)
    executor.shutdown()
    return executor.info


def edited(folder: Path, to: Path, **fields: object) -> Path:
    """Copies a folder and changes fields of its config."""
    copy = Path(shutil.copytree(folder, to))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | fields))
    return copy


def test_blocks_and_states_share_the_bytes_exactly(model_folders: ModelFolders) -> None:
    """States, each the size of whole blocks, get two fifths; another block would not fit."""
    folder, num_bytes = model_folders("qwen3-next"), 500_000
    info = info_of(folder, kv_cache_memory_bytes=num_bytes)
    each = -(-BYTES_PER_STATE // BYTES_PER_BLOCK)
    assert info.num_states == num_bytes * 2 // 5 // (each * BYTES_PER_BLOCK) == 13
    assert info.num_gpu_blocks == num_bytes // BYTES_PER_BLOCK - 13 * each
    assert blocks_per_state(info.kv_cache_groups) == each == 5
    assert [group.layers for group in attention_groups(info.kv_cache_groups)] == [(0,)]


def test_states_have_an_end_and_a_beginning(model_folders: ModelFolders) -> None:
    """There are at most the states of running requests and as many checkpoints, at least one request's."""
    folder = model_folders("qwen3-next")
    assert info_of(folder, kv_cache_memory_bytes=50_000_000).num_states == 2 * 4 * 4 + 1
    assert info_of(folder, kv_cache_memory_bytes=160_000).num_states == 5
    assert info_of(folder, kv_cache_memory_bytes=500_000, num_state_slots=7).num_states == 7
    assert info_of(folder, num_gpu_blocks_override=60).num_gpu_blocks == 60


def test_too_little_memory_beside_the_states_is_refused(model_folders: ModelFolders) -> None:
    """Too little memory for KV is refused in one sentence."""
    with pytest.raises(ModelLoadError, match="maximum context length"):
        info_of(model_folders("qwen3-next"), kv_cache_memory_bytes=500_000, num_state_slots=35)


def test_a_disk_is_measured_for_a_model_with_states(model_folders: ModelFolders, tmp_path: Path) -> None:
    """Two states of granite4 may be on their way to it at once; the speed of computing tokens is measured
    with separate states."""
    folder = model_folders("granite4")
    info = info_of(folder, num_host_blocks_override=10, kv_cache_memory_bytes=4_000_000)
    assert info.num_host_blocks == 10
    disk = {"num_disk_blocks_override": 50, "kv_offloading_disk_path": str(tmp_path)}
    info = info_of(folder, num_host_blocks_override=10, kv_cache_memory_bytes=4_000_000, **disk)
    if info.disk_level is not None:  # otherwise this disk is slower than so small a model
        assert info.disk_level.max_writes == max(64, 2 * blocks_per_state(info.kv_cache_groups))


def test_state_slots_without_states_are_refused(model_folders: ModelFolders) -> None:
    with pytest.raises(ConfigError, match="num_state_slots"):
        info_of(model_folders("qwen3"), num_state_slots=10)
    with pytest.raises(ConfigError, match="num_state_slots must be at least 5"):
        CacheConfig(num_state_slots=4)


def test_tritons_attention_gives_way_unless_it_is_asked_for(model_folders: ModelFolders) -> None:
    """Triton's steps do not support states."""
    model = load_model(ModelConfig(model=str(model_folders("qwen3.5")), device="cpu")).model
    assert isinstance(model, Decoder)
    states = model.state_spec

    def config_of(**model: Any) -> EngineConfig:
        return EngineConfig(model=ModelConfig(model="m", **model))

    assert attention_beside_states("triton", config_of(), states) == "torch"
    assert attention_beside_states("auto", config_of(), states) == "auto"
    with pytest.raises(ConfigError, match="attention_backend=triton"):
        attention_beside_states("triton", config_of(attention_backend="triton"), states)


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        ("qwen3-next", 4, "number of key heads of linear attention, 2"),
        ("granite4-dense", 4, "number of groups of Mamba heads, 2"),
    ],
)
def test_heads_that_cannot_be_cut_are_refused(
    name: str, size: int, sentence: str, model_folders: ModelFolders
) -> None:
    options = ModelConfig(model=str(model_folders(name)), device="cpu")
    with pytest.raises(ConfigError, match=sentence):
        load_model(options, LoneRank(0, size))


def test_a_rank_has_its_heads_of_each_section(model_folders: ModelFolders) -> None:
    """Queries, keys and values are cut separately, and a Mamba group that all heads share is whole."""

    def conv_of(name: str, group: LoneRank | None) -> torch.Tensor:
        options = ModelConfig(model=str(model_folders(name)), device="cpu")
        model = (load_model(options) if group is None else load_model(options, group)).model
        assert isinstance(model, Decoder)
        return model.get_parameter("layers.0.attention.conv")

    for name, sections in (("qwen3-next", [24, 24, 64]), ("granite4", [128, 16, 16])):
        whole, *halves = (conv_of(name, group) for group in (None, LoneRank(0, 2), LoneRank(1, 2)))
        expected = [list(section.chunk(2)) for section in torch.split(whole, sections)]
        if name == "granite4":
            expected[1:] = [[section, section] for section in torch.split(whole, sections)[1:]]
        for rank, half in enumerate(halves):
            assert torch.equal(half, torch.cat([section[rank] for section in expected]))


@pytest.mark.parametrize("name", WITH_STATES)
def test_through_transformers_they_are_refused(name: str, model_folders: ModelFolders) -> None:
    """transformers' models keep states in their own caches."""
    options = ModelConfig(model=str(model_folders(name)), device="cpu", model_impl="transformers")
    with pytest.raises(ModelLoadError, match=r"it has (linear_attention|conv|hybrid) layers"):
        load_model(options)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("granite4", {"time_step_limit": [0.01, 0.5]}),
        ("granite4", {"layer_types": ["mamba"] * 4}),
        ("qwen3-next", {"hidden_act": "gelu"}),
        ("nemotron-h", {"sliding_window": 16}),
        ("nemotron-h", {"mlp_hidden_act": "silu"}),
        ("lfm2-moe", {"use_expert_bias": False}),
    ],
)
def test_what_is_not_computed_is_refused(
    name: str, fields: dict[str, object], model_folders: ModelFolders, tmp_path: Path
) -> None:
    """Bounded time steps, models without attention and other activations are refused."""
    folder = edited(model_folders(name), tmp_path / "model", **fields)
    with pytest.raises(ModelLoadError, match="has no native implementation"):
        load_model(ModelConfig(model=str(folder), device="cpu", model_impl="native"))


def test_published_sizes() -> None:
    """Sizes of Qwen3-Next-80B-A3B, which are the defaults, and of granite-4.0-h-tiny are right."""
    config = Qwen3NextConfig()
    assert is_native(config)
    shape = decoder_shape(config)
    assert len(shape.windows) == 12
    assert shape.states[0] == DeltaNetShape(16, 32, 128, 128, 4)
    assert (shape.rotary_dim, shape.head_dim) == (64, 256)
    granite = GraniteMoeHybridConfig(
        hidden_size=1536,
        num_attention_heads=12,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        mamba_n_heads=48,
        mamba_d_state=128,
        num_local_experts=64,
        num_experts_per_tok=6,
        position_embedding_type="nope",
    )
    assert is_native(granite)
    assert decoder_shape(granite).states == (state := MambaShape(48, 64, 1, 128, 4, True, False), None, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_STATES)
def test_a_folder_that_transformers_wrote_is_read(
    name: str, model_folders: ModelFolders, tmp_path: Path
) -> None:
    """The folder is read with transformers' names, and with multi-token prediction; prefixes are hit."""
    folder = model_folders(name)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights) | {"mtp.fc.weight": torch.zeros(4, 4)}, weights, {"format": "pt"})
    reference, prompt = Reference(folder), random_tokens(40, seed=1)
    with LLM(str(tmp_path), max_model_len=128, num_gpu_blocks_override=60, num_state_slots=20) as llm:
        (first,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        answer = first.outputs[0].token_ids
        assert answer == reference.greedy(prompt, 12)
        longer = prompt + answer + random_tokens(5, seed=2)
        (second,) = llm.generate([longer], GREEDY, use_tqdm=False)
    assert second.outputs[0].token_ids == reference.greedy(longer, 12)
    assert second.num_cached_tokens == 48


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 16}],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3-next", "granite4"])
def test_a_batch_gives_the_tokens_of_transformers(
    name: str, options: dict[str, Any], model_folders: ModelFolders
) -> None:
    """Tokens are equal with async scheduling, without prefix caching, and in chunks."""
    reference = Reference(model_folders(name))
    prompts = [random_tokens(length, seed=length) for length in (1, 9, 40, 63)]
    sizes: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 60, "num_state_slots": 24}
    with LLM(str(model_folders(name)), multiprocess=False, **sizes, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference.greedy(prompt, 12)


def test_random_weights_run(model_folders: ModelFolders) -> None:
    """A config alone is enough for measurements, also in bf16."""
    options: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 20, "load_format": "dummy"}
    with LLM(str(model_folders("granite4")), multiprocess=False, dtype="bfloat16", **options) as llm:
        (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12


def test_experts_without_gates_are_not_quantized(model_folders: ModelFolders) -> None:
    options = ModelConfig(model=str(model_folders("nemotron-h")), device="cpu", quantization="int8")
    with pytest.raises(ConfigError, match="quantization is not supported for experts without gates"):
        load_model(options)


@pytest.mark.parametrize("name", ["lfm2", "nemotron-h-dense"])
def test_a_folder_without_a_head_is_read(name: str, model_folders: ModelFolders, tmp_path: Path) -> None:
    """Its tensors have no common prefix, or the family's own."""
    folder = shutil.copytree(model_folders(name), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    kept = {each.removeprefix("model."): tensor for each, tensor in tensors.items() if "lm_head" not in each}
    save_file(kept, folder / "model.safetensors")
    whole = load_model(ModelConfig(model=str(model_folders(name)), device="cpu")).model
    headless = load_model(ModelConfig(model=str(folder), device="cpu"), headless=True).model
    assert isinstance(whole, Decoder)
    assert isinstance(headless, Decoder)
    assert torch.equal(whole.final_norm, headless.final_norm)
