"""The models of a run: folders without weights, and the engine options for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.shapes import TimedModel


def model_folder(bench: Bench, shape: TimedModel) -> Path:
    """Returns a folder with config and tokenizer; makes it when first needed."""
    folder = bench.models / shape.name
    if not folder.exists():
        from engine.worker.loading.tiny_models import (
            make_model_folder,  # its libraries take seconds to import
        )

        half_made = folder.with_name(f"{folder.name}.part")
        make_model_folder(half_made, **shape.folder_options, dtype=own_dtype(bench), weights=False)
        half_made.rename(folder)
    return folder


def own_dtype(bench: Bench) -> str:
    """Returns bf16, or fp32 for toy sizes, which a host computes exactly."""
    return "float32" if bench.sizes.toy else "bfloat16"


def engine_options(bench: Bench, shape: TimedModel, dtype: str | None = None, **more: Any) -> dict[str, Any]:
    """Returns engine options for this model with random weights on the GPU path."""
    return {
        "model": str(model_folder(bench, shape)),
        "device": bench.device.where.type,
        "attention_backend": "triton",
        "dtype": dtype or own_dtype(bench),
        "load_format": "dummy",
        "block_size": bench.sizes.block_size,
        **more,
    }
