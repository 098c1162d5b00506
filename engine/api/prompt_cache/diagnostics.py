"""Reports to the clients of one server whether the prefixes of their earlier prompts were reused."""

from __future__ import annotations

from starlette.requests import Request

from engine.api.prompt_cache.diagnosis import Diagnosis, diagnose
from engine.api.prompt_cache.fingerprint import Fingerprint, PromptPrint
from engine.api.prompt_cache.fingerprint_store import FingerprintStore
from engine.api.service.identity import owner_of
from engine.api.service.model import Model
from engine.api.turn.conversation import Conversation
from engine.api.turn.conversation_turn import TurnOutput


class CacheDiagnostics:
    """The diagnostics of one owner's prompts."""

    def __init__(self, model: Model, store: FingerprintStore, owner: str | None) -> None:
        self._model = model
        self._store = store
        self._owner = owner

    @classmethod
    def of(cls, request: Request, model: Model) -> CacheDiagnostics:
        return cls(model, request.app.state.fingerprints, owner_of(request.headers))

    async def keep(self, response_id: str, conversation: Conversation, turn: TurnOutput) -> PromptPrint:
        """Keeps the turn's prompt to be compared with later ones."""
        kept = self._print(conversation, turn)
        await self._store.put(self._owner, response_id, kept.fingerprint)
        return kept

    async def forget(self, response_id: str) -> None:
        await self._store.delete(self._owner, response_id)

    async def earlier(self, response_id: str) -> Fingerprint | None:
        """The fingerprint of that response's prompt; None if none is kept."""
        return await self._store.get(self._owner, response_id)

    def diagnose(
        self, earlier: Fingerprint | None, conversation: Conversation, turn: TurnOutput
    ) -> Diagnosis:
        """Diagnoses whether this turn reused the earlier prompt's prefix."""
        return diagnose(
            earlier,
            self._print(conversation, turn).fingerprint,
            _tokens(conversation, turn),
            cached_tokens=turn.usage.cached_tokens,
            block_size=self._model.server.engine.ready.block_size,
        )

    def _print(self, conversation: Conversation, turn: TurnOutput) -> PromptPrint:
        return PromptPrint.of(conversation, self._model.name, _tokens(conversation, turn))


def _tokens(conversation: Conversation, turn: TurnOutput) -> list[int]:
    """The prompt's tokens, with different pictures and clips distinguished."""
    token_ids = turn.output.prompt_token_ids
    media = conversation.media
    return token_ids if media is None else media.named_tokens(token_ids)
