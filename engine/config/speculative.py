"""The record of ``speculative_config``, vLLM V1's JSON or the same as a mapping, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.checks import at_least
from engine.config.json_options import check_names, make_record, read_fields
from engine.errors import ConfigError

METHODS_WITH_A_FOLDER = ("draft_model", "eagle", "eagle3")
METHODS_WITH_WEIGHTS = (*METHODS_WITH_A_FOLDER, "mtp")
DRAFT_METHODS = ("suffix", "ngram", "grammar", *METHODS_WITH_WEIGHTS)
MAX_SPECULATIVE_TOKENS = 64

OPTION = "speculative_config"
EXAMPLE = '{"method": "suffix"}'
LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")
DRAFTS_OF_WEIGHTS = 3
"""Default of the most drafts in a step for a drafter with weights: each draft costs it a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: where drafts come from, and how many are verified at a time."""

    method: str = "suffix"
    """``suffix``: from the job's own past and from jobs of its kind | ``ngram``: from the request alone |
    ``grammar``: only what a grammar forces, which all others draft, too | ``draft_model``: by a small model
    that has the same tokens | ``eagle``, ``eagle3``: by such a head | ``mtp``: by the model's own layer for
    multi-token prediction."""
    model: str | None = None
    """Folder or hub name of the draft model, or of the head (``draft_model``, ``eagle``, ``eagle3``)."""
    num_speculative_tokens: int = 16
    """Most drafts of a request in a step."""
    weigh_costs: bool = True
    """Verify only drafts that gain more than they cost, by steps that are measured at start-up; False: all
    that are likely enough."""
    prompt_lookup_min: int = 5
    """Fewest tokens of an n-gram that is looked up (``ngram``)."""
    prompt_lookup_max: int = 5
    """Most tokens of an n-gram that is looked up (``ngram``)."""
    suffix_decoding_max_tree_depth: int = 24
    """Longest context, of 1, 2, 4 and 8 tokens, from which the next token is predicted (``suffix``)."""
    suffix_decoding_min_token_prob: float = 0.1
    """Lowest chance of acceptance at which a draft is verified (``suffix``)."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Most jobs that are remembered (``suffix``)."""

    def __post_init__(self) -> None:
        if self.method not in DRAFT_METHODS:
            raise ConfigError(f"method must be one of {', '.join(DRAFT_METHODS)}, got {self.method!r}.")
        needs_folder = self.method in METHODS_WITH_A_FOLDER
        if needs_folder and self.model is None:
            raise ConfigError(f"method {self.method} needs a model: the folder of its weights.")
        if not needs_folder and self.model is not None:
            raise ConfigError(f"method {self.method} takes no model.")
        at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be at most {MAX_SPECULATIVE_TOKENS}, got "
                f"{self.num_speculative_tokens}."
            )
        at_least("prompt_lookup_min", self.prompt_lookup_min, 1)
        at_least("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min)
        at_least("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1)
        if not 0 < self.suffix_decoding_min_token_prob <= 1:
            raise ConfigError("suffix_decoding_min_token_prob must be above 0 and at most 1.")
        at_least("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 1)

    @property
    def has_weights(self) -> bool:
        """Whether the drafter runs in the worker, together with the model."""
        return self.method in METHODS_WITH_WEIGHTS

    @property
    def num_lookahead_tokens(self) -> int:
        """Places after a request's tokens at which a drafter writes its KV."""
        return self.num_speculative_tokens if self.has_weights else 0


def read_speculative_config(
    given: str | Mapping[str, Any] | SpeculativeConfig | None,
) -> SpeculativeConfig | None:
    """The record of what was given, JSON or fields; ConfigError names the field that is wrong."""
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    fields = read_fields(OPTION, given, EXAMPLE)
    check_names(OPTION, fields, SpeculativeConfig)
    for name, other in (LOOKUPS, LOOKUPS[::-1]):  # as in V1, the one that is left out is the other
        if name not in fields and other in fields:
            fields[name] = fields[other]
    if fields.get("method") in METHODS_WITH_WEIGHTS:
        fields.setdefault("num_speculative_tokens", DRAFTS_OF_WEIGHTS)
    return make_record(OPTION, fields, SpeculativeConfig)
