"""A conversation known as text, in turns with estimated token counts. Knows no file format."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eval.workloads.job import GapKind, Job, ToolRun, Turn

CHARS_PER_TOKEN = 4
"""About right for English and a large vocabulary."""
ASSUMED_OUTPUT_TOKENS = 256
"""Assumed if neither an answer nor its length was recorded."""


def estimated_tokens(text: str) -> int:
    """Tokens of a text, from its length."""
    return -(-len(text) // CHARS_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The texts that one turn adds to the conversation, and what happens after it."""

    input_text: str
    output_text: str | None
    output_tokens: int | None = None
    """Output tokens, if the source has a count; else estimated."""
    gap_kind: GapKind = GapKind.USER
    gap_s: float | None = None
    gap_measured: bool = False
    calls: tuple[ToolRun, ...] = ()


class Transcript:
    """Collects the exchanges of a conversation in which each prompt contains everything before it."""

    def __init__(self, system_text: str = "") -> None:
        self._system_text = system_text
        self._turns: list[Turn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, exchange: Exchange) -> None:
        """Adds the next turn."""
        context = estimated_tokens(self._system_text)
        if self._turns:
            context = self._turns[-1].input_tokens + self._turns[-1].output_tokens
        output_tokens = exchange.output_tokens
        if output_tokens is None:
            text = exchange.output_text
            output_tokens = ASSUMED_OUTPUT_TOKENS if text is None else estimated_tokens(text)
        self._turns.append(
            Turn(
                input_tokens=max(1, context + estimated_tokens(exchange.input_text)),
                prefix_tokens=context if self._turns else 0,
                output_tokens=output_tokens,
                gap_kind=exchange.gap_kind,
                gap_s=exchange.gap_s,
                gap_measured=exchange.gap_measured,
                calls=exchange.calls,
                input_text=exchange.input_text,
                output_text=exchange.output_text,
            )
        )

    def job(self, job_id: str, source: str, arrival_s: float | None = None) -> Job:
        """Returns the whole conversation as a job; its last turn has no gap."""
        turns = tuple(self._turns)
        if turns:
            end = replace(turns[-1], gap_kind=GapKind.END, gap_s=None, gap_measured=False, calls=())
            turns = (*turns[:-1], end)
        return Job(
            job_id=job_id,
            source=source,
            system_text=self._system_text,
            turns=turns,
            arrival_s=arrival_s,
            tokens_measured=False,
        )
