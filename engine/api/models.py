"""GET /v1/models: the names under which the model is served."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of
from engine.api.errors import ModelNotFoundError
from engine.api.openai.bodies import ModelCard, ModelList
from engine.api.served_model import ServedModel

router = APIRouter()


@endpoint(router, "GET", "/v1/models")
async def list_models(request: Request) -> Response:
    """The names under which the model is served."""
    model = model_of(request)
    cards = [_card(model, name) for name in model.names]
    return json_response(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


@endpoint(router, "GET", "/v1/models/{name:path}")
async def show_model(request: Request) -> Response:
    """Describes the model under one of its names."""
    name = request.path_params["name"]
    if name not in model_of(request).names:
        raise ModelNotFoundError(name, model_of(request).names)
    return json_response(_card(model_of(request), name))


def _card(model: ServedModel, name: str) -> ModelCard:
    root = model.engine.config.model.model
    return ModelCard(
        id=name,
        display_name=name,
        created=model.created,
        created_at=datetime.fromtimestamp(model.created, UTC),
        root=root,
        max_model_len=model.max_model_len,
    )
