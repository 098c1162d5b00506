"""Configures whether the engine generates or pools, and how: ``--runner`` and ``--pooler-config``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.checks import one_of
from engine.config.hf_overrides import ClassTokens, read_hf_overrides
from engine.errors import ConfigError

RUNNERS = ("auto", "generate", "pooling")
POOLING_TYPES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Methods to pool the vectors of a prompt's tokens into one, by their names in sentence-transformers."""
_V1_NAMES = {"last": "lasttoken"}
_TYPE_FIELDS = ("seq_pooling_type", "pooling_type")
_ACTIVATION_FIELDS = ("use_activation", "normalize", "activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """Options that override the model's folder."""

    runner: str = "auto"
    """What the model is used for: ``auto`` (the folder decides) | ``generate`` | ``pooling``."""
    pooling_type: str | None = None
    """How the vectors of a prompt's tokens become one; None: as the folder defines."""
    use_activation: bool | None = None
    """Whether to normalize embeddings and turn logits into probabilities, by default; None: as the folder
    defines."""

    class_tokens: ClassTokens | None = None
    """Tokens whose logits are the classes, for a generating decoder; None: as the folder defines."""

    def __post_init__(self) -> None:
        one_of("runner", self.runner, RUNNERS)


def read_pooling_config(
    runner: str,
    given: str | Mapping[str, Any] | None,
    hf_overrides: str | Mapping[str, Any] | None = None,
) -> PoolingConfig:
    """``given``, ``hf_overrides``: V1's ``--pooler-config`` and ``--hf-overrides``, as JSON or a mapping.
    Raises ConfigError."""
    class_tokens = read_hf_overrides(hf_overrides)
    if class_tokens is not None and runner == "generate":
        raise ConfigError("hf_overrides and runner 'generate' cannot be combined.")
    if given is None:
        return PoolingConfig(runner=runner, class_tokens=class_tokens)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"pooler_config is not valid JSON: {error}.") from error
    if not isinstance(given, Mapping):
        raise ConfigError("pooler_config must be a JSON object.")
    if runner == "generate":
        raise ConfigError("pooler_config and runner 'generate' cannot be combined.")
    known = (*_TYPE_FIELDS, *_ACTIVATION_FIELDS)
    for name in given:
        if name not in known:
            raise ConfigError(f"pooler_config has no field {name!r}; choose from {', '.join(known)}.")
    return PoolingConfig(
        runner=runner,
        pooling_type=_pooling_type(given),
        use_activation=_use_activation(given),
        class_tokens=class_tokens,
    )


def _pooling_type(given: Mapping[str, Any]) -> str | None:
    name = next((given[field] for field in _TYPE_FIELDS if given.get(field) is not None), None)
    if name is None:
        return None
    lower = str(name).lower()
    lower = _V1_NAMES.get(lower, lower)
    one_of("pooler_config.pooling_type", lower, POOLING_TYPES)
    return lower


def _use_activation(given: Mapping[str, Any]) -> bool | None:
    value = next((given[field] for field in _ACTIVATION_FIELDS if given.get(field) is not None), None)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"pooler_config.use_activation must be true or false, got {value!r}.")
    return value
