"""What a turn took, in tokens: counted once, spelled by each dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from engine.api.openai.bodies import CompletionTokensDetails, PromptTokensDetails, Usage, receipt_fields
from engine.messages import TurnReceipt


@dataclass(slots=True)
class TurnUsage:
    """Tokens of a turn so far, over all its answers."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, found in the cache."""
    reasoning_tokens: int = 0
    """Of the completion; known at the end of the turn."""
    left_out: list[str] = field(default_factory=list)
    """Of the request, what the model was not shown: for the receipt, at the end of the turn."""


def receipt_of_all(request_id: str, receipts: Sequence[TurnReceipt]) -> TurnReceipt | None:
    """Of several prompts in one request: tokens are added up, all else is of the one that was done last."""
    if len(receipts) < 2:
        return receipts[0] if receipts else None
    return msgspec.structs.replace(
        receipts[-1],
        request_id=request_id,
        prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
        cached_tokens=sum(receipt.cached_tokens for receipt in receipts),
        recomputed_tokens=sum(receipt.recomputed_tokens for receipt in receipts),
        pinned_tokens=sum(receipt.pinned_tokens for receipt in receipts),
        diverged_tokens=sum(receipt.diverged_tokens for receipt in receipts),
        superseded_tokens=sum(receipt.superseded_tokens for receipt in receipts),
    )


def usage_of(usage: TurnUsage, receipt: TurnReceipt | None) -> Usage:
    """OpenAI's shape, with what was done about the job's KV."""
    reasoning = usage.reasoning_tokens
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning) if reasoning else UNSET,
        receipt=receipt_fields(receipt, usage.left_out),
    )
