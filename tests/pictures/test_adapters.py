"""Adapters of models that read pictures: peft's own results, in steps with and without pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from engine.errors import RequestError
from engine.records.adapters import find_adapter
from tests.pictures.conftest import PictureFolders
from tests.pictures.picture_engine import greedy, picture_engine, tokens_of
from tests.pictures.picture_folders import picture
from tests.pictures.reference import PictureReference

A, B = picture(3, 4, 1), picture(2, 5, 2)
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
LINEARS = "(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def with_adapter(reference: PictureReference, folder: Path) -> Path:
    """Adds an adapter to the decoder's linears, and saves it."""
    torch.manual_seed(5)
    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=rf".*language_model.*\.{LINEARS}", init_lora_weights=False
    )
    model: Any = get_peft_model(reference.model, config)
    model.save_pretrained(folder)
    reference.model = model
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "dtype"), [("qwen2_5_vl", "float32"), ("qwen3_vl", "bfloat16"), ("mistral3", "float32")]
)
def test_answers_are_those_of_peft(
    model_type: str, dtype: str, picture_folders: PictureFolders, tmp_path: Path
) -> None:
    """Adapter and base model answer side by side; in bf16, with compiled text steps, for two tokens."""
    folder = picture_folders(model_type, dtype)
    reference = PictureReference(folder)
    num_tokens = 8 if dtype == "float32" else 2
    with picture_engine(folder, tmp_path, enable_lora=True) as engine:
        prompt = engine.prompt(7, A, 13, B, 20)
        base = reference.greedy(*prompt, [A, B], num_tokens)
        adapter = find_adapter("tuned", str(with_adapter(reference, tmp_path / "adapter")))
        engine.llm.engine.load_adapter(adapter)
        engine.add("tuned", prompt, greedy(num_tokens), adapter=adapter)
        engine.add("base", prompt, greedy(num_tokens))
        outputs = engine.run()
    assert tokens_of(outputs["base"]) == base
    assert tokens_of(outputs["tuned"]) == reference.greedy(*prompt, [A, B], num_tokens) != base


def test_adapters_of_towers_are_refused(picture_folders: PictureFolders, tmp_path: Path) -> None:
    """An adapter of the vision tower is refused although its layers are numbered like the decoder's."""
    folder = picture_folders("mistral3")
    adapter = with_adapter(PictureReference(folder), tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    tensors = {name.replace("language_model", "vision_tower"): x for name, x in load_file(weights).items()}
    save_file(tensors, weights)
    with (
        picture_engine(folder, tmp_path, enable_lora=True) as engine,
        pytest.raises(RequestError, match="belongs to no linear of a layer"),
    ):
        engine.llm.engine.load_adapter(find_adapter("tower", str(adapter)))
