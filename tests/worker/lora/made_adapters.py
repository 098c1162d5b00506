"""Adapters that peft makes of small models, and peft's results with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def save_adapter(
    model: Path, folder: Path, seed: int, *, kind: Any = AutoModelForCausalLM, **config: Any
) -> Path:
    """Saves an adapter of random weights in the folder, with peft. ``kind``: the class of the base model."""
    base = kind.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(**{"target_modules": "all-linear", "r": 4, **config}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0.0, 0.2, generator=generator)
    adapted.save_pretrained(str(folder))
    return folder


class AdaptedReference:
    """peft's own model of an adapter, in fp32 unless another type is given."""

    def __init__(self, model: Path, adapter: Path | None, dtype: torch.dtype = torch.float32) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self._model = base if adapter is None else PeftModel.from_pretrained(base, adapter)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(int(self._model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size]"""
        logits: torch.Tensor = self._model(input_ids=torch.tensor([token_ids])).logits[0]
        return logits.float().log_softmax(-1)
