"""Loads a model with its pooler; native code runs it if each token attends only to those before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.config.engine_config import EngineConfig, ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.records.pooling import PoolingModel, PoolingTask
from engine.worker.loading.loader import LoadedModel, load_model
from engine.worker.loading.model_folder import choose_max_model_len, raw_config, read_config
from engine.worker.models.decoder import Decoder
from engine.worker.models.families.table import is_native
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from engine.worker.pooling.classifier import classifier_of
from engine.worker.pooling.pooler import Pooler
from engine.worker.pooling.pooling_folder import PoolingFolder, read_pooling_folder

_BIDIRECTIONAL = {"is_causal": False, "use_bidirectional_attention": True, "bidirectional": True}
"""Fields of configs, with the value that means that each token attends to all."""


def load(config: EngineConfig, group: TensorParallelGroup = ALONE) -> LoadedModel:
    """The model that the config names, with a pooler if it pools. Raises ModelLoadError or ConfigError with a
    one-sentence message."""
    folder = read_pooling_folder(config.model.model, config.pooling)
    if folder is None:
        return load_model(config.model, group)
    if folder.activates is None:
        folder = replace(folder, activates=True)  # a decoder's embeddings are normalized, as in V1
    check_beside(config)
    if not is_causal(config, folder):
        raise ConfigError("A model that pools through transformers runs on one rank only.")
    loaded = load_model(_shortened(config.model, folder), group, headless=True)
    assert isinstance(loaded.model, Decoder), "it is native"
    classifier = classifier_of(folder, config.model) if folder.classifies else None
    types = folder.types or ("lasttoken",)
    if folder.classifies and types != ("lasttoken",):
        raise ConfigError("pooler_config.pooling_type: classes are read off the last token of this model.")
    pooler = Pooler(folder, loaded.model.shape.hidden_size, loaded.device, types, classifier)
    tasks: tuple[PoolingTask, ...] = ("embed", "token_embed")
    if folder.classifies:
        tasks = ("classify", "token_classify")
    caches = types == ("lasttoken",)
    about = pooling_model(folder, tasks, pooler.size, caches_prefixes=caches)
    return replace(loaded, pooler=pooler, pooling=about)


def _shortened(options: ModelConfig, folder: PoolingFolder) -> ModelConfig:
    """The options with the folder's intended context length, if that is shorter than the model's own."""
    if options.max_model_len is not None or folder.max_tokens is None:
        return options
    own = choose_max_model_len(options, read_config(folder.folder, options.trust_remote_code))
    return replace(options, max_model_len=min(own, folder.max_tokens))


def is_causal(config: EngineConfig, folder: PoolingFolder) -> bool:
    """Whether native code computes the model; otherwise transformers' code does, causal or not."""
    raw = raw_config(folder.folder)
    options = config.model
    if "auto_map" in raw and not options.trust_remote_code:
        raise ModelLoadError(
            f"{folder.folder} brings its own code (auto_map), whose attention may differ: set "
            "trust_remote_code."
        )
    if "auto_map" in raw or any(raw.get(name) == value for name, value in _BIDIRECTIONAL.items()):
        return False
    if options.model_impl == "transformers":
        return False
    return is_native(read_config(folder.folder, options.trust_remote_code))


def check_beside(config: EngineConfig) -> None:
    """Raise ConfigError for options that do not fit, or were not tried with, a model that pools."""
    others = {
        "speculative_config": config.speculative is not None,
        "enable_return_routed_experts": config.model.enable_return_routed_experts,
        "kv_transfer_config": config.kv_transfer is not None,
        "load_format dummy": config.model.load_format == "dummy",
    }
    for name, is_set in others.items():
        if is_set:
            raise ConfigError(f"{name} is not supported for a model that pools.")


def pooling_model(
    folder: PoolingFolder, tasks: tuple[PoolingTask, ...], size: int, **more: Any
) -> PoolingModel:
    """The description of the model for API server processes."""
    raw = raw_config(folder.folder)
    labels = raw.get("id2label") if folder.classifies else None
    names = [str(labels[key]) for key in sorted(labels, key=int)] if isinstance(labels, dict) else []
    if folder.classifies and len(names) != size:
        names = [f"LABEL_{number}" for number in range(size)]
    return PoolingModel(
        tasks=tasks,
        size=size,
        labels=tuple(names),
        matryoshka=tuple(raw.get("matryoshka_dimensions") or ()),
        may_cut=raw.get("is_matryoshka") is not False,
        prompts=dict(folder.prompts),
        default_prompt=folder.default_prompt,
        lowercases=folder.lowercases,
        in_chat=folder.in_chat,
        joins_pairs=folder.joins_pairs,
        **more,
    )
