"""Reads ``speculative_config`` as users write it: vLLM V1's JSON, or the same as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.json_options import check_names, make_record, read_fields
from engine.speculative_config import METHODS_WITH_WEIGHTS, SpeculativeConfig

OPTION = "speculative_config"
EXAMPLE = '{"method": "suffix"}'
LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")
DRAFTS_OF_WEIGHTS = 3
"""Most drafts in a step by default of a drafter with weights, to which each costs a pass."""


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
