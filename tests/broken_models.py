"""Model folders with one defect each, made from intact ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_poisoned_token(folder: Path, path: Path, token: int, value: float = torch.nan) -> Path:
    """Returns a copy in which a prompt that holds this token has NaN logits (or ``value`` for NaN)."""
    shutil.copytree(folder, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def with_tokens_beyond(folder: Path, path: Path, texts: list[str]) -> Path:
    """Returns a copy whose tokenizer has special tokens beyond the model's vocabulary, one of them EOS."""
    shutil.copytree(folder, path)
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {"id": vocab_size + i, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, text in enumerate(texts)
    ]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": texts[0]}))
    return path
