"""Makes transformers' model with the engine's random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.models import model_folder
from benchmarks.gpu.shapes import TimedModel
from engine.config.engine_config import ModelConfig
from engine.worker.loading.loader import load_model
from engine.worker.models.decoder import Decoder


def reference_model(bench: Bench, shape: TimedModel, dtype: str) -> Any:
    """Returns transformers' model with the engine's random weights, loaded from the same seed."""
    folder = model_folder(bench, shape)
    device = bench.device.where
    options = ModelConfig(model=str(folder), device=device.type, dtype=dtype, load_format="dummy")
    ours = load_model(options).model
    assert isinstance(ours, Decoder)
    with device:
        theirs: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)
        )
    tensors = {name: part.view for name, part in ours.checkpoint_parts().items()}
    missing, unknown = theirs.load_state_dict(tensors, strict=False, assign=True)
    assert not unknown, f"transformers knows no tensors {unknown}"
    assert set(missing) <= {"lm_head.weight"}, f"the loader makes up no tensors {missing}"
    theirs.tie_weights()
    return theirs.eval()
