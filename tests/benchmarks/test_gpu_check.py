"""Promises of ``make gpu-check``: its floors are the published ones, it reports a missing GPU, and on a CPU
it runs completely at toy sizes and writes a file that can be parsed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.gpu.command import NO_GPU, TOY_NOTE, main
from benchmarks.gpu.floors import Floors, Rates
from benchmarks.gpu.goals import DECODE, IDLE, THROUGHPUT
from benchmarks.gpu.measures.throughput import made_work
from benchmarks.gpu.record import DONE, SKIPPED, Check, Figure, Report
from benchmarks.gpu.sections import NAMES
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_06B
from benchmarks.gpu.timeline import Span, idle_of

H200 = Rates(
    copy_bytes_s=4.3e12, matmul_flop_s=790e12, host_to_device_bytes_s=50e9, device_to_host_bytes_s=50e9
)
LLAMA = Floors(LLAMA_8B, H200)


@pytest.mark.parametrize(
    ("batch", "context", "step_ms", "tokens_s"),
    [
        (1, 4096, "3.62", "277"),
        (1, 16384, "3.99", "251"),
        (32, 4096, "7.49", "4275"),
        (32, 16384, "19.5", "1643"),
        (128, 4096, "19.5", "6574"),
        (128, 16384, "67.4", "1899"),
        (256, 4096, "36.8", "6952"),
        (256, 16384, "132.7", "1929"),
    ],
)
def test_decode_floors_are_those_published(batch: int, context: int, step_ms: str, tokens_s: str) -> None:
    """Decode floors of Llama-3.1-8B on an H200 equal the published ones to each digit."""
    floor_s = LLAMA.decode_s([context] * batch)
    assert rounded_like(1e3 * floor_s, step_ms) == step_ms
    assert rounded_like(batch / floor_s, tokens_s) == tokens_s


@pytest.mark.parametrize(
    ("new", "cached", "tera_flop", "floor_ms"),
    [
        (2048, 0, "29.7", "37.6"),
        (8192, 0, "132", "167"),
        (16384, 0, "299", "379"),
        (32768, 0, "739", "935"),
        (2048, 8192, "38", "49"),
        (2048, 32768, "65", "82"),
        (2048, 131072, "170", "216"),
    ],
)
def test_prefill_floors_are_those_published(new: int, cached: int, tera_flop: str, floor_ms: str) -> None:
    assert rounded_like(LLAMA.prefill_flop(new, cached) / 1e12, tera_flop) == tera_flop
    assert rounded_like(1e3 * LLAMA.prefill_s(new, cached), floor_ms) == floor_ms


@pytest.mark.parametrize(("batch", "step_ms"), [(1, "0.29"), (32, "0.79"), (256, "4.5")])
def test_floors_of_the_small_model_are_those_published(batch: int, step_ms: str) -> None:
    """Decode floors of the small model at 600 tokens per sequence equal the published ones."""
    assert rounded_like(1e3 * Floors(QWEN_06B, H200).decode_s([600] * batch), step_ms) == step_ms


def rounded_like(value: float, published: str) -> str:
    return f"{value:.{len(published.partition('.')[2])}f}"


def test_a_generation_takes_its_prompts_and_its_steps() -> None:
    """The floor of a generation is its prefills plus its decode steps; one request ends earlier."""
    expected_s = LLAMA.prefill_s(10) + LLAMA.prefill_s(20) + LLAMA.decode_s([11, 21]) + LLAMA.decode_s([22])
    assert LLAMA.generation_s([(10, 2), (20, 3)]) == pytest.approx(expected_s)


def test_the_requests_are_those_of_the_published_benchmark() -> None:
    """The requests are those of nano-vllm's README: 256 requests, 133,966 output tokens."""
    work = made_work(256, 100, 1024, QWEN_06B.vocab_size)
    assert (len(work.prompts), work.total_outputs) == (256, 133_966)


def test_a_share_is_of_the_floor_whichever_way_is_better() -> None:
    slow = Figure.of("step", "ms", [5.0, 4.0, 6.0], floor=4.0, goal=DECODE[1])
    assert (slow.minimum, slow.median, slow.maximum, slow.share_of_floor, slow.met) == (4, 5, 6, 0.8, True)
    rate = Figure.of("requests", "tok/s", [19_000.0], floor=38_000.0, goal=THROUGHPUT)
    assert (rate.share_of_floor, rate.met) == (0.5, False)
    assert Figure.of("idle", "%", [3.1], goal=IDLE).met is False


def test_a_check_without_a_number_fails() -> None:
    assert not Check.of("kernel", float("nan"), 0.1).passed
    assert not Check.of("kernel", 0.2, 0.1).passed
    assert Check.of("kernel", 0.1, 0.1).passed


def test_a_device_waits_where_no_work_of_it_overlaps() -> None:
    """Of ten milliseconds the device is idle for three, of which two microseconds are between kernels."""
    spans = [Span(0.0, 0.004), Span(0.001, 0.002), Span(0.004002, 0.005), Span(0.007998, 0.010)]
    idle = idle_of(spans)
    assert idle.total == pytest.approx(0.3)
    assert idle.waiting == pytest.approx(0.2998)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NO_GPU
    told = capsys.readouterr().err
    assert told == "There is no GPU that torch can see; --device cpu checks the command itself.\n"


def test_what_no_time_is_left_for_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sections without time left are reported as skipped, and a run without correctness checks fails."""
    out = tmp_path / "gpu.json"
    assert main(["--device", "cpu", "--budget-s", "1", "--json", str(out)]) == 1
    report = read(out)
    assert [section.name for section in report.sections] == list(NAMES)
    assert {section.status for section in report.sections} == {SKIPPED}
    assert "kernels: skipped: 1 s of the budget were left." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)  # other tests take the cores, too
def test_all_sections_run_at_toy_sizes(tmp_path: Path) -> None:
    """The whole command runs in Triton's interpreter: all checks pass, no section is skipped."""
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = read(out)
    assert report.machine.toy_sizes
    assert report.note == TOY_NOTE
    assert TOY_NOTE in done.stdout
    assert [(section.name, section.status) for section in report.sections] == [(name, DONE) for name in NAMES]
    for section in report.sections:
        assert all(check.passed for check in section.checks)
        assert not section.skipped
        assert all(min(figure.values) > 0 for figure in section.figures)
    table = [figure for section in report.sections for figure in section.figures if figure.goal]
    assert len(table) == 7, [figure.name for figure in table]
    assert all(figure.met is not None for figure in table)


def read(path: Path) -> Report:
    """Decodes a report; raises if a field is missing or has another type."""
    return msgspec.json.decode(path.read_bytes(), type=Report)
