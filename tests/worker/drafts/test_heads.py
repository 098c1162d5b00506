"""Heads that draft from hidden states: their drafts, their loading, and the refused ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.speculative import SpeculativeConfig
from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.conftest import VARIANTS
from tests.worker.drafts.head_folders import (
    add_prediction_layer,
    random_eagle,
    random_eagle3,
    right_eagle,
    sharpen,
    silence,
)
from tests.worker.drafts.head_reference import (
    Reference,
    eagle3_reference,
    eagle_reference,
    prediction_reference,
)
from tests.worker.drafts.recorded_drafts import RecordingExecutor

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * seed + 3 * i) % 400 for i in range(20 + 9 * seed)] for seed in range(4)]
NUM_DRAFTS = 3

SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "torch": {"attention_backend": "torch"},
    "chunked prefill": {"max_num_batched_tokens": 16},
    "preemption": {"num_gpu_blocks_override": 12, "block_size": 16, "max_model_len": 128},
    "overlapping steps": {"async_scheduling": True},
}


def _llm(folder: Path, drafting: SpeculativeConfig | None, **options: Any) -> LLM:
    return LLM(
        folder,
        executor_factory=RecordingExecutor,
        multiprocess=False,
        device="cpu",
        speculative_config=drafting,
        **options,
    )


def _eagle(head: Path, method: str = "eagle") -> SpeculativeConfig:
    return SpeculativeConfig(
        method=method, model=str(head), num_speculative_tokens=NUM_DRAFTS, weigh_costs=False
    )


MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=NUM_DRAFTS, weigh_costs=False)


def _tokens(folder: Path, drafting: SpeculativeConfig | None, **options: Any) -> list[list[int]]:
    with _llm(folder, drafting, **options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return sharpen(make_model_folder(folder, num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2))


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "silent"
    made = make_model_folder(folder, num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2)
    return silence(sharpen(made))


def _with_prediction(path: Path, variant: str, *, right: bool) -> Path:
    wanted = VARIANTS[variant]
    extra = wanted["extra_config"] | {"num_nextn_predict_layers": 1}
    folder = sharpen(make_model_folder(path, **(wanted | {"extra_config": extra, "hidden_size": 64})))
    return add_prediction_layer(silence(folder) if right else folder, right=right)


def _drafts_are_those_of(reference: Reference, outputs: list[list[int]]) -> None:
    """Asserts that every draft of every step is the reference's."""
    record = RecordingExecutor.last.record
    prompt_of = {tuple(tokens): prompt for prompt, tokens in zip(PROMPTS, outputs, strict=True)}
    assert len(record.drafted) > 40
    for req_id, num_said, drafts in record.drafted:
        said = record.said[req_id]
        tokens = prompt_of[tuple(said)] + said[:num_said]
        assert drafts == reference.drafts(tokens, len(drafts)), (req_id, num_said)


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["plain", "torch", "chunked prefill", "preemption"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "glm4-moe", "deepseek-v3"])
def test_a_head_drafts_what_its_published_layers_draft(
    kind: str, setup: str, model: Path, tmp_path: Path
) -> None:
    """Drafts equal those of transformers' layers in fp32, at every step, and change no token."""
    if kind.startswith("eagle"):
        folder = model
        head = random_eagle(tmp_path / "head") if kind == "eagle" else random_eagle3(tmp_path / "head")
        reference = (eagle_reference if kind == "eagle" else eagle3_reference)(folder, head)
        drafting = _eagle(head, kind)
    else:
        folder = _with_prediction(tmp_path / "model", kind, right=False)
        reference, drafting = prediction_reference(folder), MTP
    plain = _tokens(folder, None, **SETUPS[setup])
    outputs = _tokens(folder, drafting, **SETUPS[setup])
    assert outputs == plain
    _drafts_are_those_of(reference, outputs)


@pytest.mark.parametrize("setup", SETUPS)
def test_a_head_that_is_right_saves_steps(setup: str, silent: Path, tmp_path: Path) -> None:
    """Nearly all of its drafts are accepted, and they change no token."""
    options = SETUPS[setup]
    plain = _tokens(silent, None, **options)
    num_steps = RecordingExecutor.last.num_steps
    assert _tokens(silent, _eagle(right_eagle(tmp_path / "head", silent)), **options) == plain
    executor = RecordingExecutor.last
    assert len(executor.record.pairs()) > 50
    assert executor.record.accepted_share() > 0.98
    assert executor.num_steps < 0.7 * num_steps


def test_a_head_in_16_bits_is_packed_and_right(silent: Path, tmp_path: Path) -> None:
    """A head in bf16, packed where there is a compiled GEMM, drafts right tokens."""
    _tokens(silent, _eagle(right_eagle(tmp_path / "head", silent)), dtype="bfloat16")
    assert RecordingExecutor.last.record.accepted_share() > 0.9


@pytest.mark.parametrize("variant", ["glm4-moe", "deepseek-v3"])
def test_a_layer_for_multi_token_prediction_that_is_right_saves_steps(variant: str, tmp_path: Path) -> None:
    folder = _with_prediction(tmp_path / "model", variant, right=True)
    plain = _tokens(folder, None)
    num_steps = RecordingExecutor.last.num_steps
    assert _tokens(folder, MTP) == plain
    assert RecordingExecutor.last.record.accepted_share() > 0.98
    assert RecordingExecutor.last.num_steps < 0.7 * num_steps


def test_a_found_prefix_serves_a_head(silent: Path, tmp_path: Path) -> None:
    """The next turn hits the blocks of the first one, and drafts as well."""
    with _llm(silent, _eagle(right_eagle(tmp_path / "head", silent))) as llm:
        answer = list(llm.generate([PROMPTS[3]], GREEDY)[0].outputs[0].token_ids)
        again = llm.generate([[*PROMPTS[3], *answer, 9, 9]], GREEDY)[0]
    assert (again.num_cached_tokens or 0) >= 48
    assert RecordingExecutor.last.record.accepted_share() > 0.98


def test_heads_that_do_not_fit_are_refused(model: Path, model_folder: Path, tmp_path: Path) -> None:
    """Heads that do not fit the model are refused in one sentence."""
    head = random_eagle(tmp_path / "head")
    wide = make_model_folder(tmp_path / "wide", hidden_size=96)
    with pytest.raises(ConfigError, match="hidden states of 64 numbers, and the model's have 96"):
        _llm(wide, _eagle(head))
    with pytest.raises(ConfigError, match=r"no (supported )?EAGLE head"):
        _llm(model, _eagle(model))
    with pytest.raises(ConfigError, match="no layer for multi-token prediction"):
        _llm(model, MTP)
    shallow = make_model_folder(tmp_path / "shallow", num_layers=2, hidden_size=64)
    head3 = random_eagle3(tmp_path / "head3")
    with pytest.raises(ConfigError, match=r"reads layers \[1, 2, 3\] of a model that has 2"):
        _llm(shallow, _eagle(head3, "eagle3"))
    with pytest.raises(ConfigError, match="the method is eagle3, not eagle"):
        _llm(model, _eagle(head3))
    with pytest.raises(ConfigError, match="native implementation"):
        _llm(model, _eagle(head), model_impl="transformers")
    with pytest.raises(ConfigError, match="takes no model"):
        SpeculativeConfig(method="mtp", model=str(head))
