"""The web application: which path does what. Built from an engine; knows no sockets and no signals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from engine.api.chat import ChatTurn
from engine.api.completions import CompletionTurn
from engine.api.connection import CLIENT_CLOSED_REQUEST, EventStream, while_connected
from engine.api.errors import ModelNotFoundError, error_response
from engine.api.middleware import RequestIdMiddleware
from engine.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
from engine.api.responses import DetokenizeResponse, ModelCard, ModelList, TokenizeResponse
from engine.api.served_model import ServedModel
from engine.api.streams import begun
from engine.errors import RequestError
from engine.sampling_params import RequestOutputKind
from engine.version import package_version

Endpoint = Callable[[Request], Awaitable[Response]]

router = APIRouter()


def create_app(model: ServedModel) -> FastAPI:
    """The application of one served model."""
    app = FastAPI(title="continuum", version=package_version())
    app.state.model = model
    app.include_router(router)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(RequestIdMiddleware)
    return app


def _endpoint(method: str, *paths: str) -> Callable[[Endpoint], Endpoint]:
    """Register an endpoint whose every error is answered in OpenAI's shape."""

    def register(endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception as error:
                return error_response(error)

        for path in paths:
            router.add_api_route(
                path,
                answer,
                methods=[method],
                name=endpoint.__name__,
                operation_id=f"{endpoint.__name__}_{method}_{path}",
                description=endpoint.__doc__ or "",
                response_model=None,
            )
        return endpoint

    return register


async def _http_error(request: Request, error: Exception) -> Response:
    return error_response(error)


def _model(request: Request) -> ServedModel:
    model: ServedModel = request.app.state.model
    return model


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


@_endpoint("POST", "/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """The next message of a conversation."""
    body = parse_body(ChatCompletionRequest, await request.body())
    _model(request).check_name(body.model)
    turn = ChatTurn(_model(request), body, request.state.request_id)

    async def respond() -> Response:
        if not body.stream:
            return _json(await turn.complete())
        return EventStream(turn.stream(await begun(turn.outputs(RequestOutputKind.DELTA))))

    return await while_connected(request, respond())


@_endpoint("POST", "/v1/completions")
async def create_completion(request: Request) -> Response:
    """A prompt, or several, continued."""
    body = parse_body(CompletionRequest, await request.body())
    _model(request).check_name(body.model)
    turn = CompletionTurn(_model(request), body, request.state.request_id)

    async def respond() -> Response:
        if not body.stream:
            return _json(await turn.complete())
        return EventStream(turn.stream(await begun(turn.outputs(RequestOutputKind.DELTA))))

    return await while_connected(request, respond())


@_endpoint("GET", "/v1/models")
async def list_models(request: Request) -> Response:
    """The names under which the model is served."""
    return _json(ModelList(data=[_card(_model(request), name) for name in _model(request).names]))


@_endpoint("GET", "/v1/models/{name:path}")
async def show_model(request: Request) -> Response:
    """One of those names."""
    name = request.path_params["name"]
    if name not in _model(request).names:
        raise ModelNotFoundError(name)
    return _json(_card(_model(request), name))


def _card(model: ServedModel, name: str) -> ModelCard:
    root = model.engine.config.model.model
    return ModelCard(id=name, created=model.created, root=root, max_model_len=model.max_model_len)


@_endpoint("POST", "/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    body = parse_body(TokenizeRequest, await request.body())
    model = _model(request)
    model.check_name(body.model)
    if body.messages is not None:
        tokens = await model.render_chat(
            body.messages,
            body.tools,
            body.chat_template,
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
        )
    else:
        tokens = await model.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    texts = [model.engine.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return _json(
        TokenizeResponse(
            count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=texts
        )
    )


@_endpoint("POST", "/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = parse_body(DetokenizeRequest, await request.body())
    model = _model(request)
    model.check_name(body.model)
    vocab_size = model.engine.ready.vocab_size
    if any(token >= vocab_size for token in body.tokens):
        raise RequestError(f"tokens holds an id outside the vocabulary [0, {vocab_size}).", "tokens")
    return _json(DetokenizeResponse(model.engine.tokenizer.decode(body.tokens)))


@_endpoint("GET", "/health", "/ping")
async def health(request: Request) -> Response:
    """200 while the engine lives, 503 after."""
    await _model(request).engine.check_health()
    return Response()


@_endpoint("POST", "/ping")
async def ping(request: Request) -> Response:
    """The same, for load balancers that post."""
    return await health(request)


@_endpoint("GET", "/version")
async def version(request: Request) -> Response:
    """The version of this server."""
    return JSONResponse({"version": package_version()})


@_endpoint("GET", "/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus series."""
    return Response(_model(request).metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@_endpoint("GET", "/load")
async def load(request: Request) -> Response:
    """How many requests are being generated."""
    return JSONResponse({"server_load": _model(request).num_live})


@_endpoint("POST", "/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prefixes, pinned ones too; not while requests run."""
    return JSONResponse({"success": await _model(request).engine.reset_prefix_cache()})
