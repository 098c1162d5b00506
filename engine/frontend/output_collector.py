"""The place where the outputs of a request wait for their reader."""

from __future__ import annotations

import asyncio

from engine.frontend.request_output import RequestOutput
from engine.records.sampling_params import RequestOutputKind


class RequestOutputCollector:
    """A mailbox of size one: outputs that its reader has not fetched in time are merged."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._delta = kind is RequestOutputKind.DELTA
        self._held: RequestOutput | Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        """Resolved once there is an output. With a single reader, a future can do the work of an event."""

    def put(self, item: RequestOutput | Exception) -> None:
        if isinstance(self._held, RequestOutput) and isinstance(item, RequestOutput):
            self._held.merge(item, delta=self._delta)
        else:
            self._held = item
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> RequestOutput:
        """Waits for the next output; raises an error if one was put instead."""
        while True:
            held = self.get_nowait()
            if held is not None:
                return held
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def get_nowait(self) -> RequestOutput | None:
        held = self._held
        self._held = None
        if isinstance(held, Exception):
            raise held
        return held
