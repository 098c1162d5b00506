"""Options of V1 that this engine does not have, and their replacements: docs/design/project.md."""

from __future__ import annotations

_IDS_OR_TEXTS = "prompts are texts, token ids, pictures or audio"
_IN_SAMPLER = "use logit_bias, allowed_token_ids, bad_words or structured outputs"
_OF_CLIENT = "change requests and answers in the client, or in a proxy before this server"
_BLOCKS_ON_ALL_RANKS = "use tensor_parallel_size or pipeline_parallel_size, or a KV cache of 8 bits"

_REASONS = {
    "enable_prompt_embeds": _IDS_OR_TEXTS,
    "logits_processors": _IN_SAMPLER,
    "logits_processor_pattern": _IN_SAMPLER,
    "io_processor_plugin": _OF_CLIENT,
    "ec_transfer_config": "pictures and audio are encoded by the engine that answers",
    "decode_context_parallel_size": _BLOCKS_ON_ALL_RANKS,
    "prefill_context_parallel_size": _BLOCKS_ON_ALL_RANKS,
    "dcp_kv_cache_interleave_size": _BLOCKS_ON_ALL_RANKS,
    "cp_kv_cache_interleave_size": _BLOCKS_ON_ALL_RANKS,
}
_SHORT = {"-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size"}


def why_not(option: str) -> str | None:
    """One sentence about an option of V1, by its name in Python or its flag; None for others."""
    flag, _, _ = option.partition("=")
    name = _SHORT.get(flag, flag.removeprefix("--").replace("-", "_"))
    reason = _REASONS.get(name)
    return None if reason is None else f"{flag} is V1's, and not supported: {reason}."
