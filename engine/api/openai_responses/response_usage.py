"""Token counts of a response."""

from __future__ import annotations

from engine.api.openai.bodies import receipt_fields
from engine.api.openai_responses.items import InputTokensDetails, OutputTokensDetails, ResponseUsage
from engine.api.turn.usage import TurnUsage
from engine.records.messages import TurnReceipt


def usage_of_response(usage: TurnUsage, receipt: TurnReceipt | None) -> ResponseUsage:
    """OpenAI's ``usage``, with the receipt."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.cached_tokens,
            cache_write_tokens=max(0, usage.prompt_tokens - usage.cached_tokens),
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        receipt=receipt_fields(receipt, usage.left_out),
    )
