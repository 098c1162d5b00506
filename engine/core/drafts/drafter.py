"""The interface between the core and its drafters, which propose draft tokens.

Drafters are pure: tokens in, tokens out, and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.config.speculative import SpeculativeConfig
from engine.core.drafts.ngram import NgramDrafter
from engine.core.drafts.proposal import NOTHING, Proposal
from engine.core.drafts.suffix import BYTES_A_TOKEN, MAX_TOKENS, MAX_TOKENS_OF_KINDS, SuffixDrafter
from engine.core.drafts.worker_drafts import WorkerDrafts
from engine.core.request import Request


class Drafter(Protocol):
    """Proposes how a request may continue."""

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """At most ``max_tokens`` tokens that may follow the request, whose tokens are all known."""

    def ended(self, request: Request) -> None:
        """Drop the state of a request that has ended, except what its job may still need."""


class NoDrafter:
    """Proposes nothing: the only drafts are those that a grammar forces."""

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        return NOTHING

    def ended(self, request: Request) -> None:
        pass


def make_drafter(config: SpeculativeConfig, job_of: Callable[[Request], str | None]) -> Drafter:
    """The drafter that the configuration names. ``job_of`` returns a request's job, if it is known."""
    if config.has_weights:
        return WorkerDrafts()
    if config.method == "grammar":
        return NoDrafter()
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    return SuffixDrafter(config, job_of)


def most_bytes(config: SpeculativeConfig | None) -> int:
    """The approximate maximum of the memory, in bytes, that the core's drafter uses to remember text."""
    if config is None or config.method != "suffix":
        return 0
    return (MAX_TOKENS + MAX_TOKENS_OF_KINDS) * BYTES_A_TOKEN
