"""What the Responses API has between requests: the store, and what runs in the background."""

from __future__ import annotations

from starlette.requests import Request

from engine.api.errors import NotFoundError
from engine.api.identity import owner_of
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
    """One process's part in it, as one owner sees it. Several processes share a file in their folder; one
    alone needs none."""

    def __init__(self, store: ResponseStore, runs: BackgroundRuns, owner: str | None = None) -> None:
        self.store = store.of(owner)
        self.runs = runs.of(owner)

    @classmethod
    def create(cls, config: ResponsesConfig, siblings: Siblings) -> ResponseKeeper:
        """Of whoever has no name; ``of`` gives the others theirs."""
        limits = StoreLimits(config.max_stored_responses, config.max_stored_response_bytes)
        store: ResponseStore = (
            MemoryStore(limits) if siblings.folder is None else SqliteStore(siblings.folder, limits)
        )
        return cls(store, BackgroundRuns(store, config.max_background_responses))

    def of(self, owner: str | None) -> ResponseKeeper:
        return self if owner is None else ResponseKeeper(self.store, self.runs, owner)

    async def find(self, response_id: str) -> StoredResponse:
        """ResponseNotStoredError if it is not kept (any more)."""
        check_id(response_id, "resp_", "response")
        stored = await self.store.get(response_id)
        if stored is None:
            raise ResponseNotStoredError(f"Response {response_id[:100]!r}", self.store.limits)
        return stored


def keeper_of(request: Request) -> ResponseKeeper:
    """What the owner of the request's key has: no id leads to what another owner has."""
    keeper: ResponseKeeper = request.app.state.response_keeper
    return keeper.of(owner_of(request.headers))


def check_id(name: str, prefix: str, what: str) -> None:
    """NotFoundError if this is no id of such a thing: a path below it that there is not, perhaps."""
    if not name.startswith(prefix):
        raise NotFoundError(f"{name[:100]!r} is no {what}: the id of one begins with {prefix}.")
