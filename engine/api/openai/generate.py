"""POST /inference/v1/generate: V1's endpoint that takes a prompt as token ids and answers with token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import time

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of, read_body
from engine.api.field_names import renamed_fields
from engine.api.http import sse
from engine.api.http.connection import EventStream, while_connected
from engine.api.http.streams import begun
from engine.api.openai.bodies import Generated, TokensChoice, Usage
from engine.api.openai.completions import completion_limit
from engine.api.openai.logprobs import chat_logprobs, prompt_logprobs
from engine.api.openai.protocol import CompletionRequest, GenerateRequest
from engine.api.openai.routed_experts import encoded_experts
from engine.api.service.model import Model
from engine.api.turn.usage import TurnUsage, usage_of
from engine.errors import EngineGenerateError
from engine.frontend.request_output import CompletionOutput, RequestOutput
from engine.records.messages import RequestContext, TurnReceipt
from engine.records.sampling_params import RequestOutputKind
from engine.tool_parsers import read_fenced_command

FIELD_NAMES = {"prompt": "token_ids"}

router = APIRouter()


@endpoint(router, "POST", "/inference/v1/generate", body=GenerateRequest)
async def generate_tokens(request: Request) -> Response:
    """Continues a prompt given as token ids; answers with token ids."""
    body = await read_body(request, GenerateRequest)
    model = model_of(request, body.model)
    with renamed_fields(FIELD_NAMES):
        asked = body.completion()
    context = model.context(request.headers, asked.identity())
    request_id = body.request_id or f"gen-{request.state.request_id}"
    turn = TokensTurn(model, body.token_ids, asked, request_id, context)

    async def respond() -> Response:
        with renamed_fields(FIELD_NAMES):
            if not asked.stream:
                return json_response(await turn.whole())
            outputs = await begun(turn.outputs(RequestOutputKind.DELTA), turn.patience)
        return EventStream(turn.stream(outputs))

    return await while_connected(request, respond())


class TokensTurn:
    """Continues one prompt of token ids, from the request to the response. Used once."""

    def __init__(
        self,
        model: Model,
        prompt: list[int],
        asked: CompletionRequest,
        request_id: str,
        context: RequestContext,
    ) -> None:
        """``asked``: the same request as a completion. ``request_id``: the client's name for it."""
        self._server = model.server
        self._asked = asked
        self._context = context
        self._prompt = prompt
        self._params = asked.sampling_params(model.server.sampling_defaults(), asked.logprobs)
        self._blank = Generated(request_id=request_id, model=model.name, created=int(time()), choices=[])
        self._texts: dict[int, list[str]] = {}
        """The text of each answer, in pieces: it may hold a command."""
        self._num_tokens = 0
        self.patience = model.server.patience()

    async def outputs(self, kind: RequestOutputKind) -> AsyncGenerator[RequestOutput, None]:
        """Runs the request in the engine."""
        self._server.check_params(self._params)
        limit = completion_limit(self._asked, len(self._prompt), self._server.max_model_len)
        with self._server.admission.admit(self._params.n, self._context) as permit:
            generated = self._server.generation.generate(
                self._prompt,
                msgspec.structs.replace(self._params, max_tokens=limit, output_kind=kind),
                self._blank.request_id,
                self._context,
                permit=permit,
                on_accepted=self.patience.accepted,
            )
            async with aclosing(generated):
                async for output in generated:
                    for answer in output.outputs:
                        self._texts.setdefault(answer.index, []).append(answer.text)
                        self._num_tokens += len(answer.token_ids)
                    yield output

    async def whole(self) -> Generated:
        """Generates and returns the complete response."""
        last: RequestOutput | None = None
        async for output in self.outputs(RequestOutputKind.FINAL_ONLY):
            last = output
        if last is None:
            raise EngineGenerateError("The engine ended the request without an output.")
        told = last.prompt_logprobs
        return msgspec.structs.replace(
            self._blank,
            choices=[self._choice(answer) for answer in last.outputs],
            usage=self._usage(last, await self._close(last)),
            prompt_logprobs=UNSET if told is None else prompt_logprobs(told),
            kv_transfer_params=last.kv_transfer_params or UNSET,
        )

    async def stream(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[bytes, None]:
        """Yields the response's events. The last tokens do not wait for the receipt; the end does."""
        frame = sse.Frame(self._blank)
        async with aclosing(outputs):
            async for output in outputs:
                choices = [self._choice(answer) for answer in output.outputs]
                for choice in choices:
                    yield frame.event(_without_end(choice) if output.finished else choice)
                if not output.finished:
                    continue
                usage = self._usage(output, await self._close(output))
                for choice in choices:
                    if choice.finish_reason is not None:
                        yield frame.event(_without_tokens(choice))
                if self._asked.include_usage:
                    yield sse.event(msgspec.structs.replace(self._blank, usage=usage))

    def _choice(self, answer: CompletionOutput) -> TokensChoice:
        return TokensChoice(
            index=answer.index,
            token_ids=list(answer.token_ids),
            logprobs=chat_logprobs(answer.logprobs, as_token_ids=True),
            finish_reason=answer.finish_reason,
            routed_experts=UNSET if self._asked.stream else encoded_experts(answer.routed_experts),
        )

    def _usage(self, output: RequestOutput, receipt: TurnReceipt | None) -> Usage:
        usage = TurnUsage(len(output.prompt_token_ids), self._num_tokens, output.num_cached_tokens)
        return usage_of(usage, receipt)

    async def _close(self, output: RequestOutput) -> TurnReceipt | None:
        texts = map("".join, self._texts.values())
        calls = [call for call in map(read_fenced_command, texts) if call is not None]
        return await self._server.close_turn(self._context, output, calls)


def _without_end(choice: TokensChoice) -> TokensChoice:
    return msgspec.structs.replace(choice, finish_reason=None)


def _without_tokens(choice: TokensChoice) -> TokensChoice:
    return msgspec.structs.replace(choice, token_ids=[], logprobs=None)
