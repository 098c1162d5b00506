"""Log-probabilities of a prompt's own tokens, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.outputs import PromptLogprobs
from engine.messages import TokenLogprobs
from engine.worker.attention.backend import IntArray
from engine.worker.sampler import ranked_logprobs

ROWS_AT_ONCE = 64
"""Rows of logits that are in memory as fp32 at a time."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The tokens of a step whose logits say how likely the prompt's next one was, of one request."""

    req_id: str
    first: int
    """The place in the prompt of the first token that is told."""
    tokens: IntArray
    """[num_rows] tokens of the step."""
    told: IntArray
    """[num_rows] ids of the prompt's tokens behind them."""
    num_top: int
    """Most probable tokens that are told beside each."""


def prompt_logprobs(logits: torch.Tensor, requests: Sequence[PromptRows]) -> dict[str, PromptLogprobs]:
    """logits [num_rows, vocab_size], those of all requests one behind the other -> by request"""
    found, start = {}, 0
    for rows in requests:
        end = start + len(rows.told)
        found[rows.req_id] = PromptLogprobs(rows.first, _of(logits[start:end], rows.told, rows.num_top))
        start = end
    return found


def _of(logits: torch.Tensor, told: IntArray, num_top: int) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    for start in range(0, len(told), ROWS_AT_ONCE):
        part = logits[start : start + ROWS_AT_ONCE].float().log_softmax(dim=-1)
        tokens = torch.from_numpy(told[start : start + ROWS_AT_ONCE]).to(part.device)[:, None]
        entries += ranked_logprobs(part, tokens, num_top)
    return entries
