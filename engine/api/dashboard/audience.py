"""Viewers of the dashboard in one API server process: the core is polled once for all of them.

A slow reader misses views; nothing waits for it. This module does not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from uuid import uuid4

from engine.api.errors import OverloadedError, ServerClosingError
from engine.api.service.server import Server
from engine.errors import EngineDeadError

PERIOD_S = 0.2
"""Time between two views."""
VIEWS_PER_SCENE = 5
"""One in this many views holds the complete state."""
MAX_VIEWERS = 64
"""Maximum number of viewers of one API server process."""
BACKLOG_VIEWS = 10
"""A viewer with this many unread views misses further ones."""


class _Viewer:
    """One reader, and the views that have not been sent to it yet."""

    def __init__(self) -> None:
        self.needs_scene = True
        self.error: Exception | None = None
        self._views: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._ended = False

    def show(self, view: bytes) -> None:
        if len(self._views) == BACKLOG_VIEWS:
            self._views.clear()
            self.needs_scene = True
        self._views.append(view)
        self._changed.set()

    def end(self, error: Exception | None) -> None:
        """Ends the feed."""
        self.error = error
        self._ended = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """The next view; None after the last."""
        while not self._views and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        return self._views.popleft() if self._views else None


class Viewers:
    """All viewers of this process. An instance belongs to one event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._viewer_id = uuid4().hex
        """The id of this process as a viewer of the core."""
        self._viewers: set[_Viewer] = set()
        self._showing: asyncio.Task[None] | None = None

    async def views(self) -> AsyncGenerator[bytes, None]:
        """Yields the core's views while they are read. OverloadedError beyond the maximum number of viewers,
        ServerClosingError on shutdown, EngineDeadError if the core died."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError(f"{MAX_VIEWERS} viewers are connected already; try again later.")
        viewer = _Viewer()
        self._viewers.add(viewer)
        self._server.count_viewers(1)
        try:
            if self._showing is None:
                self._showing = asyncio.create_task(self._show())
            while (view := await viewer.next()) is not None:
                yield view
            raise viewer.error or ServerClosingError()
        finally:
            self._viewers.discard(viewer)
            self._server.count_viewers(-1)

    async def _show(self) -> None:
        error: Exception | None = None
        try:
            await self._show_all()
        except Exception as caught:
            error = caught
        self._showing = None
        for viewer in list(self._viewers):
            viewer.end(error)

    async def _show_all(self) -> None:
        """Polls until there are no viewers, or the server stops."""
        engine = self._server.engine
        number = 0
        while not self._server.admission.is_closed:
            if not self._viewers:
                with suppress(EngineDeadError):
                    await engine.unwatch(self._viewer_id)
                if not self._viewers:
                    return
            viewers = list(self._viewers)
            with_scene = number % VIEWS_PER_SCENE == 0 or any(viewer.needs_scene for viewer in viewers)
            view = await engine.watch(self._viewer_id, with_scene=with_scene)
            for viewer in viewers:
                viewer.needs_scene = viewer.needs_scene and not with_scene
                viewer.show(view)
            number += 1
            await asyncio.sleep(PERIOD_S)
