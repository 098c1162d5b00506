"""Weights in bf16 in the compiled code's layout: no number is lost, and they are on large pages."""

from __future__ import annotations

import platform
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.worker import memory
from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_weights import (
    PackedEmbedding,
    interleaved_embedding,
    interleaved_linear,
)
from engine.worker.memory import empty_pages, use_huge_pages
from engine.worker.models.linears import Embedding

LARGE_PAGE = 2**21
LARGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16()


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [0, 1, 6, 7, 8, 12, 13, 17, 33, 64, 65, 300])
def test_a_product_is_the_plain_one(num_rows: int, compiled: CompiledGemm) -> None:
    """Products are right for any number of rows, with and without bias, for outputs that fill no block, and
    for rows laid out in several parts."""
    for num_outputs, num_inputs in ((64, 256), (200, 1056), (1003, 96), (2500, 64)):
        for bias in (True, False):
            plain = nn.Linear(num_inputs, num_outputs, bias=bias, dtype=torch.bfloat16)
            x = random_bf16(num_rows, num_inputs)
            exact = x.double() @ plain.weight.double().T
            if plain.bias is not None:
                exact += plain.bias.double()
            found = interleaved_linear(plain, compiled)(x)
            torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=1e-2)


@torch.inference_mode()
@pytest.mark.parametrize("num_vectors", [64, 1003, 5003])
def test_a_table_is_still_a_table(num_vectors: int, compiled: CompiledGemm) -> None:
    """Each vector is looked up bit for bit, and multiplied."""
    weight = random_bf16(num_vectors, 96)
    table = interleaved_embedding(Embedding(nn.Parameter(weight, requires_grad=False)), compiled)
    assert isinstance(table, PackedEmbedding)
    ids = torch.arange(num_vectors).flip(0)
    assert torch.equal(table(ids), weight[ids])
    exact = weight[:5].double() @ weight.double().T
    torch.testing.assert_close(table.logits(weight[:5]).double(), exact, rtol=2e-2, atol=1e-2)


def test_inputs_that_fill_no_word_stay_plain(compiled: CompiledGemm) -> None:
    plain = nn.Linear(48, 64, dtype=torch.bfloat16)
    table = Embedding(nn.Parameter(random_bf16(64, 48), requires_grad=False))
    assert interleaved_linear(plain, compiled) is plain
    assert interleaved_embedding(table, compiled) is table


@pytest.mark.slow
def test_large_pages_hold_what_small_ones_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors keep their numbers, whether they are a multiple of a large page, not a multiple, or smaller."""
    monkeypatch.setattr(memory, "BACKGROUND_DELAY_S", 0.0)
    numbers = [LARGE_PAGE, 3 * LARGE_PAGE + 4096, LARGE_PAGE // 2]
    tensors = [empty_pages((number // 4,), torch.int32) for number in numbers]
    for tensor in tensors:
        assert tensor.data_ptr() % LARGE_PAGE == 0
        torch.arange(len(tensor), out=tensor)
    use_huge_pages(tensors)
    for thread in threading.enumerate():
        if thread.name == "large-pages":
            thread.join()
    for tensor in tensors:
        assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.int32))
    if not moves_to_large_pages():
        pytest.skip("this system moves nothing to large pages: it takes Linux 6.1")
    assert large_bytes_at(tensors[0].data_ptr()) >= LARGE_PAGE


def moves_to_large_pages() -> bool:
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    is_new = release is not None and tuple(map(int, release.groups())) >= (6, 1)
    return is_new and LARGE_PAGES_SETTING.exists() and "[never]" not in LARGE_PAGES_SETTING.read_text()


def large_bytes_at(address: int) -> int:
    """Bytes on large pages in the mapping that holds the address."""
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(encoding="ascii"))
    for mapping in mappings:
        begin, end = (int(part, 16) for part in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            (found,) = re.findall(r"AnonHugePages: +(\d+) kB", mapping)
            return int(found) * 1024
    raise AssertionError("no mapping has the address")
