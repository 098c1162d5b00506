"""Block tables of several KV cache groups on the GPU backend, by the kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.records.kv_cache_groups import one_group
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.generation import Reference
from tests.worker.hand_plans import HandPlans
from tests.worker.test_other_attention import saved
from tests.worker.test_several_groups import (
    NATIVE,
    OTHERS,
    PROMPTS,
    groups_by_window,
    run_all,
    with_chunks,
)

pytestmark = pytest.mark.usefixtures("wide_tiles")
NUM_OUTPUTS = 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4", "gemma2", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Fused steps and transformers' code give the tokens although blocks that a window has left hold NaN."""
    if name in NATIVE:
        make_model_folder(tmp_path, **NATIVE[name])
    else:
        saved(tmp_path, name, **OTHERS[name])
    outputs = run_all(HandPlans(tmp_path, groups_by_window, attention="triton"), NUM_OUTPUTS)
    reference = Reference(tmp_path)
    for request, prompt in PROMPTS.items():
        assert outputs[request] == reference.greedy(prompt, NUM_OUTPUTS), request


@pytest.mark.slow
def test_fused_steps_attend_to_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of torch with one block table."""
    folder = make_model_folder(tmp_path, "qwen2", num_layers=4)
    with_chunks(monkeypatch, 20, None, 20, None)
    outputs = run_all(HandPlans(folder, groups_by_window, attention="triton"), NUM_OUTPUTS)
    by_torch = HandPlans(folder, lambda model: one_group(model.num_layers), attention="torch")
    assert outputs == run_all(by_torch, NUM_OUTPUTS)
