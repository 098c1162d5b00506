"""Allows one turn of a conversation at a time: two concurrent ones would build on the same turn, and one
would be lost.

The lock is in the store, where other API server processes see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from engine.api.errors import ConversationLockedError
from engine.api.openai_responses.store import ResponseStore

RENEW_S = 1.0
"""Seconds after which a running turn renews its lock. It then also learns whether another process cancelled
it."""


class ConversationLock:
    """A turn's lock on its conversation. One that is not renewed expires."""

    def __init__(self, store: ResponseStore, response_id: str) -> None:
        self._store = store
        self._response_id = response_id

    @classmethod
    async def take(cls, store: ResponseStore, conversation_id: str, response_id: str) -> ConversationLock:
        """Raises ConversationLockedError if another turn of the conversation is running."""
        if not await store.lock(conversation_id, response_id):
            raise ConversationLockedError
        return cls(store, response_id)

    @asynccontextmanager
    async def renewed(self) -> AsyncGenerator[None, None]:
        """Holds the lock within the block, then releases it."""
        renewing = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            renewing.cancel()
            await self.release()

    async def release(self) -> None:
        """Releases the lock, even if the caller is cancelled. Repeatable."""
        await asyncio.shield(asyncio.create_task(self._store.unlock(self._response_id)))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._store.renew(self._response_id)
