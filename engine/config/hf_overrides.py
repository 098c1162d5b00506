"""Reads ``--hf-overrides``: how a generating decoder scores pairs of texts, in V1's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.json_options import read_fields
from engine.errors import ConfigError

FIELDS = ("architectures", "classifier_from_token", "is_original_qwen3_reranker", "method")
TWO_WAY = "from_2_way_softmax"
PLAIN = "no_post_processing"
_EXAMPLE = (
    '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
    '"is_original_qwen3_reranker": true}'
)
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class ClassTokens:
    """Tokens whose logits at the end of a prompt are its classes."""

    tokens: tuple[str, ...]
    is_two_way: bool = False
    """Whether the two tokens make one class: the second token's logit minus the first's."""


def read_hf_overrides(given: str | Mapping[str, Any] | None) -> ClassTokens | None:
    """Reads the override; ConfigError unless it defines how to classify by tokens: a folder's config cannot
    be changed."""
    if given is None or given == {}:
        return None
    fields = read_fields("hf_overrides", given, _EXAMPLE)
    for name in fields:
        if name not in FIELDS:
            raise ConfigError(
                f"hf_overrides must not set {name!r}; it takes {', '.join(FIELDS)}: other fields are read "
                "from the folder's config.json."
            )
    tokens = fields.get("classifier_from_token")
    if not isinstance(tokens, list | tuple) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ConfigError(f"hf_overrides needs classifier_from_token, a list of tokens, as in {_EXAMPLE}.")
    _check_architectures(fields.get("architectures"))
    method = TWO_WAY if fields.get("is_original_qwen3_reranker") else fields.get("method")
    if method not in (TWO_WAY, PLAIN):
        raise ConfigError(f"hf_overrides.method must be one of {TWO_WAY}, {PLAIN}, got {method!r}.")
    if method == TWO_WAY and len(tokens) != 2:
        raise ConfigError(
            f"hf_overrides.classifier_from_token must be two tokens for {TWO_WAY}, got {len(tokens)}."
        )
    return ClassTokens(tuple(tokens), is_two_way=method == TWO_WAY)


def _check_architectures(names: object) -> None:
    """Checks the field by which V1 picks its classes; here it must only agree with the other fields."""
    if names is None:
        return
    if not isinstance(names, list | tuple) or len(names) != 1 or not str(names[0]).endswith(_CLASSIFIER):
        raise ConfigError(f"hf_overrides.architectures must be one name that ends in {_CLASSIFIER}.")
