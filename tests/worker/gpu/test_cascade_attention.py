"""Steps whose sequences share a prefix, by the kernels in Triton's interpreter: which of them use the pass,
and that no token depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.core.request import Request
from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.selection import resolve_attention
from engine.worker.gpu import backend, triton_paged
from engine.worker.gpu.graph_sizes import GraphSizes
from engine.worker.gpu.step_batch import StepBatch
from engine.worker.gpu.torch_ops import TorchOps
from engine.worker.gpu.triton_attention import attend_prefix
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.gpu import device_engine
from tests.worker.gpu.device_engine import DeviceEngine, count_prefix_replays, count_replays
from tests.worker.test_several_groups import with_chunks

pytestmark = [pytest.mark.usefixtures("wide_tiles"), pytest.mark.slow]

SYSTEM = random_tokens(256, seed=1)
"""The shortest prefix that is worth a pass."""


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def prompts(number: int) -> list[list[int]]:
    return [SYSTEM + random_tokens(1 + i % 2, seed=10 + i) for i in range(number)]


def triton_llm(folder: Path, *, disable_cascade_attn: bool = False) -> LLM:
    return LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        attention_backend="triton",
        disable_cascade_attn=disable_cascade_attn,
        max_model_len=320,
        max_num_seqs=9,
        max_num_batched_tokens=320,
        num_gpu_blocks_override=200,
    )


def generated(folder: Path, asked: list[list[int]], *, disable_cascade_attn: bool = False) -> list[list[int]]:
    """Three tokens for each prompt, decoded together once the first prompt is cached."""
    with triton_llm(folder, disable_cascade_attn=disable_cascade_attn) as llm:
        llm.generate(asked[:1], greedy(1), use_tqdm=False)
        outputs = llm.generate(asked, greedy(3), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The number of sequences and the prefix's length in each pass over a prefix."""
    seen: list[tuple[int, int]] = []

    def counted(query: torch.Tensor, pages: object, batch: StepBatch, *rest: object) -> None:
        assert batch.prefix is not None
        seen.append((int((batch.prefix.lens > 0).sum()), int(batch.prefix.place[1])))
        attend_prefix(query, pages, batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_paged, "attend_prefix", counted)
    return seen


@pytest.fixture(autouse=True)
def _torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses torch between the GEMMs: the interpreter's time grows with the number of tokens."""
    for module in (backend, device_engine):
        monkeypatch.setattr(module, "select_ops", lambda device: TorchOps())


def test_tokens_are_those_of_transformers(model_folders: ModelFolders, passes: list[tuple[int, int]]) -> None:
    """Eight sequences that share a system prompt, and one that does not, are decoded together."""
    folder = model_folders("qwen3")
    asked = [*prompts(8), random_tokens(2, seed=2)]
    reference = Reference(folder)
    assert generated(folder, asked) == [reference.greedy(prompt, 3) for prompt in asked]
    assert set(passes) == {(8, 256)}


def test_some_layers_see_chunks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[tuple[int, int]]
) -> None:
    """In steps with a prefix, layers with chunks read their own chunks, and the other layers use the pass."""
    folder = make_model_folder(tmp_path, "qwen2", num_layers=2)
    with_chunks(monkeypatch, 20, None)
    wanted = generated(folder, prompts(8), disable_cascade_attn=True)
    assert not passes
    assert generated(folder, prompts(8)) == wanted
    assert passes == [(8, 256)] * 2


def test_models_without_a_layer_for_it_say_so(
    model_folders: ModelFolders, caplog: pytest.LogCaptureFixture
) -> None:
    """Where all layers have a window, or read latents, no prefix is searched."""
    for name in ("mistral-window", "deepseek-v2"):
        caplog.clear()
        with caplog.at_level("WARNING"), triton_llm(model_folders(name)):
            assert "Cascade attention is off: no layer" in caplog.text


NUMBERS = (6, *[3] * 8)
"""Output lengths of nine requests."""


def engine_with_prefixes(folder: Path, sizes: GraphSizes, **options: Any) -> DeviceEngine:
    return DeviceEngine(
        folder,
        graph_sizes=sizes,
        num_blocks=80,
        block_size=16,
        max_model_len=320,
        max_num_seqs=10,
        max_num_batched_tokens=320,
        kernels=True,
        prefix_groups=(0,),
        **options,
    )


def run_nine(engine: DeviceEngine) -> list[list[int]]:
    """The requests' tokens; the first prompt is computed before the others arrive."""
    for index, (prompt, number) in enumerate(zip(prompts(9), NUMBERS, strict=True)):
        engine.add(f"r{index}", prompt, greedy(number))
        if not index:
            engine.step()
    return list(engine.run().values())


def wanted_of_nine(folder: Path) -> list[list[int]]:
    reference = Reference(folder)
    return [reference.greedy(prompt, number) for prompt, number in zip(prompts(9), NUMBERS, strict=True)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of one layer and one KV head."""
    return make_model_folder(tmp_path_factory.mktemp("small"), "qwen3", num_layers=1, num_kv_heads=1)


def test_graphs_with_a_prefix(small: Path, passes: list[tuple[int, int]]) -> None:
    """Steps of eight or more sequences replay padded prefix graphs, smaller steps the usual ones."""
    engine = engine_with_prefixes(small, GraphSizes((2, 10)))
    assert set(engine.forward.prefix_graphs) == {(10, 1)}
    usual, with_prefix = count_replays(engine), count_prefix_replays(engine)
    passes.clear()
    assert run_nine(engine) == wanted_of_nine(small)
    assert set(usual) == {(2, 1)}
    assert with_prefix == [(10, 1)] * 2
    assert set(passes) == {(9, 256)}


@pytest.mark.parametrize("sizes", [GraphSizes((), 3), GraphSizes((10,), 3)], ids=["eager", "graphs"])
def test_drafts_behind_a_prefix(sizes: GraphSizes, small: Path, passes: list[tuple[int, int]]) -> None:
    """Drafts, right and wrong, attend to the prefix in the same pass, and change no token."""
    wanted = wanted_of_nine(small)

    def draft(request: Request) -> list[int]:
        number = int(request.request_id[1:])
        drafts = wanted[number][request.num_output_tokens :][:2]
        return drafts if number % 2 else [(token + 1) % 500 for token in drafts]

    engine = engine_with_prefixes(small, sizes, draft=draft, steps_in_flight=1)
    with_prefix = count_prefix_replays(engine)
    passes.clear()
    assert run_nine(engine) == wanted
    assert engine.num_drafts > engine.num_accepted > 0
    assert {length for _, length in passes} == {256}
    assert bool(with_prefix) == bool(sizes.sizes)


def test_only_triton_has_the_pass() -> None:
    """Another backend, which would ignore the option, refuses it."""
    model = ModelConfig(model="", device="cpu", attention_backend="torch", disable_cascade_attn=False)
    config = EngineConfig(model=model, cache=CacheConfig())
    with pytest.raises(ConfigError, match="disable_cascade_attn=False needs attention_backend triton"):
        resolve_attention(config, torch.device("cpu"))
