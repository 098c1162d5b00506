"""GET /v1/models: the names under which the model is served."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, server_of
from engine.api.openai.bodies import ModelCard, ModelList
from engine.api.service.server import Server

router = APIRouter()


@endpoint(router, "GET", "/v1/models")
async def list_models(request: Request) -> Response:
    """The names under which the model is served."""
    server = server_of(request)
    cards = [_card(server, name) for name in server.names]
    return json_response(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


@endpoint(router, "GET", "/v1/models/{name:path}")
async def show_model(request: Request) -> Response:
    """Describes the model under one of its names."""
    server = server_of(request)
    name = request.path_params["name"]
    server.model(name)
    return json_response(_card(server, name))


def _card(server: Server, name: str) -> ModelCard:
    is_adapter = name not in server.config.served_model_names
    return ModelCard(
        id=name,
        display_name=name,
        created=server.created,
        created_at=datetime.fromtimestamp(server.created, UTC),
        root=name if is_adapter else server.engine.config.model.model,
        parent=server.config.served_model_names[0] if is_adapter else None,
        max_model_len=server.max_model_len,
    )
