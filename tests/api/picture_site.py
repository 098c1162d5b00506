"""A server for pictures in this process: the whole application and a core process, with a stand-in model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.api.app import create_app
from engine.api.config import AccessConfig, ServerConfig
from engine.api.service.server import Server
from engine.config.media import MediaConfig
from engine.core.policy import fcfs
from engine.core_process.core_client import AsyncMPClient
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import CoreProcess
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.llm import engine_config
from engine.records.media import MediaModels, PictureModel
from engine.testing import FakeExecutorFactory
from tests.media.picture_folder import VOCAB_SIZE
from tests.media.templates import WITH_TOOLS


class PictureSite:
    """What a test sends requests to, and what it inspects."""

    def __init__(self, model: Server, http: httpx.AsyncClient) -> None:
        self.model = model
        self.http = http

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def prompt(self, **body: Any) -> str:
        """Returns the prompt of a conversation as text, with one placeholder token per token of a picture."""
        answer = await self.post("/tokenize", **body)
        assert answer.status_code == 200, answer.text
        return self.model.engine.tokenizer.decode(answer.json()["tokens"])

    @property
    def num_decoded(self) -> int:
        assert self.model.media is not None
        return self.model.media.store.statistics().num_decoded

    @property
    def num_held(self) -> int:
        assert self.model.media is not None
        return self.model.media.store.statistics().num_held


@asynccontextmanager
async def picture_site(
    folder: Path,
    pictures: PictureModel | None,
    *,
    template: str = WITH_TOOLS,
    media: MediaConfig | None = None,
    access: AccessConfig | None = None,
    executor: FakeExecutorFactory | None = None,
) -> AsyncIterator[PictureSite]:
    """Runs a server; ``pictures`` says how its model reads pictures."""
    executor = executor or FakeExecutorFactory(max_model_len=8192)
    models = None if pictures is None else MediaModels(pictures)
    config = engine_config(str(folder), num_gpu_blocks_override=2000)
    spec = CoreSpec(
        config,
        replace(executor, vocab_size=VOCAB_SIZE, media=models),
        fcfs,
    )
    engine = AsyncLLM(config, AsyncMPClient(CoreProcess(spec)))
    server = ServerConfig(
        served_model_names=("tiny",),
        chat_template=template,
        media=media or MediaConfig(),
        access=access or AccessConfig(),
    )
    model = Server(engine, server)
    try:
        transport = httpx.ASGITransport(create_app(model))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http:
            yield PictureSite(model, http)
    finally:
        model.close()
        engine.shutdown()


def limited(model: PictureModel, **changes: int) -> PictureModel:
    """Returns the same model with other limits."""
    return msgspec.structs.replace(model, **changes)
