"""Anthropic's ``diagnostics``: why the prompt of an earlier message was not reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from engine.api.anthropic.bodies import CacheMissReason, Diagnostics
from engine.api.anthropic.request import MessagesRequest
from engine.api.prompt_cache.diagnostics import CacheDiagnostics
from engine.api.prompt_cache.fingerprint import Fingerprint, Part
from engine.api.service.model import Model
from engine.api.turn.conversation import Conversation
from engine.api.turn.conversation_turn import TurnOutput

Change = Literal["model_changed", "system_changed", "tools_changed", "messages_changed"]

_CHANGES: Mapping[Part, Change] = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
}
"""Any other change of the prompt, such as ``thinking``, has no name in Anthropic's API."""


class CacheInquiry:
    """One request's question about its earlier prompt; without an answer if the client did not ask."""

    def __init__(
        self, diagnostics: CacheDiagnostics, conversation: Conversation, body: MessagesRequest
    ) -> None:
        self._diagnostics = diagnostics
        self._conversation = conversation
        self._asked = body.diagnostics is not None
        self._previous = body.diagnostics.previous_message_id if body.diagnostics is not None else None
        self._earlier: Fingerprint | None = None

    @classmethod
    async def begin(
        cls, request: Request, model: Model, body: MessagesRequest, conversation: Conversation
    ) -> CacheInquiry:
        """Looks up the earlier prompt now, since a stream answers with its first event."""
        inquiry = cls(CacheDiagnostics.of(request, model), conversation, body)
        if inquiry._previous is not None:
            inquiry._earlier = await inquiry._diagnostics.earlier(inquiry._previous)
        return inquiry

    @property
    def pending(self) -> Diagnostics | UnsetType | None:
        """The answer until it is known."""
        if not self._asked:
            return UNSET
        return None if self._previous is None else Diagnostics(None)

    def answer(self, turn: TurnOutput) -> Diagnostics | UnsetType | None:
        """The reason; None if the prompt was reused, or its blocks were evicted although the client changed
        nothing."""
        if not self._asked or self._previous is None:
            return self.pending
        found = self._diagnostics.diagnose(self._earlier, self._conversation, turn)
        match found.outcome:
            case "not_found":
                return Diagnostics(CacheMissReason("previous_message_not_found"))
            case "miss":
                assert found.changed is not None, "a miss has its reason"
                change = _CHANGES.get(found.changed)
                if change is None:
                    return Diagnostics(CacheMissReason("unavailable"))
                return Diagnostics(CacheMissReason(change, found.missed_tokens))
        return None

    async def keep(self, message_id: str, turn: TurnOutput) -> None:
        """Keeps the prompt for the next request if the client opted in."""
        if self._asked:
            await self._diagnostics.keep(message_id, self._conversation, turn)
