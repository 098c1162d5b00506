"""Which core each thread of a step gets: on described machines, and on this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.cpu import cores
from engine.worker.cpu.cores import AFFINITY_VARIABLES, cores_for, usable_cpus
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.cpu.compiled_steps import has_compiled_steps


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in AFFINITY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def machine(folder: Path, monkeypatch: pytest.MonkeyPatch, usable: set[int], siblings: dict[int, str]) -> str:
    """A machine whose process may use these CPUs; returns the path pattern of each CPU's siblings file."""
    monkeypatch.setattr(cores, "usable_cpus", lambda: frozenset(usable))
    for cpu, text in siblings.items():
        (folder / f"cpu{cpu}").write_text(text + "\n")
    return str(folder / "cpu{}")


def cpus(*cores: set[int]) -> list[frozenset[int]]:
    return [frozenset(core) for core in cores]


def test_a_core_for_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = machine(tmp_path, monkeypatch, {0, 1, 2}, {0: "0", 1: "1", 2: "2"})
    assert cores_for(3, files) == cpus({0}, {1}, {2})


def test_siblings_are_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four CPUs of two cores are found, in the usual numbering and in the other one."""
    files = machine(tmp_path, monkeypatch, {0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert cores_for(2, files) == cpus({0, 2}, {1, 3})
    files = machine(tmp_path, monkeypatch, {0, 1, 2, 3}, {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
    assert cores_for(2, files) == cpus({0, 1}, {2, 3})


def test_only_what_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = machine(tmp_path, monkeypatch, {1, 2}, {1: "0-1", 2: "2-3"})
    assert cores_for(2, files) == cpus({1}, {2})


def test_a_system_that_tells_no_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = machine(tmp_path, monkeypatch, {0, 1}, {1: "?"})
    assert cores_for(2, files) == cpus({0}, {1})


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_none_with_other_threads_than_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """An engine that shares the machine with another one would choose the same cores."""
    files = machine(tmp_path, monkeypatch, {0, 1, 2}, {})
    assert cores_for(num_threads, files) == ()


def test_none_where_the_user_has_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = machine(tmp_path, monkeypatch, {0, 1}, {})
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert cores_for(2, files) == ()


def test_none_where_the_system_tells_no_cpus_or_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cores_for(2, machine(tmp_path, monkeypatch, set(), {})) == ()
    assert cores_for(2, machine(tmp_path, monkeypatch, {3, 1024}, {})) == ()


class Caller:
    """A thread that has not computed before, so that its helper threads are new as well."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = set(os.listdir("/proc/self/task"))
        self._llm = LLM(folder, multiprocess=False, max_model_len=512)

    def generate(self) -> list[int]:
        [output] = self._llm.generate(
            [list(range(40))], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False
        )
        return list(output.outputs[0].token_ids)

    def generate_by_one_thread(self) -> None:
        """Generates with another engine in the same thread, which has no cores to assign."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            Caller(self._folder).generate()
        finally:
            torch.set_num_threads(before)

    def others(self) -> list[frozenset[int]]:
        """The CPUs of its helper threads: of the new threads that are not allowed everywhere."""
        everywhere = os.sched_getaffinity(0)
        came = set(os.listdir("/proc/self/task")) - self._before
        allowed = list[frozenset[int]]()
        for thread in came:
            with suppress(ProcessLookupError):  # threads of background work after the start end
                allowed.append(frozenset(os.sched_getaffinity(int(thread))))
        return [each for each in allowed if each != everywhere]


Check = Callable[[Caller], None]


@pytest.fixture
def in_thread(tmp_path: Path) -> Iterator[Callable[[Check], None]]:
    """Runs a check with a Caller that computes with a thread on each core of this machine."""
    num_cores = next((number for number in range(2, 1 + len(usable_cpus())) if cores_for(number)), 0)
    if not num_cores or not has_compiled_steps():
        pytest.skip("takes two cores and compiled steps")
    make_model_folder(tmp_path / "model", "qwen3", dtype="bfloat16", head_dim=64)

    def run(check: Check) -> None:
        torch.set_num_threads(num_cores)
        check(Caller(tmp_path / "model"))

    with ThreadPoolExecutor(1) as thread:
        yield lambda check: thread.submit(run, check).result()


def test_threads_of_steps_have_a_core_each_and_the_caller_is_free(in_thread: Callable[[Check], None]) -> None:
    def check(caller: Caller) -> None:
        everywhere = os.sched_getaffinity(0)
        caller.generate()
        assert os.sched_getaffinity(0) == everywhere
        others = caller.others()
        assert len(others) == torch.get_num_threads() - 1
        assert sum(map(len, others)) == len(frozenset().union(*others)) < len(everywhere)

    in_thread(check)


def test_the_thread_whose_core_the_caller_comes_to_gives_way(in_thread: Callable[[Check], None]) -> None:
    """The caller is moved to each CPU and released: the helpers then use all other cores. Sometimes the
    system moves it again before the next step, so there are several attempts."""

    def check(caller: Caller) -> None:
        everywhere = os.sched_getaffinity(0)
        taken = set[int]()
        for attempt in range(20 * len(everywhere)):
            os.sched_setaffinity(0, {sorted(everywhere)[attempt % len(everywhere)]})
            os.sched_setaffinity(0, everywhere)
            caller.generate()
            taken |= everywhere - frozenset().union(*caller.others())
            if taken == everywhere:
                return
        pytest.fail(f"the caller has had {taken} only")

    in_thread(check)


def test_an_engine_without_cores_before_and_in_between(in_thread: Callable[[Check], None]) -> None:
    def check(caller: Caller) -> None:
        for _ in range(3):
            caller.generate_by_one_thread()
            assert len(caller.generate()) == 4
        assert len(caller.others()) == torch.get_num_threads() - 1

    in_thread(check)


def test_a_caller_with_cpus_of_its_own_keeps_them(in_thread: Callable[[Check], None]) -> None:
    def check(caller: Caller) -> None:
        tokens = caller.generate()
        own = {min(os.sched_getaffinity(0))}
        os.sched_setaffinity(0, own)
        assert caller.generate() == tokens
        assert os.sched_getaffinity(0) == own

    in_thread(check)
