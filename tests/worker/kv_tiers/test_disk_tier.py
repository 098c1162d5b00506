"""The disk tier under a real model: KV that was written to disk and read back gives the same tokens, and a
broken file costs only recomputation."""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.core.outputs import DiskReads
from engine.errors import ConfigError, ModelLoadError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.executor import UniProcExecutor
from engine.worker.kv_tiers.disk_pool import DiskPool
from tests.api.server import is_alive, running_server
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 16
"""Bytes of a block of qwen2: layers x (K, V) x heads x dims x bytes x tokens."""


def file_in(folder: Path, pid: int | str = "self") -> str:
    """The path by which a process's open, nameless file in the folder can be opened again."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if str(descriptor.readlink()).startswith(f"{folder}/"):
                return str(descriptor)
    raise AssertionError(f"no file is open in {folder}")


@contextmanager
def small_llm(folder: Path, disk: Path, **options: Any) -> Iterator[LLM]:
    """A device pool for little more than one job, host memory for less, and a disk for all."""
    tier = {"num_disk_blocks_override": 200, "kv_offloading_disk_min_tokens": 1} | options
    with LLM(
        str(folder),
        multiprocess=False,
        max_model_len=304,
        num_gpu_blocks_override=20,
        num_host_blocks_override=8,
        kv_offloading_disk_path=str(disk),
        max_num_batched_tokens=64,
        **tier,
    ) as llm:
        yield llm


class Jobs:
    """Three jobs that take turns, compared with transformers."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        self._llm = llm
        self._reference = Reference(folder)
        self._histories = [random_tokens(150 + 10 * job, seed=job) for job in range(3)]

    def turn(self) -> int:
        """Runs one turn of each job, alone; returns the total of cached prompt tokens."""
        num_cached = 0
        for place, history in enumerate(self._histories):
            (output,) = self._llm.generate([history], GREEDY, use_tqdm=False)
            answer = output.outputs[0].token_ids
            assert answer == self._reference.greedy(history, 12)
            num_cached += output.num_cached_tokens
            self._llm.statistics()  # the writes to disk have ended when it returns
            self._histories[place] = [*history, *answer, *random_tokens(12, seed=place)]
        return num_cached


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek-v2"])
def test_turns_read_from_disk_give_the_same_tokens(
    model_folders: ModelFolders, tmp_path: Path, name: str
) -> None:
    """Every later turn finds its history, although device and host together cannot hold it. The file is in
    the folder without a name, so that it cannot be left over."""
    folder = model_folders(name)
    with small_llm(folder, tmp_path) as llm:
        jobs = Jobs(llm, folder)
        assert jobs.turn() == 0
        assert jobs.turn() >= sum((150 + 10 * job) // 16 * 16 for job in range(3))
        assert jobs.turn() > 3 * 160
        statistics = llm.statistics()
        assert statistics.num_used_disk_blocks > 20
        assert statistics.num_free_blocks == statistics.num_blocks == 19
        assert os.stat(file_in(tmp_path)).st_size > 20 * 1024
        assert not list(tmp_path.iterdir())
    with pytest.raises(AssertionError, match="no file is open"):
        file_in(tmp_path)


def test_a_slow_disk_has_what_was_evicted_before_a_pause(
    model_folders: ModelFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that end when no request is left are reported, too: the next turns find all of it."""
    goes_on, keep = threading.Event(), DiskPool._keep

    def keep_later(pool: DiskPool, *args: Any) -> None:
        assert goes_on.wait(60)
        keep(pool, *args)

    monkeypatch.setattr(DiskPool, "_keep", keep_later)
    with small_llm(model_folders("llama"), tmp_path) as llm:
        for job in range(3):
            llm.generate([random_tokens(150 + 10 * job, seed=job)], GREEDY, use_tqdm=False)
        goes_on.set()
        assert llm.statistics().num_used_disk_blocks > 16
        (output,) = llm.generate([random_tokens(150, seed=0)], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 144


@pytest.mark.parametrize("damage", ["other bytes", "shorter"])
def test_a_damaged_file_costs_only_computing(
    model_folders: ModelFolders, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """If the file is overwritten or truncated, tokens are the same, little is cached, one line is logged."""
    folder = model_folders("llama")
    with small_llm(folder, tmp_path) as llm, caplog.at_level(logging.WARNING):
        jobs = Jobs(llm, folder)
        jobs.turn()
        with open(file_in(tmp_path), "r+b") as file:
            size = os.stat(file.fileno()).st_size
            if damage == "shorter":
                file.truncate(100)
            else:
                file.write(Random(0).randbytes(size))
        assert jobs.turn() < 3 * 16 * 8
        assert jobs.turn() > 3 * 160, "the disk is of use again"
    told = [r.getMessage() for r in caplog.records if "could not be read from disk" in r.getMessage()]
    assert len(told) == 1
    assert ("differs from what was written" in told[0]) == (damage == "other bytes")


def test_a_full_disk_costs_only_its_use(
    model_folders: ModelFolders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No file may grow beyond five blocks: the rest is recomputed, and one log line says so."""
    folder = model_folders("llama")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with small_llm(folder, tmp_path) as llm, caplog.at_level(logging.WARNING):
        jobs = Jobs(llm, folder)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5 * BYTES_PER_BLOCK, limits[1]))
            for _ in range(3):
                jobs.turn()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert 0 < llm.statistics().num_used_disk_blocks <= 10
        assert llm.statistics().num_free_blocks == 19
    told = [r for r in caplog.records if "could not be written to disk" in r.getMessage()]
    assert len(told) == 1


@pytest.mark.slow
def test_a_server_says_what_its_disk_did(model_folders: ModelFolders, tmp_path: Path) -> None:
    """Tokens loaded from disk count as cached in the usage; /metrics has them apart from host memory's, and
    counts damaged loads. A killed server leaves nothing in the folder."""
    disk = tmp_path / "disk"
    disk.mkdir()
    gib = BYTES_PER_BLOCK / 2**30
    flags = (
        *("--num-gpu-blocks-override", "33", "--max-model-len", "512", "--scheduling-policy", "fcfs"),
        *("--kv-offloading-size", f"{32.5 * gib}", "--kv-offloading-disk-size", f"{200.5 * gib}"),
        *("--kv-offloading-disk-path", str(disk), "--kv-offloading-disk-min-tokens", "16"),
    )
    with (
        running_server(model_folders("qwen2"), *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def cached_tokens(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            cached: int = usage["prompt_tokens_details"]["cached_tokens"]
            return cached

        def metric(name: str) -> float:
            lines = http.get("/metrics").text.splitlines()
            (line,) = (line for line in lines if line.startswith(f"continuum:{name}" + "{"))
            return float(line.split()[-1])

        history = random_tokens(320, seed=1)
        for prompt in (history, random_tokens(500, seed=2), random_tokens(500, seed=3)):
            assert cached_tokens(prompt) == 0
        cached_tokens([1, 2, 3])  # a step that reports the last writes
        assert cached_tokens([*history, 5, 6, 7]) == 320
        assert metric("disk_kv_loaded_tokens_total") == 320
        assert metric("host_kv_loaded_tokens_total") == 0
        assert metric("disk_kv_written_blocks_total") >= 20
        assert 0 < metric("disk_kv_usage_perc") < 1
        for seed in (4, 5, 6):
            cached_tokens(random_tokens(500, seed=seed))
        os.truncate(file_in(disk, server.core_pid()), 0)
        assert cached_tokens([*history, 8, 9]) == 0
        assert metric("disk_kv_failed_loads_total") == 1
        assert metric("host_kv_failed_loads_total") == 0
        core = server.core_pid()
        server.process.kill()
        server.wait(15)
        while is_alive(core):
            pass
    assert not list(disk.iterdir())


@pytest.mark.slow
def test_blocks_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Any slots are read back any number of times, by several loads at once; a slot that was never written
    fails only its own load."""
    random = Random(0)
    pool = torch.zeros((40, 3, 32), dtype=torch.bfloat16)
    disk = DiskPool(tmp_path, pool)
    contents: dict[int, bytes] = {}
    for number in range(200):
        slots = random.sample(range(64), 8)
        for slot in slots:
            contents[slot] = random.randbytes(3 * 32 * 2)
            disk.write(slot, memoryview(bytearray(contents[slot])))
        written: list[int] = []
        while len(written) < 8:
            written += disk.take_reports().finished_writes
        assert sorted(written) == sorted(slots)
        reads = {1: random.choices(sorted(contents), k=20), 2: random.choices(sorted(contents), k=19)}
        blocks = iter(range(40))
        loads = {i: DiskReads([next(blocks) for _ in slots], slots) for i, slots in reads.items()}
        if number % 10 == 0:
            loads[3] = DiskReads([next(blocks)], [64 + number])
        for load_id, load in loads.items():
            disk.read(load_id, load)
        finished: list[int] = []
        failed: list[int] = []
        while len(finished) + len(failed) < len(loads):
            reports = disk.take_reports()
            finished += reports.finished_loads
            failed += reports.failed_loads
        assert (sorted(finished), failed) == ([1, 2], [3] if number % 10 == 0 else [])
        for load_id in (1, 2):
            for block, slot in zip(loads[load_id].block_ids, loads[load_id].disk_slots, strict=True):
                assert bytes(pool[block].flatten().view(torch.uint8).tolist()) == contents[slot]
    disk.close()
    disk.close()


def executor(folder: Path, **options: Any) -> UniProcExecutor:
    cache = CacheConfig(num_gpu_blocks_override=40, num_host_blocks_override=10, **options)
    return UniProcExecutor(EngineConfig(model=ModelConfig(model=str(folder), max_model_len=256), cache=cache))


def test_the_start_measures_what_is_worth_reading(model_folders: ModelFolders, tmp_path: Path) -> None:
    """Without a setting the start measures the disk; a model so small may never be worth reading."""
    running = executor(
        model_folders("qwen2"), num_disk_blocks_override=50, kv_offloading_disk_path=str(tmp_path)
    )
    level = running.info.disk_level
    if level is not None:
        assert 0 < level.read_share < 1
        assert level.fixed_tokens >= 0
        assert (level.num_blocks, level.is_worth(10**6, 10**6)) == (50, True)
    running.shutdown()


def test_a_disk_that_cannot_be_used_is_refused(model_folders: ModelFolders, tmp_path: Path) -> None:
    """A missing folder and too little space are refused in one sentence before anything is served."""
    folder = model_folders("qwen2")
    with pytest.raises(ModelLoadError, match=r"disk tier cannot use .*nowhere: No such file"):
        executor(folder, num_disk_blocks_override=5, kv_offloading_disk_path=str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"disk tier needs .* but only .* are free"):
        executor(folder, kv_offloading_disk_size=2.0**30, kv_offloading_disk_path=str(tmp_path))
    with pytest.raises(ConfigError, match=rf"is less than one KV block of {BYTES_PER_BLOCK} bytes"):
        executor(folder, kv_offloading_disk_size=1e-9, kv_offloading_disk_path=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_offloading_disk_size": 1.0}, "need each other"),
        ({"kv_offloading_disk_path": "/tmp"}, "need each other"),
        ({"kv_offloading_disk_size": 0.0}, "positive number of GiB, got 0.0"),
        ({"num_disk_blocks_override": 0}, "must be at least 1"),
        ({"kv_offloading_disk_min_tokens": 5}, "needs kv_offloading_disk_size"),
    ],
)
def test_a_disk_that_cannot_work_is_refused(options: dict[str, Any], sentence: str) -> None:
    """Contradicting options are refused in one sentence that names the option."""
    with pytest.raises(ConfigError, match=sentence):
        CacheConfig(kv_offloading_size=1.0, **options)


def test_a_disk_takes_what_host_memory_drops() -> None:
    """A disk needs a host tier."""
    with pytest.raises(ConfigError, match="needs kv_offloading_size"):
        CacheConfig(kv_offloading_disk_size=1.0, kv_offloading_disk_path="/tmp")
