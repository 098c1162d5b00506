"""/v1/usage: what keys have used."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.api.endpoints import endpoint, server_of
from engine.api.errors import NotFoundError
from engine.api.service.identity import owner_of

router = APIRouter()


@endpoint(router, "GET", "/v1/usage")
async def usage(request: Request) -> Response:
    """What keys of the key file have used since the server's start, in this minute and this day (UTC), beside
    their quotas: the key's own, or of all for an operator's key."""
    quotas = server_of(request).quotas
    if quotas is None:
        raise NotFoundError("This server counts no usage by key: --api-key-file names keys.")
    owner = owner_of(request.headers)
    names = list(quotas.keys) if owner is None else [owner]
    meters = {name: meter for name in names if (meter := quotas.meter(name)) is not None}
    return JSONResponse(
        {"object": "list", "data": [{"key": name, **meter.usage()} for name, meter in meters.items()]}
    )
