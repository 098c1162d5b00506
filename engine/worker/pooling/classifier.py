"""Reads the linear map to classes: a separate tensor, or rows of the language model's head."""

from __future__ import annotations

import torch

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.tokenization.tokenizer import Tokenizer
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.stored_tensor import PlainTensor, TensorFiles
from engine.worker.loading.model_folder import read_config
from engine.worker.models.families.table import decoder_shape
from engine.worker.pooling.pooling_folder import PoolingFolder, Token

_OWN = "score.weight"
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


def classifier_of(folder: PoolingFolder, options: ModelConfig) -> torch.Tensor:
    """[num_classes, hidden_size] in fp32. Raises ModelLoadError if it is missing, or is not a linear map."""
    checkpoint = Checkpoint(folder.folder)
    if not folder.head_rows:
        return _read(folder, checkpoint, _OWN)
    config = read_config(folder.folder, options.trust_remote_code)
    shape = decoder_shape(config)
    if shape.logit_cap is not None or shape.logit_divisor != 1.0:
        raise ModelLoadError(f"{folder.folder} caps or divides its logits: they are not served as scores.")
    ids = _TokenIds(options, shape.vocab_size)
    rows = [(ids.of(token), None if less is None else ids.of(less)) for token, less in folder.head_rows]
    name = _head_name(checkpoint, is_tied=bool(config.get_text_config().tie_word_embeddings))

    def row(token: int) -> torch.Tensor:
        return _read(folder, checkpoint, name, slice(token, token + 1))[0]

    return torch.stack([row(token) if less is None else row(token) - row(less) for token, less in rows])


def _head_name(checkpoint: Checkpoint, *, is_tied: bool) -> str:
    if not is_tied:
        return _HEAD
    return next((name for name in checkpoint.tensors if name.endswith(_EMBEDDING)), _EMBEDDING)


def _read(folder: PoolingFolder, checkpoint: Checkpoint, name: str, *region: slice) -> torch.Tensor:
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise ModelLoadError(f"Tensor {name} is missing from {folder.folder}.")
    assert isinstance(stored, PlainTensor), "no format was given"
    with TensorFiles() as files:
        return files.read(stored.entries[0], *region).float()


class _TokenIds:
    """Looks up ids of tokens that are given as texts; loads the tokenizer for the first one."""

    def __init__(self, options: ModelConfig, vocab_size: int) -> None:
        self._options = options
        self._vocab_size = vocab_size
        self._tokenizer: Tokenizer | None = None

    def of(self, token: Token) -> int:
        found: int | None = token if isinstance(token, int) else self._id_of(token)
        if found is None or not 0 <= found < self._vocab_size:
            raise ModelLoadError(f"{token!r} is not a token of this model, so it has no logit to be a class.")
        return found

    def _id_of(self, text: str) -> int | None:
        self._tokenizer = self._tokenizer or Tokenizer.load(self._options)
        return self._tokenizer.hf.get_vocab().get(text)
