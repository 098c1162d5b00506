"""POST /v1/completions: continues prompts given as text or tokens, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from time import time

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of, read_body
from engine.api.http import sse
from engine.api.http.connection import EventStream, while_connected
from engine.api.http.streams import begun, merge
from engine.api.openai.bodies import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from engine.api.openai.logprobs import (
    TextOffsets,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from engine.api.openai.protocol import CompletionRequest
from engine.api.openai.routed_experts import encoded_experts
from engine.api.service.limits import Permit
from engine.api.service.model import Model
from engine.api.turn.conversation_turn import RenderedTurn
from engine.api.turn.usage import TurnUsage, receipt_of_all, usage_of
from engine.errors import RequestError
from engine.frontend.detokenizer import token_decoder
from engine.frontend.request_output import CompletionOutput, RequestOutput, TokenLogprob
from engine.records.messages import RequestContext, ToolCall, TurnReceipt
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.tokenization.no_tokenizer import needs_tokenizer
from engine.tool_parsers import read_fenced_command

DEFAULT_MAX_TOKENS = 16

PromptOutput = tuple[int, RequestOutput]
"""The number of the prompt within the request, and an output of it."""

router = APIRouter()


@endpoint(router, "POST", "/v1/completions", body=CompletionRequest)
async def create_completion(request: Request) -> Response:
    """Continues one prompt or several."""
    body = await read_body(request, CompletionRequest)
    model = model_of(request, body.model)
    context = model.context(request.headers, body.identity())
    turn = CompletionTurn(model, body, request.state.request_id, context)

    async def respond() -> Response:
        if not body.stream:
            return json_response(await turn.complete())
        outputs = await begun(turn.outputs(RequestOutputKind.DELTA), turn.patience)
        return EventStream(turn.stream(outputs))

    return await while_connected(request, respond())


MAX_TOLD_LOGPROBS = 2_000_000
"""Maximum number of prompt log-probabilities in one answer: about 100 MB."""


class CompletionTurn:
    """Runs one completion request, from its body to the response."""

    def __init__(
        self, model: Model, body: CompletionRequest, request_id: str, context: RequestContext
    ) -> None:
        self._model = model
        self._server = model.server
        self._body = body
        self._tier = model.served_tier(body.service_tier, body.priority, context) or UNSET
        self._id = f"cmpl-{request_id}"
        self._created = int(time())
        self._context = context
        self._params = params = body.sampling_params(model.server.sampling_defaults(), body.logprobs)
        if body.echoes_logprobs:
            most = max(body.logprobs or 0, body.prompt_logprobs or 0)
            self._params = msgspec.structs.replace(params, prompt_logprobs=most)
        self._n = body.n or 1
        self._prompts = body.prompts()
        if len(self._prompts) > 1 and context.kv_transfer is not None:
            raise RequestError("kv_transfer_params needs a single prompt.", "kv_transfer_params")
        self._echoes: list[str] = []
        self._latest: dict[int, RequestOutput] = {}
        """The last output of each prompt, with its token counts."""
        self._num_tokens = 0
        self._texts: dict[int, list[str]] = {}
        """The text of each choice, in pieces."""
        self._offsets: dict[int, TextOffsets] = {}
        """Text offsets of each choice, if logprobs were requested."""
        self._receipts: list[TurnReceipt] = []
        """Receipts of the prompts that have ended."""
        self.patience = model.server.patience()
        self._num_unaccepted = len(self._prompts)
        self._tells_usage = body.continuous_usage
        self._frame = sse.Frame(self._completion([], None))

    async def outputs(self, kind: RequestOutputKind) -> AsyncGenerator[PromptOutput, None]:
        self._server.check_params(self._params)
        params = msgspec.structs.replace(self._params, output_kind=kind)
        with self._server.admission.admit(len(self._prompts) * self._n, self._context) as permit:
            async with aclosing(merge(await self._streams(params, permit))) as outputs:
                async for index, output in outputs:
                    self._latest[index] = output
                    yield index, output

    async def render(self) -> dict[str, RenderedTurn]:
        """Returns each prompt and the parameters of its generation by request id, without running them.
        RequestError as if they ran."""
        self._server.check_params(self._params)
        turns = {}
        for index, prompt in enumerate(self._prompts):
            tokens = await self._encode(prompt)
            params = msgspec.structs.replace(self._params, max_tokens=self._max_tokens(len(tokens)))
            request_id = self._request_id(index)
            await self._server.engine.checked_request(tokens, params, request_id, self._context)
            turns[request_id] = RenderedTurn(tokens, (), params)
        return turns

    def _request_id(self, index: int) -> str:
        return self._id if len(self._prompts) == 1 else f"{self._id}-{index}"

    async def _streams(
        self, params: SamplingParams, permit: Permit
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        """Starts one stream per prompt."""
        body = self._body
        prompts = [await self._encode(prompt) for prompt in self._prompts]
        self._check_told(sum(map(len, prompts)))
        if body.echo:
            self._echoes = [self._echo(*pair) for pair in zip(self._prompts, prompts, strict=True)]
        return [
            self._server.generation.generate(
                prompt,
                msgspec.structs.replace(params, max_tokens=self._max_tokens(len(prompt))),
                self._request_id(index),
                self._context,
                permit=permit,
                on_accepted=self._on_accepted,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _check_told(self, num_tokens: int) -> None:
        """Raises RequestError if there are too many prompt log-probabilities for one answer; one full context
        is always allowed."""
        if self._params.prompt_logprobs is None:
            return
        told = num_tokens * (self._params.prompt_logprobs + 1) * self._n
        most = max(MAX_TOLD_LOGPROBS, self._server.max_model_len * (self._params.prompt_logprobs + 1))
        if told > most:
            raise RequestError(
                f"prompt_logprobs of these prompts and answers would be {told} numbers; the limit of a "
                f"response is {most}. Send fewer prompts.",
                "prompt_logprobs",
            )

    def _on_accepted(self) -> None:
        self._num_unaccepted -= 1
        if not self._num_unaccepted:
            self.patience.accepted()

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        adds = self._body.add_special_tokens is not False
        owner = self._context.owner
        return await self._server.prompts.encode(prompt, add_special_tokens=adds, owner=owner, is_prompt=True)

    def _echo(self, prompt: str | list[int], token_ids: list[int]) -> str:
        tokenizer = self._server.engine.tokenizer
        if not tokenizer.has_texts:
            raise needs_tokenizer("echo", "its client has the prompt")
        return prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)

    def _max_tokens(self, num_prompt_tokens: int) -> int | None:
        return completion_limit(self._body, num_prompt_tokens, self._server.max_model_len)

    async def complete(self) -> Completion:
        """Generates and returns the complete response."""
        choices: list[CompletionChoice] = []
        async for prompt_index, output in self.outputs(RequestOutputKind.FINAL_ONLY):
            choices.extend(self._choice(prompt_index, answer) for answer in output.outputs)
            await self._close(prompt_index, output)
        choices.sort(key=lambda choice: choice.index)
        completion = self._completion(choices, self._usage())
        for output in self._latest.values():
            completion.kv_transfer_params = output.kv_transfer_params or UNSET
        return completion

    async def stream(self, outputs: AsyncGenerator[PromptOutput, None]) -> AsyncGenerator[bytes, None]:
        """Yields the response's events. Only the end of a job's turn waits for its receipt."""
        async with aclosing(outputs):
            async for prompt_index, output in outputs:
                choices = [self._choice(prompt_index, answer) for answer in output.outputs]
                for choice in choices:
                    if choice.finish_reason is None or (output.finished and self._context.job is not None):
                        yield self._event(_without_finish(choice))
                    else:
                        yield self._event(choice)
                if output.finished and self._context.job is not None:
                    await self._close(prompt_index, output)
                    for choice in choices:
                        if choice.finish_reason is not None:
                            yield self._event(_without_text(choice))
        for output in self._latest.values():
            if output.kv_transfer_params is not None:
                chunk = self._completion([], None)
                chunk.kv_transfer_params = output.kv_transfer_params
                yield sse.event(chunk)
        if self._body.include_usage:
            yield sse.event(self._completion([], self._usage()))

    def _choice(self, prompt_index: int, answer: CompletionOutput) -> CompletionChoice:
        index = prompt_index * self._n + answer.index
        self._num_tokens += len(answer.token_ids)
        pieces = self._texts.setdefault(index, [])
        first = not pieces
        pieces.append(answer.text)
        echo = self._echoes[prompt_index] if self._echoes and first else ""
        with_tokens = bool(self._body.return_token_ids)
        prompt = self._latest[prompt_index].prompt_token_ids
        return CompletionChoice(
            index=index,
            text=echo + answer.text,
            logprobs=self._logprobs(prompt_index, index, answer),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if with_tokens else UNSET,
            prompt_token_ids=prompt if with_tokens and first else UNSET,
            routed_experts=UNSET if self._body.stream else encoded_experts(answer.routed_experts),
            prompt_logprobs=self._prompt_logprobs(prompt_index),
        )

    def _prompt_logprobs(self, prompt_index: int) -> PromptLogprobs | UnsetType:
        told = self._latest[prompt_index].prompt_logprobs
        return UNSET if told is None or self._body.prompt_logprobs is None else prompt_logprobs(told)

    def _logprobs(self, prompt_index: int, index: int, answer: CompletionOutput) -> CompletionLogprobs | None:
        """The logprobs of the answer's new tokens, after those of the prompt if it is repeated."""
        if self._body.logprobs is None:
            return None
        as_ids = self._body.return_tokens_as_token_ids
        prompt = self._latest[prompt_index].prompt_token_ids
        echoed = self._echoed_logprobs(prompt_index) if self._body.echoes_logprobs else None
        if index not in self._offsets:
            start = len(self._echoes[prompt_index]) if self._echoes else 0
            decoder = token_decoder(self._server.engine.tokenizer, self._params, prompt)
            self._offsets[index] = TextOffsets(decoder, start)
        own = completion_logprobs(answer.logprobs, as_ids, self._offsets[index])
        return own if echoed is None else joined(echoed, own)

    def _echoed_logprobs(self, prompt_index: int) -> CompletionLogprobs:
        output = self._latest[prompt_index]
        tokenizer = self._server.engine.tokenizer
        offsets = TextOffsets(token_decoder(tokenizer, self._params, []))
        told = [position for position in output.prompt_logprobs or () if position is not None]
        first = output.prompt_token_ids[0]
        token = TokenLogprob(first, tokenizer.token_text(first), 0.0, 1, tokenizer.token_bytes(first))
        shown = [replace(position, top=position.top[: self._body.logprobs]) for position in told]
        return echoed_logprobs(token, shown, self._body.return_tokens_as_token_ids, offsets)

    def _event(self, choice: CompletionChoice) -> bytes:
        if self._tells_usage:
            return sse.event(self._completion([choice], self._usage()))
        return self._frame.event(choice)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=choices,
            usage=usage or UNSET,
            service_tier=self._tier,
        )

    def _usage(self) -> Usage:
        outputs = self._latest.values()
        usage = TurnUsage(
            prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
            completion_tokens=self._num_tokens,
            cached_tokens=sum(output.num_cached_tokens for output in outputs),
        )
        return usage_of(usage, receipt_of_all(self._id, self._receipts))

    async def _close(self, prompt_index: int, output: RequestOutput) -> None:
        receipt = await self._server.close_turn(self._context, output, self._announced_calls(prompt_index))
        if receipt is not None:
            self._receipts.append(receipt)

    def _announced_calls(self, prompt_index: int) -> list[ToolCall]:
        """The commands of a text agent in the answers to this prompt."""
        if self._context.job is None:
            return []
        first = prompt_index * self._n
        texts = ["".join(self._texts.get(first + number, ())) for number in range(self._n)]
        return [call for call in map(read_fenced_command, texts) if call is not None]


def completion_limit(body: CompletionRequest, num_prompt_tokens: int, max_model_len: int) -> int | None:
    """The request's ``max_tokens``, or OpenAI's short default, clamped to the rest of the context."""
    if body.prewarms:
        return 1
    if body.max_tokens is not None or body.replay_token_ids is not None:
        return body.max_tokens
    return max(1, min(DEFAULT_MAX_TOKENS, max_model_len - num_prompt_tokens))


def _without_finish(choice: CompletionChoice) -> CompletionChoice:
    return msgspec.structs.replace(choice, finish_reason=None, stop_reason=None)


def _without_text(choice: CompletionChoice) -> CompletionChoice:
    return msgspec.structs.replace(choice, text="", logprobs=None, token_ids=UNSET, prompt_token_ids=UNSET)
