"""One turn of a conversation at a time: two at once would build on the same one, and one would be lost.

The lock lies in the store, where the other front ends see it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from engine.api.errors import ConversationLockedError
from engine.api.openai_responses.store import ResponseStore

RENEW_S = 1.0
"""How often a turn says that it is still being made. It learns then that another process was asked to cancel
it."""


class ConversationLock:
    """A turn's hold on its conversation. One that is dropped without a word ends by itself after a while."""

    def __init__(self, store: ResponseStore, response_id: str) -> None:
        self._store = store
        self._response_id = response_id

    @classmethod
    async def take(cls, store: ResponseStore, conversation_id: str, response_id: str) -> ConversationLock:
        """ConversationLockedError if another turn of the conversation is being made."""
        if not await store.lock(conversation_id, response_id):
            raise ConversationLockedError
        return cls(store, response_id)

    @asynccontextmanager
    async def renewed(self) -> AsyncGenerator[None, None]:
        """Hold it for as long as this lasts, then release it."""
        renewing = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            renewing.cancel()
            await self.release()

    async def release(self) -> None:
        """Let the next turn begin; done also if the caller is cancelled meanwhile, and twice if need be."""
        await asyncio.shield(asyncio.create_task(self._store.unlock(self._response_id)))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._store.renew(self._response_id)
