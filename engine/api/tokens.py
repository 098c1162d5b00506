"""POST /tokenize and /detokenize: what the server's own tokenizer and chat template make of a text."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of, read_body
from engine.api.identity import owner_of
from engine.api.left_out import LeftOut
from engine.api.openai.bodies import DetokenizeResponse, TokenizeResponse
from engine.api.openai.chat_parts import texts_only
from engine.api.openai.protocol import DetokenizeRequest, TokenizeRequest
from engine.errors import RequestError

router = APIRouter()


@endpoint(router, "POST", "/tokenize", body=TokenizeRequest)
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    body = await read_body(request, TokenizeRequest)
    model = model_of(request, body.model)
    if body.messages is not None:
        tokens = await model.render_chat(
            texts_only(body.messages, LeftOut()),
            body.tools,
            body.chat_template,
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            owner=owner_of(request.headers),
        )
    else:
        tokens = await model.encode(
            body.prompt or "",
            add_special_tokens=body.add_special_tokens,
            owner=owner_of(request.headers),
        )
    texts = [model.engine.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return json_response(
        TokenizeResponse(
            count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=texts
        )
    )


@endpoint(router, "POST", "/detokenize", body=DetokenizeRequest)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = await read_body(request, DetokenizeRequest)
    model = model_of(request, body.model)
    vocab_size = model.engine.ready.vocab_size
    if any(token >= vocab_size for token in body.tokens):
        raise RequestError(f"tokens holds an id outside the vocabulary [0, {vocab_size}).", "tokens")
    return json_response(DetokenizeResponse(model.engine.tokenizer.decode(body.tokens)))
