"""State of the Responses API between requests: the store and the background runs."""

from __future__ import annotations

from starlette.requests import Request

from engine.api.errors import NotFoundError
from engine.api.openai_responses.background import BackgroundRuns
from engine.api.openai_responses.config import ResponsesConfig
from engine.api.openai_responses.known_turns import KnownTurns
from engine.api.openai_responses.memory_store import MemoryStore
from engine.api.openai_responses.sqlite_store import SqliteStore
from engine.api.openai_responses.store import (
    ResponseNotStoredError,
    ResponseStore,
    StoredResponse,
    StoreLimits,
)
from engine.api.processes.server_group import ServerGroup
from engine.api.service.identity import owner_of


class ResponseKeeper:
    """One process's state, as one owner sees it. Several processes share a file in their folder; a single
    process needs none."""

    def __init__(
        self, store: ResponseStore, runs: BackgroundRuns, turns: KnownTurns, owner: str | None = None
    ) -> None:
        self.store = store.of(owner)
        self.runs = runs.of(owner)
        self.turns = turns.of(owner)

    @classmethod
    def create(cls, config: ResponsesConfig, siblings: ServerGroup) -> ResponseKeeper:
        """Creates the state for requests without an owner; ``of`` returns that of an owner."""
        limits = StoreLimits(config.max_stored_responses, config.max_stored_response_bytes)
        store: ResponseStore = (
            MemoryStore(limits) if siblings.folder is None else SqliteStore(siblings.folder, limits)
        )
        return cls(store, BackgroundRuns(store, config.max_background_responses), KnownTurns())

    def of(self, owner: str | None) -> ResponseKeeper:
        return self if owner is None else ResponseKeeper(self.store, self.runs, self.turns, owner)

    async def find(self, response_id: str) -> StoredResponse:
        """Finds a response; ResponseNotStoredError if it was never stored, or is no longer stored."""
        check_id(response_id, "resp_", "response")
        stored = await self.store.get(response_id)
        if stored is None:
            raise ResponseNotStoredError(f"Response {response_id[:100]!r}", self.store.limits)
        return stored


def keeper_of(request: Request) -> ResponseKeeper:
    """Returns the state for the owner of the request's key. No id leads to data of other owners."""
    keeper: ResponseKeeper = request.app.state.response_keeper
    return keeper.of(owner_of(request.headers))


def check_id(name: str, prefix: str, what: str) -> None:
    """Raises NotFoundError for an id without its prefix, such as an unknown path below one."""
    if not name.startswith(prefix):
        raise NotFoundError(f"{name[:100]!r} is not the id of a {what}: such an id begins with {prefix}.")
