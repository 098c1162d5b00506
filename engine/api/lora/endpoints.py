"""The routes with which operators load and unload adapters."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.api.endpoints import endpoint, read_body, server_of
from engine.api.errors import NotFoundError
from engine.errors import EngineGenerateError, RequestError
from engine.records.adapters import MAX_NAME_CHARS, find_adapter

router = APIRouter()

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapterRequest(BaseModel):
    """Body of POST /v1/load_lora_adapter, in V1's names."""

    model_config = ConfigDict(extra="allow")

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    """Whether it replaces another adapter of this name."""


class UnloadAdapterRequest(BaseModel):
    """Body of POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="allow")

    lora_name: Name


@endpoint(router, "POST", "/v1/load_lora_adapter", body=LoadAdapterRequest, operators_only=True)
async def load_adapter(request: Request) -> Response:
    """Loads an adapter from a folder of this server; requests select it as their model."""
    body = await read_body(request, LoadAdapterRequest)
    server = server_of(request)
    if server.engine.config.lora is None:
        raise RequestError("This server has no adapters: start it with --enable-lora.", "lora_name")
    if body.lora_name in server.config.served_model_names:
        raise RequestError(f"lora_name {body.lora_name!r} is the base model's name.", "lora_name")
    adapter = await asyncio.to_thread(find_adapter, body.lora_name, body.lora_path)
    known = server.adapters.find(body.lora_name)
    if known is not None and known.digest != adapter.digest and not body.load_inplace:
        raise RequestError(
            f"Adapter {body.lora_name!r} is loaded with other weights; send load_inplace to replace it.",
            "lora_name",
        )
    try:
        await server.engine.load_adapter(adapter)
    except EngineGenerateError as error:
        raise RequestError(str(error), "lora_path") from error
    server.adapters.put(adapter)
    if known is not None and known.key != adapter.key:
        await server.engine.unload_adapter(known.key)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@endpoint(router, "POST", "/v1/unload_lora_adapter", body=UnloadAdapterRequest, operators_only=True)
async def unload_adapter(request: Request) -> Response:
    """Unloads an adapter: no new request can select it; running ones continue."""
    body = await read_body(request, UnloadAdapterRequest)
    server = server_of(request)
    known = server.adapters.find(body.lora_name)
    if known is None:
        raise NotFoundError(f"There is no adapter {body.lora_name!r}.", "lora_name")
    server.adapters.remove(body.lora_name)
    await server.engine.unload_adapter(known.key)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
