"""Attention by the compiled kernel: its results, its build, and the fallback where it cannot be built."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.backend import AttentionBackend, AttentionBatch
from engine.worker.cpu.attention_kernel import CpuKernel
from engine.worker.cpu.kernels.library import KernelUnavailable
from engine.worker.cpu.paged_attention import CpuPagedAttention
from engine.worker.cpu.sampling_kernel import token_picker
from tests.worker.attention_reference import (
    AttentionCase,
    make_case,
    paged_output,
    reference_output,
    with_stale_blocks,
)
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens

SHAPES = ((128, torch.bfloat16), (80, torch.bfloat16), (96, torch.float32))
"""Pairs of head_dim and type: the widest vectors with and without AVX512_BF16, and half as wide ones."""
SELECTION_LOGGER = "engine.worker.attention.selection"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="there is no C++ compiler"
    ),
]


class Kernels(Protocol):
    """Returns the kernel of a shape, built once per session."""

    def __call__(self, head_dim: int, dtype: torch.dtype) -> CpuKernel: ...


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Kernels built in parallel, in a separate cache."""
    cache = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        with ThreadPoolExecutor(len(SHAPES)) as pool:
            built = dict(zip(SHAPES, pool.map(lambda shape: CpuKernel.load(*shape), SHAPES), strict=True))
    return lambda head_dim, dtype: built[head_dim, dtype]


@st.composite
def cases(draw: st.DrawFn, shapes: Sequence[tuple[int, torch.dtype]] = SHAPES) -> AttentionCase:
    """Decodes shortest first, often followed by prompts; with all that a model may choose."""
    head_dim, dtype = draw(st.sampled_from(shapes))
    num_kv_heads = draw(st.integers(1, 3))
    near_parts = st.sampled_from((1, 2, 255, 256, 257, 512, 513))
    lengths = sorted(draw(st.lists(near_parts | st.integers(1, 700), min_size=1, max_size=5)))
    few, many = st.integers(2, 20), st.integers(2, 300)
    prompts = draw(st.lists(st.tuples(few | many, st.integers(0, 50) | st.integers(0, 600)), max_size=2))
    return make_case(
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.integers(1, 9)),
        head_dim=head_dim,
        dtype=dtype,
        block_size=draw(st.sampled_from((1, 5, 16, 64))),
        lengths=(*((1, n) for n in lengths), *((n, n + context) for n, context in prompts)),
        seed=draw(st.integers(0, 2**31)),
    )


windows = st.none() | st.sampled_from((1, 256, 257)) | st.integers(1, 800)


@settings(max_examples=40, deadline=None)
@given(case=cases(), window=windows)
def test_equals_the_reference_and_torch(kernels: Kernels, case: AttentionCase, window: int | None) -> None:
    """With any lengths, block tables, windows and head groups, decodes err by at most one rounding of their
    type, prompts by a few, and the pool then equals torch's."""
    wanted, pool = reference_output(case, window), case.pool.clone()
    got = paged_output(case, window, backend_with(kernels))
    eps = torch.finfo(case.pool.dtype).eps
    error, decodes = (got - wanted).abs(), case.batch.num_decodes
    assert (error <= 1e-5 + eps * wanted.abs())[:decodes].all()
    assert (error <= 1e-5 + 4 * eps)[decodes:].all()
    by_torch = paged_output(replace(case, pool=pool), window)
    assert (got - by_torch).abs().max() < 1e-5 + 4 * eps
    assert torch.equal(pool, case.pool)


@settings(max_examples=20, deadline=None)
@given(case=cases(), window=windows, num_threads=st.integers(1, 3))
def test_alone_as_in_company(
    kernels: Kernels, case: AttentionCase, window: int | None, num_threads: int
) -> None:
    """A sequence gets the same bits whatever else is in the batch, and with any number of threads."""
    together = paged_output(case, window, backend_with(kernels))
    has_prefill = kernels(case.pool.shape[-1], case.pool.dtype).has_prefill
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        starts = case.batch.query_lens.cumsum() - case.batch.query_lens
        for row in range(len(starts) if has_prefill else case.batch.num_decodes):
            tokens = slice(starts[row], starts[row] + case.batch.query_lens[row])
            alone = paged_output(only(case, row, tokens), window, backend_with(kernels))
            assert torch.equal(alone, together[tokens])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=25, deadline=None)
@given(case=cases(), window=st.sampled_from((1, 256, 257)) | st.integers(1, 300))
def test_what_lies_before_a_window_may_be_anything(
    kernels: Kernels, case: AttentionCase, window: int
) -> None:
    """NaN in blocks that went to another sequence changes no bit."""
    wanted = paged_output(replace(case, pool=case.pool.clone()), window, backend_with(kernels))
    assert torch.equal(paged_output(with_stale_blocks(case, window), window, backend_with(kernels)), wanted)


@settings(max_examples=40, deadline=None)
@given(case=cases(), chunk=st.sampled_from((1, 16, 255, 256)) | st.integers(1, 800))
def test_a_chunk_is_all_that_its_tokens_see(kernels: Kernels, case: AttentionCase, chunk: int) -> None:
    """Keys before the chunk of a sequence's first new token may be anything, even NaN."""
    wanted = reference_output(case, None, chunk=chunk)
    got = paged_output(replace(case, pool=case.pool.clone()), None, backend_with(kernels), chunk=chunk)
    eps = torch.finfo(case.pool.dtype).eps
    assert ((got - wanted).abs() <= 1e-5 + 4 * eps).all()
    stale = with_stale_blocks(case, chunk=chunk)
    assert torch.equal(paged_output(stale, None, backend_with(kernels), chunk=chunk), got)


@settings(max_examples=25, deadline=None)
@given(
    case=cases(),
    window=windows,
    soft_cap=st.none() | st.sampled_from((0.5, 3.0, 50.0)),
    sink=st.none() | st.sampled_from((-100.0, -1.0, 0.0, 3.0, 200.0)),
)
def test_soft_caps_and_sinks(
    kernels: Kernels, case: AttentionCase, window: int | None, soft_cap: float | None, sink: float | None
) -> None:
    """Scores are capped, and the sink of a head, however large, takes its share of the weights."""
    num_heads = case.query.shape[1]
    sinks = None if sink is None else (sink + torch.linspace(0.0, 2.0, num_heads)).to(case.pool.dtype)
    wanted = reference_output(case, window, soft_cap, sinks)
    got = paged_output(case, window, backend_with(kernels), soft_cap=soft_cap, sinks=sinks)
    eps = torch.finfo(case.pool.dtype).eps
    assert ((got - wanted).abs() <= 1e-5 + 4 * eps).all()


def test_a_prefix_that_sequences_share_changes_no_bit(kernels: Kernels) -> None:
    """Sequences attend to the shared parts one after another, so that these are read once."""
    case = make_case(
        num_kv_heads=2, dtype=torch.bfloat16, head_dim=128, lengths=((1, 300), (1, 513), (1, 700))
    )
    case.batch.block_tables[:, :32] = case.batch.block_tables[2, :32]
    together = paged_output(case, None, backend_with(kernels))
    torch.testing.assert_close(together, paged_output(case, None), atol=2e-2, rtol=2e-2)
    for row in range(3):
        alone = paged_output(only(case, row, slice(row, row + 1)), None, backend_with(kernels))
        assert torch.equal(alone, together[row : row + 1])


def backend_with(kernels: Kernels) -> type[AttentionBackend]:
    """A backend that needs only the pool."""

    class Backend(CpuPagedAttention):
        def __init__(self, pool: torch.Tensor) -> None:
            super().__init__(pool, kernels(pool.shape[-1], pool.dtype))

    return Backend


def only(case: AttentionCase, row: int, tokens: slice) -> AttentionCase:
    """A case with one sequence of this one."""
    part = slice(row, row + 1)
    batch = case.batch
    alone = AttentionBatch(
        num_decodes=int(row < batch.num_decodes),
        query_lens=batch.query_lens[part],
        seq_lens=batch.seq_lens[part],
        block_tables=batch.block_tables[part],
        slot_blocks=batch.slot_blocks[tokens],
        slot_offsets=batch.slot_offsets[tokens],
    )
    query, key, value = case.query[tokens], case.key[tokens], case.value[tokens]
    return replace(case, batch=alone, query=query, key=key, value=value)


# ---- how it is built, tested through an engine


@pytest.fixture
def compiler_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each run of the compiler, which does not optimize; the cache is empty."""
    runs = tmp_path / "runs"
    runs.touch()
    token_picker()  # its code, which has nothing to do with attention, is compiled before
    use_compiler(tmp_path, monkeypatch, f'echo run >> "{runs}"\nexec c++ "$@" -O0')
    return runs


def use_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def greedy_tokens(folder: Path, prompt: list[int], attention_backend: str = "auto") -> list[int]:
    """Starts an engine and returns its greedy tokens."""
    llm = LLM(
        str(folder),
        multiprocess=False,
        max_model_len=128,
        num_gpu_blocks_override=32,
        attention_backend=attention_backend,
    )
    try:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)
    finally:
        llm.close()


def test_it_is_compiled_once(
    model_folders: ModelFolders, compiler_runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start compiles, the second loads from the cache; both log it and give the right tokens."""
    folder, prompt = model_folders("qwen3"), random_tokens(30, seed=1)
    expected = Reference(folder).greedy(prompt, 8)
    with caplog.at_level(logging.INFO, SELECTION_LOGGER):
        for _ in range(2):
            assert greedy_tokens(folder, prompt) == expected
    assert compiler_runs.read_text() == "run\n"
    said = [record.getMessage() for record in caplog.records if record.name == SELECTION_LOGGER]
    assert said == ["Using the compiled CPU attention kernel."] * 2


def test_it_can_be_switched_off(model_folders: ModelFolders, compiler_runs: Path) -> None:
    """With attention_backend torch no compiler runs, and tokens are the same; unknown names are refused."""
    folder, prompt = model_folders("qwen3"), random_tokens(30, seed=1)
    tokens = greedy_tokens(folder, prompt, attention_backend="torch")
    assert tokens == Reference(folder).greedy(prompt, 8)
    assert compiler_runs.read_text() == ""
    with pytest.raises(ConfigError, match="attention_backend must be one of auto, torch"):
        greedy_tokens(folder, prompt, attention_backend="magic")


@pytest.mark.parametrize("script", ["echo 'error: no such CPU' >&2; exit 1", "exit 0"])
def test_a_broken_compiler_costs_a_log_line(
    script: str,
    model_folders: ModelFolders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the compiler fails or writes nothing, the engine starts with torch: one log line, right tokens."""
    use_compiler(tmp_path, monkeypatch, script)
    folder, prompt = model_folders("qwen3"), random_tokens(30, seed=1)
    assert greedy_tokens(folder, prompt) == Reference(folder).greedy(prompt, 8)
    [line] = [record.getMessage() for record in caplog.records if record.name == SELECTION_LOGGER]
    assert line.startswith("CPU kernels unavailable (")


def test_without_a_compiler_there_is_torch(
    model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without a compiler serves the same tokens and logs what is missing."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    folder, prompt = model_folders("qwen3"), random_tokens(30, seed=1)
    assert greedy_tokens(folder, prompt) == Reference(folder).greedy(prompt, 8)
    assert "no C++ compiler found (no-such-compiler)" in caplog.text


def test_builders_at_once_do_not_disturb_each_other(compiler_runs: Path, tmp_path: Path) -> None:
    """Concurrent starts all get their kernel, compile it once, and leave one file behind."""
    with ThreadPoolExecutor(2) as pool:
        kernels = list(pool.map(lambda _: CpuKernel.load(8, torch.float32), range(2)))
    assert len(kernels) == 2
    assert [path.suffix for path in (tmp_path / "cache" / "continuum").iterdir()] == [".so"]
    assert compiler_runs.read_text() == "run\n"


def test_a_damaged_file_in_the_cache_is_built_anew(
    compiler_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be loaded is replaced, once."""
    CpuKernel.load(8, torch.float32)
    [built] = (tmp_path / "cache" / "continuum").iterdir()
    damaged = tmp_path / "other" / "continuum" / built.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    for _ in range(2):
        CpuKernel.load(8, torch.float32)
    assert compiler_runs.read_text() == "run\n" * 2


def test_a_cache_that_cannot_be_written_is_done_without(compiler_runs: Path, tmp_path: Path) -> None:
    """Each start then compiles its own kernel and leaves nothing behind."""
    (tmp_path / "cache").write_text("not a folder")
    for _ in range(2):
        CpuKernel.load(8, torch.float32)
    assert compiler_runs.read_text() == "run\n" * 2


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.float16), (100, torch.float32)])
def test_what_it_cannot_do_is_said(head_dim: int, dtype: torch.dtype) -> None:
    """Unsupported types and sizes are refused before anything is compiled."""
    with pytest.raises(KernelUnavailable, match=f"head size {head_dim}"):
        CpuKernel.load(head_dim, dtype)
