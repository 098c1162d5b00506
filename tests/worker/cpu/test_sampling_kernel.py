"""The compiled sampling kernel draws the tokens that torch draws, for any parameters and vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.records.sampling_params import SamplingParams
from engine.worker.cpu import sampling_kernel
from engine.worker.cpu.rank_sampler import select_sampler
from engine.worker.cpu.sampling_kernel import CompiledPicker, token_picker
from engine.worker.parallel.group import ALONE
from engine.worker.sampler import Picked, TorchPicker
from engine.worker.sampling_batch import SamplingBatch, SamplingTable

MAX_HISTORY = 60
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 1, 2, 20, 300, 5000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
)


def batch_of(
    all_params: list[SamplingParams], vocab_size: int, seed: int
) -> tuple[SamplingBatch, np.ndarray]:
    """A batch with prompts and outputs of random lengths, and the tokens of all."""
    random = np.random.default_rng(seed)
    table = SamplingTable(len(all_params), vocab_size)
    history = random.integers(0, vocab_size, (len(all_params), MAX_HISTORY))
    num_tokens = random.integers(2, MAX_HISTORY, len(all_params))
    for row, params in enumerate(all_params):
        table.set_row(row, params, int(random.integers(1, num_tokens[row])))
    rows = random.permutation(len(all_params))
    return table.batch(rows, num_tokens[rows]), history


def both(
    logits: torch.Tensor, batch: SamplingBatch, history: np.ndarray, draws: np.ndarray
) -> tuple[Picked, Picked]:
    compiled = token_picker()
    assert isinstance(compiled, CompiledPicker)
    return compiled.pick(logits, batch, history, draws), TorchPicker().pick(
        logits.clone(), batch, history, draws
    )


@settings(max_examples=60, deadline=None)
@given(
    all_params=st.lists(PARAMS, min_size=1, max_size=6),
    vocab_size=st.sampled_from([3, 64, 511, 513, 5000, 40_001]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    seed=st.integers(0, 2**32),
)
def test_the_kernel_draws_the_tokens_that_torch_draws(
    all_params: list[SamplingParams], vocab_size: int, spread: float, seed: int
) -> None:
    """Except where a draw falls within a rounding error of the border between two tokens."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(all_params), vocab_size, generator=random) * spread
    batch, history = batch_of(all_params, vocab_size, seed)
    draws = np.random.default_rng(seed).random(len(all_params))
    compiled, plain = both(logits, batch, history, draws)
    assert compiled.best == pytest.approx(plain.best, rel=1e-5, abs=1e-6)
    nudged = [both(logits, batch, history, np.clip(draws + by, 0, 1 - 1e-9))[1] for by in (-1e-4, 1e-4)]
    possible = np.stack([plain.token_ids, *(each.token_ids for each in nudged)])
    between = (possible.min(axis=0) <= compiled.token_ids) & (compiled.token_ids <= possible.max(axis=0))
    assert between.all()


def test_a_seed_draws_the_same_tokens_with_and_without_a_compiler() -> None:
    """Of 640 draws over a vocabulary of usual size, hardly any falls on such a border."""
    vocab_size = 40_001
    kinds = (
        SamplingParams(),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.9),
    )
    params = [*kinds, SamplingParams(top_k=20, top_p=0.95)] * 32
    logits = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(7)) * 3
    batch, history = batch_of(params, vocab_size, seed=7)
    num_equal = 0
    for seed in range(4):
        compiled, plain = both(logits, batch, history, np.random.default_rng(seed).random(len(params)))
        num_equal += int((compiled.token_ids == plain.token_ids).sum())
    assert num_equal >= 636


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_type_and_layout_of_logits(dtype: torch.dtype) -> None:
    """Rows may be part of longer ones; the logits are not changed."""
    whole = (torch.randn(6, 700, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    batch, history = batch_of([SamplingParams(top_k=40, top_p=0.9)] * 3, 600, seed=2)
    draws = np.array([0.1, 0.5, 0.9])
    for logits in (whole[:3, :600], whole[::2, 100:], whole.t().contiguous().t()[:3, :600]):
        before = logits.clone()
        compiled, plain = both(logits, batch, history, draws)
        assert compiled.token_ids.tolist() == plain.token_ids.tolist()
        assert torch.equal(before, logits)


def test_the_number_of_threads_changes_nothing() -> None:
    logits = torch.randn(9, 3000, generator=torch.Generator().manual_seed(1))
    batch, history = batch_of(
        [SamplingParams(top_p=0.9), SamplingParams(min_p=0.1), SamplingParams()] * 3, 3000, 1
    )
    draws = np.random.default_rng(0).random(9)
    tokens = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        tokens.append(token_picker().pick(logits, batch, history, draws).token_ids.tolist())
    torch.set_num_threads(2)
    assert tokens[0] == tokens[1] == tokens[2]


def test_without_a_compiler_torch_draws(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(sampling_kernel, "_compiled_picker", sampling_kernel._compiled_picker.__wrapped__)
    assert isinstance(token_picker(), TorchPicker)
    assert "no C++ compiler found (no-such-compiler)" in caplog.text


@pytest.mark.parametrize(("device", "may_compile"), [("cuda", True), ("cpu", False)])
def test_torch_draws_on_other_devices_and_where_nothing_is_to_be_compiled(
    device: str, may_compile: bool
) -> None:
    sampler = select_sampler(0, ALONE, torch.device(device), may_compile=may_compile)
    assert isinstance(sampler._picker, TorchPicker)
    compiled = select_sampler(0, ALONE, torch.device("cpu"), may_compile=True)
    assert isinstance(compiled._picker, CompiledPicker)
