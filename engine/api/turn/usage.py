"""Token counts of a turn, counted once and serialized by each API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from engine.api.openai.bodies import CompletionTokensDetails, PromptTokensDetails, Usage, receipt_fields
from engine.records.messages import TurnReceipt


@dataclass(slots=True)
class TurnUsage:
    """Token counts of a turn until now, over all its answers."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    reasoning_tokens: int = 0
    """Reasoning tokens of the completion, known at the end of the turn."""
    left_out: list[str] = field(default_factory=list)
    """Notes on what the model was not shown of the request, for the receipt at the end of the turn."""


def receipt_of_all(request_id: str, receipts: Sequence[TurnReceipt]) -> TurnReceipt | None:
    """Combines the receipts of several prompts in one request: token counts are summed, other fields are the
    last one's."""
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
        prewarmed_tokens=sum(receipt.prewarmed_tokens for receipt in receipts),
        output_steps=sum(receipt.output_steps for receipt in receipts),
        drafted_tokens=sum(receipt.drafted_tokens for receipt in receipts),
        accepted_tokens=sum(receipt.accepted_tokens for receipt in receipts),
    )


def usage_of(usage: TurnUsage, receipt: TurnReceipt | None) -> Usage:
    """OpenAI's ``usage``, with the receipt."""
    reasoning = usage.reasoning_tokens
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            usage.cached_tokens, max(0, usage.prompt_tokens - usage.cached_tokens)
        ),
        completion_tokens_details=CompletionTokensDetails(reasoning) if reasoning else UNSET,
        receipt=receipt_fields(receipt, usage.left_out),
    )
