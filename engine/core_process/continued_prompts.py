"""Shortens prompts that continue an earlier turn to their new tokens and the turn's id.

The core that had the turn knows the rest. If it has forgotten it, it requests the whole request, which is
kept here until the core has answered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from engine.records.messages import EngineCoreOutput, EngineCoreRequest, TurnPrefix
from engine.tokenization.prompt_encoder import ContinuedTokens, EncodedTokens

TAIL_TOKENS = 8
MAX_TURNS = 4096
"""Turns whose ids are remembered: a core keeps fewer."""


def as_written(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request, ready to be encoded. Encoding a prompt takes as long as decoding it, and most tokens were
    already encoded for the job's earlier turns: those bytes are reused."""
    tokens = request.prompt_token_ids
    if not isinstance(tokens, EncodedTokens):
        return request
    written: Any = msgspec.Raw(tokens.as_msgpack)
    return msgspec.structs.replace(request, prompt_token_ids=written)


class ContinuedPrompts:
    """The continued prompts of one client and one core."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, str] = OrderedDict()
        """The core's ids of turns that it keeps on request, by the callers' ids."""
        self._unanswered: dict[str, EngineCoreRequest] = {}
        """Whole requests that were sent in part, until the core has answered."""
        self._aborted: set[str] = set()
        """Those of them that were aborted meanwhile."""

    def to_send(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request to encode: shortened, if this core was sent the turn that it continues."""
        sent = self._in_part(request)
        if request.keeps_tokens and request.sampling_params.n == 1 and request.external_req_id is not None:
            self._turns[request.external_req_id] = request.request_id
            if len(self._turns) > MAX_TURNS:
                self._turns.popitem(last=False)
        return sent

    def _in_part(self, request: EngineCoreRequest) -> EngineCoreRequest:
        tokens = request.prompt_token_ids
        if not isinstance(tokens, ContinuedTokens) or tokens.num_known == len(tokens):
            return request
        turn_id = self._turns.get(tokens.turn_id)
        num_known = tokens.num_known
        if turn_id is None:
            return request
        self._unanswered[request.request_id] = request
        prefix = TurnPrefix(turn_id, num_known, tokens[max(0, num_known - TAIL_TOKENS) : num_known])
        return msgspec.structs.replace(request, prompt_token_ids=tokens[num_known:], continues=prefix)

    def answered(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Forget requests that the core has answered: it needs none of them as a whole."""
        if self._unanswered:
            for output in outputs:
                if self._unanswered.pop(output.request_id, None) is not None:
                    self._aborted.discard(output.request_id)

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Note that these requests were aborted, maybe before the core had all of them."""
        self._aborted |= self._unanswered.keys() & set(request_ids)

    def take_wanted(self, request_ids: Iterable[str]) -> tuple[list[EngineCoreRequest], list[str]]:
        """The requests that the core wants as a whole, and the ids of those to abort once it has them, so
        that it reports the end of each."""
        known = [request_id for request_id in request_ids if request_id in self._unanswered]
        requests = [self._unanswered.pop(request_id) for request_id in known]
        to_abort = [request_id for request_id in known if request_id in self._aborted]
        self._aborted.difference_update(to_abort)
        return requests, to_abort
