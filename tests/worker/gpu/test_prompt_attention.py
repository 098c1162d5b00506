"""Prompts by kernels of others: how each is called is proved by numbers, in stand-ins of the same form."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from engine.worker.gpu.prompt_attention import (
    FastPromptAttention,
    PromptAttention,
    select_prompt_attention,
)
from engine.worker.gpu.prompt_paths import flashinfer_ragged
from engine.worker.gpu.prompt_paths.flashinfer_ragged import FlashInferRagged
from engine.worker.gpu.prompt_paths.gathered import GatheredPrompts, GatherScratch, gather_pages
from engine.worker.gpu.prompt_paths.path import AttentionKind, Prompts
from engine.worker.gpu.prompt_paths.probe import ProvenPath
from engine.worker.gpu.prompt_paths.two_parts import TwoParts, cudnn_attention, merge, padding, portions
from engine.worker.gpu.step_batch import PromptChunk, StepBatch
from engine.worker.gpu.streams import HostStreams, Mark
from engine.worker.gpu.triton_gather import _gather_pages, gather_pages_fused
from tests.worker.attention_reference import (
    BLOCK_SIZE,
    HEAD_DIM,
    LAYER,
    NUM_HEADS,
    AttentionCase,
    make_case,
    reference_output,
    with_stale_blocks,
)
from tests.worker.gpu import stand_ins
from tests.worker.gpu.sm90 import KernelBuild, compile_all_for_sm90

NUM_KV_HEADS = 2
LENGTHS = ((1, 9), (1, 30), (5, 5), (7, 60), (16, 16), (3, 41))
"""Pairs (query, sequence) of lengths: two decodes before the prompts."""
NUM_DECODES = 2
SCALE = HEAD_DIM**-0.5
FULL = AttentionKind(SCALE, None, None)


def step_batch(case: AttentionCase) -> StepBatch:
    batch = case.batch
    query_lens = batch.query_lens.tolist()
    starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    return StepBatch(
        rows=torch.arange(len(query_lens), dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.from_numpy(batch.seq_lens).int(),
        block_tables=torch.from_numpy(batch.block_tables).int(),
        positions=torch.empty(0, dtype=torch.int64),
        slots=torch.from_numpy(batch.slot_blocks * BLOCK_SIZE + batch.slot_offsets),
        num_uniform=batch.num_decodes,
        uniform_len=1,
        max_uniform_seq_len=30,
        prompts=tuple(
            PromptChunk(seq, starts[seq], query_lens[seq], int(batch.seq_lens[seq]))
            for seq in range(batch.num_decodes, len(query_lens))
        ),
    )


@pytest.fixture
def case() -> AttentionCase:
    """A step whose keys and values are in the pool."""
    made = make_case(num_kv_heads=NUM_KV_HEADS, dtype=torch.float32, lengths=LENGTHS)
    for which, new in enumerate((made.key, made.value)):
        made.pool[made.batch.slot_blocks, LAYER, which, made.batch.slot_offsets] = new
    return made


class Floor:
    """A PromptAttention that shows that it was called."""

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.full_like(query, torch.inf)


FLOOR = Floor()


def run(
    attention: PromptAttention,
    case: AttentionCase,
    window: int | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
    batch: StepBatch | None = None,
) -> torch.Tensor:
    heads_first = case.query[NUM_DECODES:].transpose(0, 1).contiguous()  # like transformers' code
    return attention.attend(
        case.pool[:, LAYER, 0],
        case.pool[:, LAYER, 1],
        heads_first.transpose(0, 1),
        batch or step_batch(case),
        scale=SCALE,
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
    )


def select(case: AttentionCase, min_query_tokens: int = 1) -> PromptAttention:
    chosen = select_prompt_attention(
        case.pool, torch.float32, 128, 1.0, FLOOR, min_query_tokens=min_query_tokens
    )
    assert chosen is FLOOR or isinstance(chosen, FastPromptAttention)
    return chosen


def expected(case: AttentionCase, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
    """The prompts' results in fp64."""
    return reference_output(case, window, soft_cap)[NUM_DECODES:]


def is_by_floor(output: torch.Tensor) -> bool:
    return bool(output.isinf().all())


def flash_modules(
    interface: str, config: str, function: Callable[..., object], **flags: bool
) -> list[ModuleType]:
    named = {f"FLASHATTENTION_DISABLE_{flag}": value for flag, value in flags.items()}
    return [
        stand_ins.module(interface, flash_attn_varlen_func=function),
        stand_ins.module(config, CONFIG={"build_flags": named}),
    ]


INSTALLED: dict[str, list[ModuleType]] = {
    "full FlashAttention-3": flash_modules(
        "flash_attn_interface",
        "flash_attn_config",
        stand_ins.flash_attn_varlen_func,
        LOCAL=False,
        SOFTCAP=False,
    ),
    "its forward kernels, without windows": flash_modules(
        "fa3_fwd_interface", "fa3_fwd_config", stand_ins.flash_attn_varlen_func, LOCAL=True, SOFTCAP=False
    ),
    "FlashInfer": [
        stand_ins.module(
            "flashinfer",
            BatchPrefillWithRaggedKVCacheWrapper=stand_ins.BatchPrefillWithRaggedKVCacheWrapper,
        )
    ],
}


def install(monkeypatch: pytest.MonkeyPatch, modules: list[ModuleType]) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(params=[*INSTALLED, "torch's own"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Installs one library and no other."""
    name: str = request.param
    install(monkeypatch, INSTALLED.get(name, []))
    if name not in INSTALLED:
        monkeypatch.setattr(varlen, "varlen_attn", stand_ins.varlen_attn)
    return name


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (6, None), (None, 2.0)])
def test_library_attends_or_leaves_it_to_the_floor(
    window: int | None, soft_cap: float | None, installed: str, case: AttentionCase
) -> None:
    output = run(select(case), case, window, soft_cap)
    cannot = {"its forward kernels, without windows": window, "torch's own": soft_cap}
    if cannot.get(installed) is not None:
        assert is_by_floor(output)
    else:
        torch.testing.assert_close(output.double(), expected(case, window, soft_cap), rtol=0, atol=2e-6)


def test_what_one_library_cannot_do_the_next_one_does(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, INSTALLED["its forward kernels, without windows"])
    monkeypatch.setattr(varlen, "varlen_attn", stand_ins.varlen_attn)
    attention = select(case)
    for window, soft_cap in ((None, None), (6, None), (None, 2.0)):
        output = run(attention, case, window, soft_cap)
        torch.testing.assert_close(output.double(), expected(case, window, soft_cap), rtol=0, atol=2e-6)
    assert is_by_floor(run(attention, case, 6, 2.0))


def test_with_no_library_the_floor_is_all_there_is(case: AttentionCase) -> None:
    assert select(case) is FLOOR


def test_library_that_is_wrong_is_left_alone_and_that_is_said(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def top_left(*arguments: object, **named: torch.Tensor) -> torch.Tensor:
        return stand_ins.flash_attn_varlen_func(**(named | {"causal": False}))  # type: ignore[arg-type]

    install(monkeypatch, flash_modules("flash_attn_interface", "flash_attn_config", top_left, LOCAL=True))
    with caplog.at_level(logging.WARNING):
        assert select(case) is FLOOR
    assert "FlashAttention-3 is off by" in caplog.text


def test_library_that_is_wrong_is_seen_over_small_numbers_of_8_bits(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers in such a pool are a hundredth of those that are compared."""

    def full(*arguments: object, **named: torch.Tensor) -> torch.Tensor:
        return stand_ins.flash_attn_varlen_func(**(named | {"causal": False}))  # type: ignore[arg-type]

    pool = case.pool.to(torch.float8_e4m3fn)
    for function, is_right in ((stand_ins.flash_attn_varlen_func, True), (full, False)):
        install(monkeypatch, flash_modules("flash_attn_interface", "flash_attn_config", function))
        chosen = select_prompt_attention(pool, torch.float32, 128, 0.01, FLOOR)
        assert (chosen is not FLOOR) == is_right


def test_library_that_is_called_in_another_way_is_left_alone(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", stand_ins.varlen_attn_without_pages)
    assert select(case) is FLOOR


def test_library_that_cannot_be_imported_is_left_alone(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "flashinfer":
                raise OSError("libcudart.so.99: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert select(case) is FLOOR


def test_short_prompts_are_the_floor_s(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, INSTALLED["full FlashAttention-3"])
    assert is_by_floor(run(select(case, min_query_tokens=8), case))
    assert not is_by_floor(run(select(case, min_query_tokens=7), case))


def test_layers_with_chunks_are_the_floor_s(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries have no such mask."""
    install(monkeypatch, INSTALLED["full FlashAttention-3"])
    assert is_by_floor(run(select(case), case, chunk=16))


def test_flashinfer_plans_once_for_the_layers_of_a_step(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, INSTALLED["FlashInfer"])
    attention, batch = select(case), step_batch(case)
    before = stand_ins.BatchPrefillWithRaggedKVCacheWrapper.num_plans
    for window in (None, None, 6, None, 6):
        run(attention, case, window, batch=batch)
    assert stand_ins.BatchPrefillWithRaggedKVCacheWrapper.num_plans == before + 2
    run(attention, case)
    assert stand_ins.BatchPrefillWithRaggedKVCacheWrapper.num_plans == before + 3


class PlanOnItsWay(HostStreams):
    """A queue that copies a plan only when someone waits for it."""

    is_copied = True

    def mark(self) -> Mark:
        self.is_copied = False
        return self

    def synchronize(self) -> None:
        self.is_copied = True


def test_flashinfer_plans_anew_once_the_plan_before_has_left_the_host(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = PlanOnItsWay()

    class Wrapper(stand_ins.BatchPrefillWithRaggedKVCacheWrapper):
        def plan(self, *arguments: Any, **named: Any) -> None:
            assert queue.is_copied
            super().plan(*arguments, **named)

    monkeypatch.setattr(flashinfer_ragged, "streams_of", lambda device: queue)
    path = GatheredPrompts(
        FlashInferRagged(Wrapper, case.pool.device), GatherScratch(case.pool, torch.float32, 66)
    )
    attention = FastPromptAttention([ProvenPath(path, True, True)], FLOOR, 66, min_query_tokens=1)
    for _ in range(2):
        torch.testing.assert_close(run(attention, case).double(), expected(case), rtol=0, atol=2e-6)


class RecordedKernel(TwoParts):
    """A DenseKernel that records how many tokens of KV it gets at a time."""

    def __init__(self) -> None:
        super().__init__(flash_on_cpu)
        self.gathered: list[int] = []

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prompts: Prompts,
        kind: AttentionKind,
    ) -> torch.Tensor:
        self.gathered.append(len(key))
        return super().attend(query, key, value, prompts, kind)


def flash_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A DenseAttention of the CPU. Like cuDNN's, it has a causal mask for squares only."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert not causal or query.shape[2] == key.shape[2]
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return output, log_sum


def test_prompts_are_gathered_in_groups_that_fit(case: AttentionCase) -> None:
    kernel = RecordedKernel()
    path = GatheredPrompts(kernel, GatherScratch(case.pool, torch.float32, 66))
    attention = FastPromptAttention([ProvenPath(path, False, False)], FLOOR, 66, min_query_tokens=1)
    torch.testing.assert_close(run(attention, case).double(), expected(case), rtol=0, atol=2e-6)
    assert kernel.gathered == [5 + 60, 16 + 41]


@pytest.mark.parametrize("cached_step", [1, 8, 32, 1024])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_two_parts_merged_are_the_whole(num_kv_heads: int, cached_step: int) -> None:
    case = make_case(num_kv_heads=num_kv_heads, dtype=torch.float32, lengths=LENGTHS[NUM_DECODES:])
    key, value = (torch.cat(parts) for parts in zip(*case.sequences, strict=True))
    batch = step_batch(case)
    kernel = TwoParts(flash_on_cpu, cached_step, query_step=4)
    output = kernel.attend(case.query, key, value, Prompts.of(batch, batch.prompts), FULL)
    torch.testing.assert_close(output.double(), reference_output(case, None), rtol=0, atol=2e-6)


def test_cudnn_is_not_given_what_it_would_misread() -> None:
    query = torch.zeros(1, 1, 4, 64)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        cudnn_attention(query, query, query, True, 1.0)


def test_two_parts_ask_for_few_sizes() -> None:
    """A kernel may plan for each size: steps of 16 cached and 8 query tokens leave these."""
    sizes = set()

    def recorded(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.add((query.shape[2], key.shape[2], causal))
        return flash_on_cpu(query, key, value, causal, scale)

    lengths = tuple((5, 5 + context) for context in range(48))
    case = make_case(num_kv_heads=NUM_HEADS, dtype=torch.float32, lengths=lengths)
    key, value = (torch.cat(parts) for parts in zip(*case.sequences, strict=True))
    batch = step_batch(case)
    TwoParts(recorded, 16, 8).attend(case.query, key, value, Prompts.of(batch, batch.prompts), FULL)
    squares = {(rows, rows, True) for rows in (8, 16, 24)}
    assert sizes == squares | {(8, cached, False) for cached in (16, 32)}


def test_merge_takes_nothing_from_a_part_that_weighs_nothing() -> None:
    first, second = torch.randn(2, 3, 4, 8)
    light, heavy = torch.full((3, 4), -200.0), torch.full((3, 4), 30.0)
    torch.testing.assert_close(merge((first, light), (second, heavy)), (second, heavy))
    both = (first + second) / 2, heavy + math.log(2)
    torch.testing.assert_close(merge((first, heavy), (second, heavy)), both)


def test_sizes_that_kernels_plan_for_are_few_however_long_prompts_are() -> None:
    """The parts cover all cached tokens, none twice; at most a quarter of the queries are padding."""
    cached, rows = set(), set()
    for num_tokens in range(0, 131_072, 1024):
        parts = list(portions(num_tokens, 1024))
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert sum(part.stop - part.start for part in parts) == num_tokens
        cached |= {part.stop - part.start for part in parts}
    for num_rows in range(512, 32_769):
        more = padding(num_rows, 256)
        assert more < max(256, num_rows / 4)
        rows.add(num_rows + more)
    assert len(cached) == 7
    assert len(rows) <= 25


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float8_e4m3fn])
def test_kernel_gathers_what_the_twin_does_and_that_is_the_sequences(
    pool_dtype: torch.dtype, case: AttentionCase
) -> None:
    batch, pool, scale = step_batch(case), case.pool.to(pool_dtype), 0.5
    prompts = Prompts.of(batch, batch.prompts)
    total = int(prompts.kv_starts[-1])
    results = []
    for gather in (gather_pages, gather_pages_fused):
        dense = torch.full((2, total, NUM_KV_HEADS, HEAD_DIM), torch.nan)
        gather(pool[:, LAYER, 0], pool[:, LAYER, 1], prompts, dense[0], dense[1], scale, None)
        results.append(dense)
    sequences = [torch.cat(parts) for parts in zip(*case.sequences[NUM_DECODES:], strict=True)]
    if pool_dtype != torch.float32:
        sequences = [x.to(pool_dtype).float() * scale for x in sequences]
    for dense in results:
        assert torch.equal(dense, torch.stack(sequences))


def test_what_lies_before_a_window_may_be_anything(installed: str, case: AttentionCase) -> None:
    """Pages that went to another sequence, with NaN, are not read."""
    if installed == "its forward kernels, without windows":
        pytest.skip("it leaves windows to the floor")
    output = run(select(case), with_stale_blocks(case, 6), 6)
    torch.testing.assert_close(output.double(), expected(case, 6), rtol=0, atol=2e-6)


@pytest.mark.slow
def test_gather_of_real_sizes_compiles_for_a_hopper_gpu_and_stays_in_registers() -> None:
    builds = [
        KernelBuild(
            _gather_pages,
            {
                "keys": f"*{pool}:16",
                "values": f"*{pool}:16",
                "key": "*bf16:16",
                "value": "*bf16:16",
                "block_tables": "*i32:16",
                "kv_starts": "*i32:16",
                "query_starts": "*i32:16",
                "block_stride": "i64:16",
                "place_stride": "i32:16",
                "table_stride": "i32",
                "kv_scale": "fp32",
            },
            {"WINDOW": window, "BLOCK_SIZE": 16, "ROW": 1024, "ROW_BLOCK": 1024, "TOKENS_EACH": 8},
            num_warps=8,
        )
        for pool in ("bf16", "fp8e4nv")
        for window in (0, 128)
    ]
    for build, resources in zip(builds, compile_all_for_sm90(builds), strict=True):
        assert resources.spill_bytes == 0, build
        assert resources.registers <= 128, build
