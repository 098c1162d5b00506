"""Reasons why one request ends with an error while the others go on: sentences for its client."""

from __future__ import annotations

GRAMMAR_LEFT = (
    "No token satisfied both the grammar and the request's other limits (bad_words, allowed_token_ids, "
    "logit_bias), or the grammar became too complex to follow."
)
NOTHING_ALLOWED = (
    "No token is left to choose from: the request's limits (allowed_token_ids, bad_words, min_tokens) "
    "rule all of them out."
)
NOT_NUMBERS = (
    "The model's logits for this request are not finite (NaN or infinity), so no token can be chosen: its "
    "weights, or the dtype of the computation, cannot handle this input."
)

MEDIA_LOST = (
    "A picture or clip of this request could not be read by the model's worker: its file, which an API "
    "server process keeps in shared memory, is gone or is not what was announced."
)
KV_SPOILED = frozenset((NOT_NUMBERS, MEDIA_LOST))
"""Reasons that make what was computed of the request suspect: no other request may use it."""


def processing_failed(what: str, error: BaseException) -> str:
    """The sentence for an exception that nothing expected."""
    return f"{what} of this request failed: {type(error).__name__}: {str(error)[:300]}"
