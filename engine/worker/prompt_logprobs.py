"""Log-probabilities of a prompt's own tokens, for requests that want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.outputs import PromptLogprobs
from engine.records.messages import TokenLogprobs
from engine.worker.attention.backend import IntArray
from engine.worker.request_rows import StepRows
from engine.worker.sampler import ranked_logprobs

ROWS_AT_ONCE = 64
"""Rows of logits that are in memory as fp32 at a time."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """One request's tokens of a step whose logits give the probability of the next token of the prompt."""

    req_id: str
    first: int
    """The position in the prompt of the first token with a log-probability."""
    tokens: IntArray
    """[num_rows] tokens of the step."""
    told: IntArray
    """[num_rows] ids of the prompt tokens that follow them."""
    num_top: int
    """The number of most probable tokens to report for each position."""


def prompt_rows(
    told: Mapping[str, tuple[int, int]], step: StepRows, ids_of: Callable[[int, int, int], IntArray]
) -> list[PromptRows]:
    """The tokens of a step whose logits give log-probabilities of prompts.

    ``told``: see ``RequestRows.prompts_told``. ``ids_of(row, first, count)``: ``count`` token ids of a row.
    """
    found = list[PromptRows]()
    ends = np.cumsum(step.query_lens)
    for seq, req_id in enumerate(step.req_ids if told else ()):
        if req_id not in told:
            continue
        num_prompt, num_top = told[req_id]
        first = int(step.seq_lens[seq] - step.query_lens[seq]) + 1
        count = min(int(step.query_lens[seq]), num_prompt - first)
        if count > 0:
            start = int(ends[seq] - step.query_lens[seq])
            tokens: IntArray = np.arange(start, start + count)
            ids = ids_of(int(step.rows[seq]), first, count)
            found.append(PromptRows(req_id, first, tokens, ids, num_top))
    return found


def prompt_logprobs(
    logits: torch.Tensor,
    requests: Sequence[PromptRows],
    head: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, PromptLogprobs]:
    """logits [num_rows, vocab_size], of all requests one after another -> by request. ``head``, if given,
    makes the logits from these rows; requests are omitted where it makes none, as on ranks other than the
    first."""
    found = {}
    start = 0
    for rows in requests:
        end = start + len(rows.told)
        entries = _of(logits[start:end], rows.told, rows.num_top, head)
        if len(entries) == len(rows.told):
            found[rows.req_id] = PromptLogprobs(rows.first, entries)
        start = end
    return found


def _of(
    logits: torch.Tensor,
    told: IntArray,
    num_top: int,
    head: Callable[[torch.Tensor], torch.Tensor] | None,
) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    for start in range(0, len(told), ROWS_AT_ONCE):
        part = logits[start : start + ROWS_AT_ONCE]
        part = part if head is None else head(part)
        if not part.shape[1]:
            continue
        part = part.float().log_softmax(dim=-1)
        tokens = torch.from_numpy(told[start : start + ROWS_AT_ONCE]).to(part.device)[:, None]
        entries += ranked_logprobs(part, tokens, num_top)
    return entries
