"""Models whose tokens attend to all others, run by transformers: sequences of similar length form one padded
batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.worker.loading.model_folder import (
    choose_device,
    choose_dtype,
    choose_max_model_len,
    read_by_transformers,
    read_format,
)
from engine.worker.pooling.pooler import Pooler
from engine.worker.pooling.pooling_folder import PoolingFolder

_OFFSET_POSITIONS = (
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "data2vec-text"),
    *("roberta-prelayernorm", "ibert", "xmod"),
)
"""Model types whose positions begin after the padding token's id."""
MAX_PADDING = 0.2
"""The most padding of a batch, as a share of its tokens."""


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """A prompt's tokens; ``first_segment``: the number of tokens of the first of two texts."""

    token_ids: list[int]
    first_segment: int | None


class Encoder:
    """A model that attends in both directions, and its pooler."""

    def __init__(self, config: EngineConfig, folder: PoolingFolder) -> None:
        """Load the model. Raises ModelLoadError or ConfigError with a one-sentence message."""
        options = config.model
        if options.quantization is not None:
            raise ConfigError("quantization needs native code; this model runs through transformers.")
        own = read_by_transformers(folder.folder, options.trust_remote_code)
        if own.is_encoder_decoder:
            raise ModelLoadError(f"{folder.folder} is an encoder-decoder, which is not served.")
        if read_format(folder.folder) is not None:
            raise ModelLoadError(f"{folder.folder} is quantized, which needs native code of its model.")
        self.device = choose_device(options.device)
        self.dtype = choose_dtype(options.dtype, own)
        self.vocab_size: int = own.get_text_config().vocab_size
        self.max_model_len = _max_model_len(config, own, folder)
        self._pad = own.pad_token_id if own.pad_token_id is not None else 0
        self._model = _load(config, folder, self.dtype).to(self.device)  # type: ignore[arg-type]
        self._classifies = folder.classifies
        accepted = inspect.signature(self._model.forward).parameters
        self.tells_segments = "token_type_ids" in accepted and getattr(own, "type_vocab_size", 1) > 1
        self._takes_types = "token_type_ids" in accepted
        size: int = own.get_text_config().hidden_size
        types = folder.types or ("mean",)
        self.pooler = Pooler(folder, size, self.device, types)
        self.size: int = int(own.num_labels or 0) if folder.classifies else self.pooler.size

    @torch.inference_mode()
    def run(self, prompts: Sequence[EncoderPrompt]) -> list[torch.Tensor]:
        """The rows of each prompt [num_tokens, hidden_size], or a classifier's logits [num_labels]."""
        results: list[torch.Tensor | None] = [None] * len(prompts)
        for numbers in batches_of_like_lengths([len(prompt.token_ids) for prompt in prompts]):
            for number, rows in zip(numbers, self._batch([prompts[i] for i in numbers]), strict=True):
                results[number] = rows
        return [rows for rows in results if rows is not None]

    def _batch(self, prompts: Sequence[EncoderPrompt]) -> list[torch.Tensor]:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        longest = max(lengths)
        ids = torch.full((len(prompts), longest), self._pad)
        mask = torch.zeros((len(prompts), longest), dtype=torch.long)
        types = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = torch.tensor(prompt.token_ids)
            mask[row, : lengths[row]] = 1
            if prompt.first_segment is not None and self.tells_segments:
                types[row, prompt.first_segment : lengths[row]] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._takes_types:
            inputs["token_type_ids"] = types
        output: Any = self._model(**{name: tensor.to(self.device) for name, tensor in inputs.items()})
        if self._classifies:
            return list(output.logits)
        return [rows[:length] for rows, length in zip(output.last_hidden_state, lengths, strict=True)]


def batches_of_like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Groups the indices of sequences into batches with little padding."""
    batches: list[list[int]] = []
    padded = used = 0
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        longest = lengths[batches[-1][0]] if batches else 0
        if not batches or padded + longest - used - lengths[number] > MAX_PADDING * (padded + longest):
            batches.append([])
            padded = 0
            used = 0
            longest = lengths[number]
        batches[-1].append(number)
        padded = padded + longest
        used = used + lengths[number]
    return batches


def _load(config: EngineConfig, folder: PoolingFolder, dtype: torch.dtype) -> PreTrainedModel:
    kind: Any = AutoModelForSequenceClassification if folder.classifies else AutoModel
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        result: Any = kind.from_pretrained(
            folder.folder,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=config.model.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(f"{folder.folder} could not be loaded for pooling: {reason}") from error
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    model, report = result
    for name in sorted(report["missing_keys"]):
        if not name.startswith("pooler."):  # BERT's own pooler, which is not used here
            raise ModelLoadError(f"Tensor {name} is missing from {folder.folder}.")
    assert isinstance(model, PreTrainedModel)
    model.requires_grad_(False)
    model.train(False)
    return model


def _max_model_len(config: EngineConfig, own: Any, folder: PoolingFolder) -> int:
    longest = choose_max_model_len(config.model, own)
    if own.model_type in _OFFSET_POSITIONS:
        usable = own.max_position_embeddings - (own.pad_token_id or 0) - 1
        if config.model.max_model_len is not None and longest > usable:
            raise ConfigError(
                f"max_model_len is {longest}, but the model's maximum context length is {usable}."
            )
        longest = min(longest, usable)
    if config.model.max_model_len is None and folder.max_tokens is not None:
        longest = min(longest, folder.max_tokens)
    return longest
