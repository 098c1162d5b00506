"""POST /tokenize and /detokenize: the server's own tokenizer and chat template."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of, read_body
from engine.api.http.connection import while_connected
from engine.api.openai.bodies import DetokenizeResponse, TokenizeResponse
from engine.api.openai.chat_parts import texts_only
from engine.api.openai.protocol import DetokenizeRequest, TokenizeRequest
from engine.api.prompt.prompts import ChatPrompt
from engine.api.service.identity import owner_of
from engine.api.service.model import Model
from engine.errors import RequestError
from engine.tokenization.tokenizer import INLINE_CHARS

router = APIRouter()


@endpoint(router, "POST", "/tokenize", body=TokenizeRequest)
async def tokenize(request: Request) -> Response:
    """Tokenizes a prompt or a conversation."""
    body = await read_body(request, TokenizeRequest)
    model = model_of(request, body.model)
    return await while_connected(request, _tokenized(model, body, owner_of(request.headers)))


async def _tokenized(model: Model, body: TokenizeRequest, owner: str | None) -> Response:
    if body.messages is not None:
        left_out = model.server.left_out()
        chat = ChatPrompt(
            messages=texts_only(body.messages, left_out),
            media=left_out.media,
            tools=body.tools,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
        )
        tokens = await model.server.prompts.list_chat(chat, owner=owner)
    else:
        tokens = await model.server.prompts.encode_all(
            body.prompt or "", add_special_tokens=body.add_special_tokens, owner=owner
        )

    def written() -> Response:
        token_text = model.server.engine.tokenizer.token_text
        texts = list(map(token_text, tokens)) if body.return_token_strs else None
        count = len(tokens)
        longest = model.server.max_model_len
        return json_response(
            TokenizeResponse(count=count, max_model_len=longest, tokens=tokens, token_strs=texts)
        )

    return written() if len(tokens) <= INLINE_CHARS else await asyncio.to_thread(written)


@endpoint(router, "POST", "/detokenize", body=DetokenizeRequest)
async def detokenize(request: Request) -> Response:
    """Detokenizes token ids."""
    body = await read_body(request, DetokenizeRequest)
    model = model_of(request, body.model)
    vocab_size = model.server.engine.ready.vocab_size
    if any(token >= vocab_size for token in body.tokens):
        raise RequestError(f"tokens holds an id outside the vocabulary [0, {vocab_size}).", "tokens")
    decode = model.server.engine.tokenizer.decode
    short = len(body.tokens) <= INLINE_CHARS
    prompt = decode(body.tokens) if short else await asyncio.to_thread(decode, body.tokens)
    return json_response(DetokenizeResponse(prompt))
