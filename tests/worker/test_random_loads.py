"""The whole engine under random loads, with random settings: every answer is that of its prompt alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest

from engine.frontend.llm import LLM
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.conftest import ModelFolders
from tests.worker.random_loads import POLICIES, LoadDrawer, Oracle, wrong_answers

pytestmark = pytest.mark.slow

NUM_TURNS = 40


class Oracles(Protocol):
    """Returns the oracle of a model with these options, made once per module."""

    def __call__(self, **options: Any) -> Oracle: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sizes that all kernels support."""
    return make_model_folder(
        tmp_path_factory.mktemp("model"), "qwen3", dtype="bfloat16", hidden_size=128, num_heads=4
    )


@pytest.fixture(scope="module")
def windowed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two layers of full attention and three with a window: three block tables."""
    window = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2}
    return make_model_folder(
        tmp_path_factory.mktemp("model"),
        "qwen2",
        dtype="bfloat16",
        hidden_size=128,
        num_heads=4,
        num_layers=5,
        extra_config=window,
    )


@pytest.fixture(scope="module")
def oracles(folder: Path) -> Iterator[Oracles]:
    with ExitStack() as stack:
        yield oracles_of(folder, stack)


@pytest.fixture(scope="module")
def windowed_oracles(windowed_folder: Path) -> Iterator[Oracles]:
    with ExitStack() as stack:
        yield oracles_of(windowed_folder, stack)


def oracles_of(folder: Path, stack: ExitStack) -> Oracles:
    made: dict[tuple[tuple[str, Any], ...], Oracle] = {}

    def oracle_of(**options: Any) -> Oracle:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = Oracle(folder, **options)
            stack.callback(made[key].close)
        return made[key]

    return oracle_of


NUMBERS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
)


DRAFTS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"method": "suffix", "weigh_costs": False},
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "weigh_costs": False},
)


def draw_options(
    random: Random, block_size: int, longest: int, disk: Path, num_groups: int = 1
) -> dict[str, Any]:
    """The engine's settings, except the model, with enough blocks for the longest request."""
    choose = random.choice
    num_blocks = num_groups * -(-longest // block_size) + 2
    options: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks_override": int(num_blocks * choose((1, 1.5, 6))),
        "max_model_len": longest + 1,
        "max_num_batched_tokens": choose((2 * block_size + 1, 64, 256, 2048)),
        "max_num_seqs": choose((3, 8, 32, 32)),
        "long_prefill_token_threshold": choose((0, 0, block_size + 1)),
        "async_scheduling": choose((False, True)),
        "attention_backend": choose(("auto",) * 5 + ("torch",)),
    }
    options["speculative_config"] = choose(DRAFTS)
    tier = choose(("none", "host", "disk"))
    if tier != "none":
        options["num_host_blocks_override"] = int(num_blocks * choose((0.5, 4)))
    if tier == "disk":
        options |= {
            "num_disk_blocks_override": 20 * num_blocks,
            "kv_offloading_disk_path": str(disk),
            "kv_offloading_disk_min_tokens": 1,
        }
    return options


SPARSE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "kv_lora_rank": 48,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "llama4_text": {
        "attention_chunk_size": 28,
        "floor_scale": 16,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
        "num_local_experts": 8,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("seed", range(4))
def test_mixtures_of_experts_too(family: str, seed: int, tmp_path: Path) -> None:
    """The same holds for mixtures of experts, in fp32, where no rounding error chooses an expert; with async
    scheduling for every other seed."""
    random = Random(100 + seed)
    folder = make_model_folder(tmp_path / "model", family, num_layers=3, extra_config=SPARSE[family])
    block_size = random.choice((4, 8, 16))
    oracle = Oracle(folder, dtype="float32")
    load = LoadDrawer(random, oracle, block_size, (60, 190)).draw(NUM_TURNS)
    num_groups = 3 if family == "llama4_text" else 1
    options = draw_options(random, block_size, load.longest, tmp_path, num_groups)
    options["async_scheduling"] = seed % 2 == 1
    policy = POLICIES[random.choice(sorted(POLICIES))]()
    with LLM(str(folder), scheduling_policy=policy, multiprocess=False, dtype="float32", **options) as llm:
        assert wrong_answers(llm, load, oracle) == [], options
        llm.engine.check_invariants()
    oracle.close()


@pytest.mark.parametrize("name", ["qwen3-next", "granite4", "nemotron-h-dense", "lfm2"])
@pytest.mark.parametrize("seed", range(4))
def test_models_with_states_too(name: str, seed: int, model_folders: ModelFolders, tmp_path: Path) -> None:
    """The same holds where a prefix hit needs a kept state: with slots for a single request or for many, and
    blocks for few requests or for all."""
    random = Random(200 + seed)
    folder = model_folders(name)
    block_size = random.choice((4, 8, 16))
    oracle = Oracle(folder, dtype="float32")
    load = LoadDrawer(random, oracle, block_size, (60, 190)).draw(NUM_TURNS)
    options = draw_options(random, block_size, load.longest, tmp_path)
    options |= {
        "async_scheduling": seed % 2 == 1,
        "num_state_slots": random.choice((5, 9, 60)),
    }
    policy = POLICIES[random.choice(sorted(POLICIES))]()
    with LLM(str(folder), scheduling_policy=policy, multiprocess=False, dtype="float32", **options) as llm:
        assert wrong_answers(llm, load, oracle) == [], options
        llm.engine.check_invariants()
    oracle.close()


@pytest.mark.parametrize("seed", range(16))
def test_every_answer_is_that_of_its_prompt_alone(
    seed: int, folder: Path, oracles: Oracles, tmp_path: Path
) -> None:
    """Duplicates in one step, prompts that share others' prefixes up to a block boundary or a token next to
    it, later turns, and clients that leave: with any policy, in one tier or three, with or without async
    scheduling, with prompts in one step, in chunks or, in compiled steps, over several passes."""
    random = Random(seed)
    numbers = NUMBERS[seed % len(NUMBERS)]
    oracle = oracles(**numbers)
    block_size = random.choice((4, 8, 16))
    lengths = (600, 1300) if seed % 8 == 5 else (60, 190)
    load = LoadDrawer(random, oracle, block_size, lengths).draw(NUM_TURNS)
    options = draw_options(random, block_size, load.longest, tmp_path)
    policy = POLICIES[random.choice(sorted(POLICIES))]()
    with LLM(str(folder), scheduling_policy=policy, multiprocess=False, **numbers, **options) as llm:
        assert wrong_answers(llm, load, oracle) == [], options
        llm.engine.check_invariants()


@pytest.mark.parametrize("seed", range(8))
def test_so_is_every_answer_of_a_model_with_windows(
    seed: int, windowed_folder: Path, windowed_oracles: Oracles, tmp_path: Path
) -> None:
    """Blocks that a window has left may be another request's, or be loaded from a second tier."""
    random = Random(100 + seed)
    numbers = NUMBERS[seed % 2]
    oracle = windowed_oracles(**numbers)
    block_size = random.choice((4, 8, 16))
    load = LoadDrawer(random, oracle, block_size, (60, 190)).draw(NUM_TURNS)
    options = draw_options(random, block_size, load.longest, tmp_path, num_groups=3)
    policy = POLICIES[random.choice(sorted(POLICIES))]()
    with LLM(str(windowed_folder), scheduling_policy=policy, multiprocess=False, **numbers, **options) as llm:
        assert wrong_answers(llm, load, oracle) == [], options
        llm.engine.check_invariants()
