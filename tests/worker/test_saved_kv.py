"""KV that engines save in a folder: another engine, or the next start, reads it and gives the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import MODEL_NAMES, WITH_STATES, ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.test_kv_transfer import LENGTHS

ANSWER = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
BLOCK = 16


@contextmanager
def engine(
    folder: Path, shared: Path, role: str = "kv_both", max_bytes: int | None = None, **options: Any
) -> Iterator[LLM]:
    config = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": role,
        "kv_load_failure_policy": options.pop("policy", "recompute"),
        "kv_connector_extra_config": {
            "shared_storage_path": str(shared),
            "shared_storage_max_bytes": max_bytes,
        },
    }
    given = {"multiprocess": False, "max_model_len": 256, "num_gpu_blocks_override": 160, **options}
    llm = LLM(str(folder), device="cpu", max_num_batched_tokens=64, kv_transfer_config=config, **given)
    try:
        yield llm
    finally:
        llm.close()


def generate(llm: LLM, prompt: list[int], params: SamplingParams = ANSWER) -> tuple[list[int], int]:
    """The answer, and the number of prompt tokens that were not computed."""
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def files_in(shared: Path) -> list[Path]:
    """Files of blocks, the oldest first."""
    found = [path for path in shared.glob("*/rank*/*/*") if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if name not in WITH_STATES])
def test_another_engine_reads_it(name: str, model_folders: ModelFolders, tmp_path: Path) -> None:
    """Another engine reads all full blocks of the prompts, and of the answers for later turns."""
    folder = model_folders(name)
    reference = Reference(folder)
    prompts = [random_tokens(length, seed=length) for length in LENGTHS]
    with engine(folder, tmp_path, "kv_producer") as first:
        answers = [generate(first, prompt)[0] for prompt in prompts]
    with engine(folder, tmp_path, "kv_consumer") as second:
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens, num_cached = generate(second, prompt)
            assert tokens == answer == reference.greedy(prompt, 20)
            assert num_cached == (len(prompt) - 1) // BLOCK * BLOCK
            following = [*prompt, *answer, 7, 8, 9]
            tokens, num_cached = generate(second, following)
            assert tokens == reference.greedy(following, 20)
            assert num_cached >= (len(prompt) + len(answer) - 1) // BLOCK * BLOCK


@pytest.mark.slow
def test_states_are_refused(model_folders: ModelFolders, tmp_path: Path) -> None:
    folder = model_folders(WITH_STATES[0])
    with (
        pytest.raises(EngineError, match="not all states of linear attention"),
        engine(folder, tmp_path, num_state_slots=24),
    ):
        pass


def test_damaged_and_missing_blocks_are_computed(model_folders: ModelFolders, tmp_path: Path) -> None:
    """Whatever is wrong with a file, the tokens are right, and the next engine finds it repaired."""
    folder = model_folders("llama")
    prompt = random_tokens(145, seed=1)
    expected = Reference(folder).greedy(prompt, 20)
    with engine(folder, tmp_path) as llm:
        generate(llm, prompt, ONE_TOKEN)
    of_the_prompt = files_in(tmp_path)
    assert len(of_the_prompt) == 144 // BLOCK
    for harm in (cut, flip, Path.unlink, empty):
        harm(of_the_prompt[3])
        with engine(folder, tmp_path) as llm:
            tokens, num_cached = generate(llm, prompt)
            assert tokens == expected
            assert num_cached < 144
        with engine(folder, tmp_path) as llm:
            assert generate(llm, prompt) == (expected, 144)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def test_a_request_may_fail_rather_than_be_computed(model_folders: ModelFolders, tmp_path: Path) -> None:
    folder = model_folders("llama")
    prompt = random_tokens(100, seed=2)
    with engine(folder, tmp_path) as llm:
        generate(llm, prompt, ONE_TOKEN)
    flip(files_in(tmp_path)[2])
    with engine(folder, tmp_path, policy="fail") as llm:
        (output,) = llm.generate([prompt], ANSWER, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert generate(llm, random_tokens(50, seed=3))[0]


def test_the_folder_keeps_to_its_limit(model_folders: ModelFolders, tmp_path: Path) -> None:
    """The last used blocks stay."""
    folder = model_folders("llama")
    prompts = [random_tokens(145, seed=seed) for seed in range(12)]
    with engine(folder, tmp_path) as llm:
        generate(llm, prompts[0])
    num_bytes = sum(path.stat().st_size for path in files_in(tmp_path))
    with engine(folder, tmp_path, max_bytes=3 * num_bytes) as llm:
        for prompt in prompts:
            generate(llm, prompt)
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 3 * num_bytes * 17 // 16
    with engine(folder, tmp_path) as llm:
        assert generate(llm, prompts[-1], ONE_TOKEN)[1] == 144
        assert generate(llm, prompts[0], ONE_TOKEN)[1] == 0


def test_a_crowd_in_a_small_pool(model_folders: ModelFolders, tmp_path: Path) -> None:
    """With preemption, and blocks that are reused while they are saved and read, tokens stay right."""
    folder = model_folders("llama")
    reference = Reference(folder)
    shared_start = random_tokens(64, seed=5)
    prompts = [shared_start + random_tokens(20 + 9 * seed, seed=seed) for seed in range(8)]
    expected = [reference.greedy(prompt, 20) for prompt in prompts]
    for host_gib in (None, 0.001):
        for _ in range(2):
            options: dict[str, Any] = {"num_gpu_blocks_override": 28, "kv_offloading_size": host_gib}
            with engine(folder, tmp_path, **options) as llm:
                outputs = llm.generate(prompts, ANSWER, use_tqdm=False)
                assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.slow
def test_each_rank_keeps_its_part(model_folders: ModelFolders, tmp_path: Path) -> None:
    folder = model_folders("qwen2")
    prompt = random_tokens(145, seed=1)
    expected = Reference(folder).greedy(prompt, 20)
    for num_cached in (0, 144):
        with engine(folder, tmp_path, tensor_parallel_size=2, multiprocess=True) as llm:
            assert generate(llm, prompt) == (expected, num_cached)
    with engine(folder, tmp_path) as llm:
        assert generate(llm, prompt) == (expected, 0), "its parts are whole"


def test_other_weights_find_nothing(model_folders: ModelFolders, tmp_path: Path) -> None:
    prompt = random_tokens(100, seed=4)
    for name in ("llama", "llama-yarn-tied"):
        with engine(model_folders(name), tmp_path) as llm:
            assert generate(llm, prompt) == (Reference(model_folders(name)).greedy(prompt, 20), 0)
    assert len(list(tmp_path.glob("*/about.txt"))) == 2
