"""Statistics of draft tokens, over all turns of a trace."""

from __future__ import annotations

import msgspec

from engine.records.reported_stats import SpecDecodingStats


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and rates."""

    num_drafts: int
    """Drafts verified: one per request and step that had any."""
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_place: list[float]
    """Share of drafts whose token at a position was accepted, from the first position on."""
    tokens_per_draft: float
    """Mean acceptance length: output tokens of a step that had drafts."""
    tokens_per_step: float
    """Output tokens per step of a request, with or without drafts."""

    @classmethod
    def of(cls, counts: SpecDecodingStats, num_output_tokens: int) -> DraftFacts | None:
        """Returns None if nothing was verified."""
        accepted = counts.num_accepted_tokens
        if not counts.num_drafts:
            return None
        return cls(
            num_drafts=counts.num_drafts,
            drafted_tokens=counts.num_draft_tokens,
            accepted_tokens=accepted,
            accepted_by_place=[each / counts.num_drafts for each in counts.num_accepted_tokens_per_pos],
            tokens_per_draft=1 + accepted / counts.num_drafts,
            tokens_per_step=num_output_tokens / max(1, num_output_tokens - accepted),
        )
