"""Uses a small model as a drafter: checks that it has the model's vocabulary, and takes its likeliest
token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.worker.attention.backend import AttentionBackend
from engine.worker.drafts.drafted import Drafted, likeliest
from engine.worker.layer_groups import cached_heads
from engine.worker.loading.loader import LoadedModel, load_model
from engine.worker.loading.model_folder import resolve_folder
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder

_VOCABULARY = "tokenizer.json"


class DraftModel:
    """A DraftNetwork that reads only tokens."""

    shift = 0

    def __init__(self, model: CausalModel, own_vocab_size: int, vocab_size: int) -> None:
        """``own_vocab_size``: of the draft model; ``vocab_size``: of the model it drafts for. They may
        differ, because models pad the same vocabulary differently."""
        self._model = model
        self._common = min(own_vocab_size, vocab_size)
        self._is_smaller = own_vocab_size < vocab_size

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> Drafted:
        """See DraftNetwork. A padded token that the draft model lacks is replaced by its last token."""
        if self._is_smaller:
            input_ids = input_ids.clamp(max=self._common - 1)
        logits = self._model.forward(input_ids, positions, sample_rows, attention)
        return likeliest(logits[:, : self._common])


def load_draft_model(name: str, options: ModelConfig) -> LoadedModel:
    """Load the draft model ``name`` to run with the model that ``options`` name. Raises ModelLoadError or
    ConfigError with a one-sentence message."""
    folder = resolve_folder(name)
    check_same_tokens(resolve_folder(options.model), folder)
    wanted = replace(
        options,
        model=str(folder),
        tokenizer=None,
        max_model_len=None,
        enable_return_routed_experts=False,
    )
    loaded = load_model(wanted)
    if any(kind is not None for kind in (*loaded.model.windows, *loaded.model.chunks)):
        raise ModelLoadError(f"{name} cannot draft: it has layers without full attention.")
    if cached_heads(loaded.model):
        raise ModelLoadError(f"{name} cannot draft: its layers differ in their heads.")
    if isinstance(loaded.model, Decoder) and loaded.model.state_spec.layers:
        raise ModelLoadError(f"{name} cannot draft: it has layers that keep a state.")
    return loaded


def check_same_tokens(folder: Path, draft_folder: Path) -> None:
    """Raise ModelLoadError unless both folders give each token id the same text. Without a tokenizer.json in
    both folders, nothing is checked."""
    paths = folder / _VOCABULARY, draft_folder / _VOCABULARY
    if not all(path.is_file() for path in paths):
        return
    own, drafted = (path.read_bytes() for path in paths)
    if own != drafted and _vocabulary(own) != _vocabulary(drafted):
        raise ModelLoadError(
            f"{draft_folder} cannot draft for {folder}: their tokenizers have different vocabularies."
        )


def _vocabulary(content: bytes) -> dict[str, int]:
    """The ids of a tokenizer.json's tokens, added ones included."""
    raw = json.loads(content)
    tokens: Any = raw["model"]["vocab"]
    if isinstance(tokens, list):  # Unigram: pairs of token and score
        tokens = {token: index for index, (token, _) in enumerate(tokens)}
    return {**tokens, **{added["content"]: added["id"] for added in raw.get("added_tokens", ())}}
