"""What the Responses API has between requests: the store, and what runs in the background."""

from __future__ import annotations

from starlette.requests import Request

from engine.api.openai_responses.background import BackgroundRuns
from engine.api.openai_responses.config import ResponsesConfig
from engine.api.openai_responses.memory_store import MemoryStore
from engine.api.openai_responses.sqlite_store import SqliteStore
from engine.api.openai_responses.store import (
    ResponseNotStoredError,
    ResponseStore,
    StoredResponse,
    StoreLimits,
)
from engine.api.processes.siblings import Siblings


class ResponseKeeper:
    """One process's part in it. Several processes share a file in their folder; one alone needs none."""

    def __init__(self, config: ResponsesConfig, siblings: Siblings) -> None:
        limits = StoreLimits(config.max_stored_responses, config.max_stored_response_bytes)
        self.store: ResponseStore = (
            MemoryStore(limits) if siblings.folder is None else SqliteStore(siblings.folder, limits)
        )
        self.runs = BackgroundRuns(self.store, config.max_background_responses)

    async def find(self, response_id: str) -> StoredResponse:
        """ResponseNotStoredError if it is not kept (any more)."""
        stored = await self.store.get(response_id)
        if stored is None:
            raise ResponseNotStoredError(f"Response {response_id[:100]!r}", self.store.limits)
        return stored


def keeper_of(request: Request) -> ResponseKeeper:
    keeper: ResponseKeeper = request.app.state.response_keeper
    return keeper
