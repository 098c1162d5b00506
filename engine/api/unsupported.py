"""Refuses fields that change the result on other servers but are unsupported here.

A field at a neutral value is accepted, since clients send all of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import RequestError

_NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})

_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_words": "stop",
    "function_call": "tool_choice",
    "lora_path": "model",
    "lora_request": "model",
    "thinking_budget": "thinking_token_budget",
    "reasoning_budget": "thinking_token_budget",
}
"""Other servers' names of fields that exist here under another name."""

_UNKNOWN: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            *("penalty_alpha", "no_repeat_ngram_size", "mirostat", "mirostat_mode", "dynatemp_range"),
            *("smoothing_factor", "dry_multiplier", "xtc_probability", "top_a", "epsilon_cutoff"),
            *("eta_cutoff", "early_stopping", "negative_prompt", "stop_regex", "logits_processors"),
            *("custom_logit_processor", "prompt_embeds", "input_embeds", "image_data", "audio_data"),
            *("video_data", "images", "plugins"),
        ),
        (),
    ),
    **dict.fromkeys(("typical_p", "typical", "tfs", "tfs_z", "length_penalty", "guidance_scale"), (1, 1.0)),
    "top_n_sigma": (-1, -1.0),
}
"""Fields without a counterpart here, with their neutral values besides empty ones."""

_TEXTS_ONLY = "a prompt is a text, token ids, or messages, which may hold pictures and audio"
_INSTEAD = {
    **dict.fromkeys(("prompt_embeds", "input_embeds", "image_data", "audio_data", "video_data"), _TEXTS_ONLY),
    **dict.fromkeys(
        ("logits_processors", "custom_logit_processor"),
        "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
    ),
}
"""Alternatives to some of these fields."""

_ALWAYS = frozenset(("web_search_options", "audio"))
"""Fields that have an effect even if empty."""


def refuse_unsupported(fields: Mapping[str, object]) -> None:
    """Raises RequestError for the first field that would change the result. ``fields``: the unknown fields of
    the body."""
    for name, value in fields.items():
        if value is None:
            continue
        if name in _ALWAYS:
            raise RequestError(f"{name} is not supported: this server reads and writes text only.", name)
        if name == "modalities" and value != ["text"] and value not in _NOTHING:
            raise RequestError("modalities must be ['text']: this server generates text only.", name)
        if value in _NOTHING:
            continue
        if name in _OTHER_NAMES and not (name == "function_call" and value in ("none", "auto")):
            raise RequestError(f"{name} is not a field of this server; use {_OTHER_NAMES[name]}.", name)
        if name in _UNKNOWN and value not in _UNKNOWN[name]:
            instead = _INSTEAD.get(name)
            raise RequestError(f"{name} is not supported{'' if instead is None else ': ' + instead}.", name)
