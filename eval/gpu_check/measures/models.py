"""The models of a run: folders without weights, the engine's options for them, and transformers' model with
the weights that the engine makes up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import ModelConfig
from engine.worker.loader import load_model
from engine.worker.models.decoder import Decoder
from engine.worker.tiny_models import make_model_folder
from eval.gpu_check.measures.bench import Bench
from eval.gpu_check.shapes import ModelShape


def model_folder(bench: Bench, shape: ModelShape) -> Path:
    """Its config and a tokenizer, made when they are first needed."""
    folder = bench.models / shape.name
    if not folder.exists():
        half_made = folder.with_name(f"{folder.name}.part")
        make_model_folder(half_made, **shape.folder_options, dtype=own_dtype(bench), weights=False)
        half_made.rename(folder)
    return folder


def own_dtype(bench: Bench) -> str:
    """bf16; where sizes are toys, what a host computes exactly."""
    return "float32" if bench.sizes.toy else "bfloat16"


def engine_options(bench: Bench, shape: ModelShape, dtype: str | None = None, **more: Any) -> dict[str, Any]:
    """Of the engine with this model, random weights, and the GPU's path."""
    return {
        "model": str(model_folder(bench, shape)),
        "device": bench.device.where.type,
        "attention_backend": "triton",
        "dtype": dtype or own_dtype(bench),
        "load_format": "dummy",
        "block_size": bench.sizes.block_size,
        **more,
    }


def reference_model(bench: Bench, shape: ModelShape, dtype: str) -> Any:
    """transformers' model over the same random weights: the loader makes them up from the same seed."""
    folder, device = model_folder(bench, shape), bench.device.where
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
