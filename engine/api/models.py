"""GET /v1/models: the names under which the model is served."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of
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
    return json_response(_card(model_of(request, name), name))


def _card(model: ServedModel, name: str) -> ModelCard:
    is_adapter = name not in model.config.served_model_names
    return ModelCard(
        id=name,
        display_name=name,
        created=model.created,
        created_at=datetime.fromtimestamp(model.created, UTC),
        root=name if is_adapter else model.engine.config.model.model,
        parent=model.config.served_model_names[0] if is_adapter else None,
        max_model_len=model.max_model_len,
    )
