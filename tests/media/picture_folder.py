"""A text model's folder with Qwen's picture tokens, for engines over a stand-in model."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer

from engine.records.media import PictureModel
from tests.media.pictures import SMALL

MEDIA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCAB_SIZE = 520


def folder_with_pictures(model: Path, folder: Path) -> tuple[Path, PictureModel]:
    """Returns the new folder, and how its model would read pictures."""
    shutil.copytree(model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MEDIA_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    token_id = tokenizer.token_to_id("<|image_pad|>")
    assert token_id is not None
    return folder, msgspec.structs.replace(SMALL, token_id=token_id)
