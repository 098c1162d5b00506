"""Ranks as processes: what they report at the start, how they end, and what their ends mean."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.core.outputs import ModelRunnerOutput
from engine.errors import EngineDeadError, EngineError, ModelLoadError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.worker.ranks.multiproc_executor import MultiprocExecutor
from engine.worker.ranks.report_merger import ReportMerger
from tests.processes.support import has_gone
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.parallel.ranks import rank_pids, two_ranks

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", max_model_len=128, tensor_parallel_size=2),
        cache=CacheConfig(num_gpu_blocks_override=20),
    )


@pytest.mark.slow
def test_a_rank_that_is_killed_is_told_of_at_once(model_folders: ModelFolders) -> None:
    """With or without a running step the error has its number and signal. The others end on shutdown."""
    with two_ranks(model_folders("qwen3")) as engine:
        engine.add("a", random_tokens(5, seed=1))
        engine.step()
        told: Future[EngineError] = Future()
        engine.executor.on_failure(told.set_result)
        first, second = rank_pids(os.getpid())
        os.kill(second, signal.SIGKILL)
        assert "Rank 1 of the model has died (exit code -9)" in str(told.result(timeout=2))
        with pytest.raises(EngineDeadError, match="Rank 1"):
            engine.step()
    assert has_gone(first)


@pytest.mark.slow
def test_what_a_rank_finds_wrong_is_raised_as_it_is(model_folders: ModelFolders, tmp_path: Path) -> None:
    """A failed start is one sentence, and leaves no process behind."""
    folder = shutil.copytree(model_folders("llama"), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"^The weight file .* is cut short: .*\.$"):
        MultiprocExecutor(config(folder))
    assert rank_pids(os.getpid()) == []


@pytest.mark.slow
def test_ranks_do_not_outlive_a_core_that_is_killed(model_folders: ModelFolders) -> None:
    """After kill -9 of the process that started them, they and their folder are gone within 2 s."""
    program = (
        "import pickle, sys\n"
        "from engine.worker.ranks.multiproc_executor import MultiprocExecutor\n"
        "executor = MultiprocExecutor(pickle.load(sys.stdin.buffer))\n"
        "print(executor.info.num_gpu_blocks, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as core:
        assert core.stdin is not None
        assert core.stdout is not None
        core.stdin.write(pickle.dumps(config(model_folders("qwen3"))))
        core.stdin.flush()
        assert core.stdout.readline() == b"20\n"
        ranks = rank_pids(core.pid)
        assert len(ranks) == 2
        core.kill()
        assert all(has_gone(rank) for rank in ranks)


@pytest.mark.slow
def test_turns_loaded_from_the_host_give_the_same_tokens(model_folders: ModelFolders) -> None:
    """Each rank offloads its part of each block, and a GiB holds as many as in a single process: later turns
    are loaded alike, with the tokens of transformers."""
    folder = model_folders("qwen2")
    bytes_per_block = 2 * 2 * 2 * 16 * 4 * 16  # layers x (K, V) x heads x dims x bytes x tokens
    reference = Reference(folder)
    histories = [random_tokens(150 + 10 * job, seed=job) for job in range(2)]

    def turns(num_ranks: int) -> list[tuple[list[int], int]]:
        with LLM(
            str(folder),
            multiprocess=False,
            device="cpu",
            tensor_parallel_size=num_ranks,
            max_model_len=304,
            num_gpu_blocks_override=20,
            kv_offloading_size=30.5 * bytes_per_block / 2**30,
        ) as llm:
            outputs = [llm.generate(history, GREEDY, use_tqdm=False)[0] for history in histories * 2]
            assert llm.statistics().num_host_blocks == 30
        return [(output.outputs[0].token_ids, output.num_cached_tokens) for output in outputs]

    answers = turns(2)
    assert answers == turns(1)
    assert [tokens for tokens, _ in answers[2:]] == [reference.greedy(history, 12) for history in histories]
    assert min(num_cached for _, num_cached in answers[2:]) >= 128


@pytest.mark.slow
def test_a_step_is_planned_while_the_ranks_run_one(model_folders: ModelFolders) -> None:
    """With two plans under way, grammars among them, tokens are those of transformers."""
    folder = model_folders("llama")
    reference = Reference(folder)
    prompts = [random_tokens(20 + 13 * i, seed=i) for i in range(4)]
    chosen = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["red", "blue"]))
    with LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        tensor_parallel_size=2,
        max_model_len=304,
        num_gpu_blocks_override=20,
        max_num_batched_tokens=32,
        async_scheduling=True,
    ) as llm:
        outputs = llm.generate([*prompts, [7]], [*[GREEDY] * 4, chosen], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs[:4]] == [
        reference.greedy(prompt, 12) for prompt in prompts
    ]
    assert outputs[4].outputs[0].text in ("red", "blue")


@pytest.mark.slow
def test_masks_that_are_given_up_end_nothing(
    model_folders: ModelFolders, caplog: pytest.LogCaptureFixture
) -> None:
    """When a core stops with a step under way, ranks end without an error."""
    with two_ranks(model_folders("qwen3")) as engine:
        failures: list[EngineError] = []
        engine.executor.on_failure(failures.append)
        engine.add("a", random_tokens(5, seed=1))
        plan = engine.scheduler.schedule(0.0)
        plan.masks = Future()
        engine.executor.submit(plan)
        plan.masks.cancel()
    assert not failures
    assert not caplog.records


def test_a_load_has_ended_when_it_has_at_every_rank() -> None:
    """The ranks may report in any order; a load that fails on one has failed."""
    merger = ReportMerger(2)

    def merged(first: tuple[list[int], list[int]], second: tuple[list[int], list[int]]) -> list[list[int]]:
        outputs = [ModelRunnerOutput(["a"], [[1]], {}, *reports) for reports in (first, second)]
        result = merger.merge(outputs)
        assert result.sampled_token_ids == [[1]]
        return [list(result.finished_loads), list(result.failed_loads)]

    assert merged(([], []), ([], [])) == [[], []]
    assert merged(([1, 2], [3]), ([2], [])) == [[2], []]
    assert merged(([], []), ([1, 3], [])) == [[1], [3]]
    assert merged(([4], []), ([], [4])) == [[], [4]]
    assert merged(([3], []), ([3], [])) == [[3], []]
