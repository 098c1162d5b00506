"""Folders of tiny models whose tokenizers have more tokens: tags of a format that other models lack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from engine.worker.loading.tiny_models import make_model_folder

MAX_TOKENS = 64


def folder_with_tokens(path: Path, tokens: Sequence[str]) -> Path:
    """Makes a model whose tokenizer also has these tokens."""
    tokenizer = Tokenizer.from_file(str(make_model_folder(path / "plain", weights=False) / "tokenizer.json"))
    special = {
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    num_tokens = tokenizer.get_vocab_size() + MAX_TOKENS
    folder = make_model_folder(path / "model", vocab_size=num_tokens, extra_config=special)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
