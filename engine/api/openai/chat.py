"""POST /v1/chat/completions: a turn of a conversation in OpenAI's chat format, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from time import time

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of, read_body
from engine.api.field_names import renamed_fields
from engine.api.http import sse
from engine.api.http.connection import EventStream, while_connected
from engine.api.http.streams import begun
from engine.api.openai.allowed_tools import read_tool_choice
from engine.api.openai.bodies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCallItem,
    ToolCallItemDelta,
    Usage,
)
from engine.api.openai.chat_parts import texts_only
from engine.api.openai.logprobs import chat_logprobs, prompt_logprobs
from engine.api.openai.protocol import ChatCompletionRequest
from engine.api.openai.routed_experts import encoded_experts
from engine.api.service.model import Model
from engine.api.turn.answer_reader import AnswerOutput
from engine.api.turn.conversation import Conversation
from engine.api.turn.conversation_turn import ConversationTurn, TurnOutput
from engine.api.turn.usage import usage_of
from engine.records.messages import RequestContext
from engine.tool_parsers import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta

router = APIRouter()


@endpoint(router, "POST", "/v1/chat/completions", body=ChatCompletionRequest)
async def create_chat_completion(request: Request) -> Response:
    """The next message of a conversation."""
    body = await read_body(request, ChatCompletionRequest)
    model = model_of(request, body.model)
    context = model.context(request.headers, body.identity())
    answer = ChatAnswer(model, body, request.state.request_id, context)
    patience = model.server.patience()
    conversation = answer.conversation()
    turn = ConversationTurn(model, conversation, patience.accepted)

    async def respond() -> Response:
        with renamed_fields(body.field_names()):
            if not body.stream:
                return json_response(answer.whole(await turn.whole()))
            return EventStream(answer.events(await begun(turn.stream(), patience)))

    return await while_connected(request, respond())


class ChatAnswer:
    """One chat request: reads OpenAI's body and writes the turn's outputs in OpenAI's format."""

    def __init__(
        self, model: Model, body: ChatCompletionRequest, request_id: str, context: RequestContext
    ) -> None:
        self._model = model
        self._body = body
        self._tier = model.served_tier(body.service_tier, body.priority, context) or UNSET
        self._context = context
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time())
        self._left_out = model.server.left_out()
        self._tells_usage = body.continuous_usage
        self._frame = sse.Frame(self._chunk([], None))

    def conversation(self) -> Conversation:
        """Builds the conversation, independent of the API."""
        body = self._body
        return Conversation(
            request_id=self._id,
            messages=texts_only(body.messages, self._left_out),
            params=body.sampling_params(self._model.server.sampling_defaults(), body.num_logprobs()),
            tools=body.offered_tools(),
            tool_choice=read_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            context=self._context,
            chat_template=body.chat_template,
            chat_template_kwargs=body.template_kwargs(),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            is_open=body.prewarms,
            thinking_budget=body.thinking_budget(),
            include_reasoning=body.include_reasoning,
            left_out=self._left_out.notes,
            media=self._left_out.media,
        )

    def whole(self, turn: TurnOutput) -> ChatCompletion:
        """Returns the response body of a turn that is complete."""
        told = turn.output.prompt_logprobs
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=[self._choice(answer) for answer in turn.answers],
            usage=self._usage(turn),
            service_tier=self._tier,
            prompt_token_ids=turn.output.prompt_token_ids if self._body.return_token_ids else UNSET,
            kv_transfer_params=turn.output.kv_transfer_params or UNSET,
            prompt_logprobs=UNSET if told is None else prompt_logprobs(told),
        )

    def _choice(self, answer: AnswerOutput) -> ChatChoice:
        reply = answer.reply
        raw = answer.raw
        calls = [
            ToolCallItem(id=call.call_id, function=FunctionCall(call.name, call.arguments))
            for call in reply.calls
        ]
        reasoning = reply.reasoning if self._body.include_reasoning else ""
        return ChatChoice(
            index=answer.index,
            message=ChatMessage(
                content=reply.content if reply.content or not calls else None,
                reasoning=reasoning or UNSET,
                reasoning_content=reasoning or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=chat_logprobs(raw.logprobs, self._body.return_tokens_as_token_ids),
            finish_reason=answer.finish_reason or "stop",
            stop_reason=answer.stop_reason,
            token_ids=raw.token_ids if self._body.return_token_ids else UNSET,
            routed_experts=encoded_experts(raw.routed_experts),
        )

    async def events(self, turns: AsyncGenerator[TurnOutput, None]) -> AsyncGenerator[bytes, None]:
        """Yields the response as server-sent events."""
        last: TurnOutput | None = None
        async with aclosing(turns):
            async for turn in turns:
                if last is None:
                    for event in self._roles(turn):
                        yield event
                last = turn
                for answer in turn.answers:
                    for choice in self._chunk_choices(answer):
                        yield self._event(choice, turn)
        if last is not None and last.output.kv_transfer_params is not None:
            chunk = self._chunk([], None)
            chunk.kv_transfer_params = last.output.kv_transfer_params
            yield sse.event(chunk)
        if last is not None and self._body.include_usage:
            yield sse.event(self._chunk([], self._usage(last)))

    def _roles(self, turn: TurnOutput) -> Iterator[bytes]:
        prompt = turn.output.prompt_token_ids if self._body.return_token_ids else UNSET
        for index in range(self._body.n or 1):
            choice = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            chunk = self._chunk([choice], self._running_usage(turn))
            chunk.prompt_token_ids = prompt
            yield sse.event(chunk)

    def _chunk_choices(self, answer: AnswerOutput) -> Iterator[ChatChunkChoice]:
        """Yields chunks for the new part of an answer and for its end: none, one or both."""
        raw = answer.raw
        delta = chat_delta(answer.deltas)
        logprobs = chat_logprobs(raw.logprobs, self._body.return_tokens_as_token_ids)
        with_tokens = bool(self._body.return_token_ids and raw.token_ids)
        if delta is not None or logprobs is not None or with_tokens:
            yield ChatChunkChoice(
                index=answer.index,
                delta=delta or ChatDelta(),
                logprobs=logprobs,
                token_ids=raw.token_ids if with_tokens else UNSET,
            )
        if answer.finish_reason is not None:
            yield ChatChunkChoice(
                index=answer.index,
                delta=ChatDelta(),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
            )

    def _event(self, choice: ChatChunkChoice, turn: TurnOutput) -> bytes:
        if self._tells_usage:
            return sse.event(self._chunk([choice], self._usage(turn)))
        return self._frame.event(choice)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=choices,
            usage=usage or UNSET,
            service_tier=self._tier,
        )

    def _running_usage(self, turn: TurnOutput) -> Usage | None:
        return self._usage(turn) if self._tells_usage else None

    def _usage(self, turn: TurnOutput) -> Usage:
        return usage_of(turn.usage, turn.receipt)


def chat_delta(deltas: list[ReplyDelta]) -> ChatDelta | None:
    """Merges the deltas of one output; None if nothing is to be sent."""
    if len(deltas) == 1 and isinstance(deltas[0], ContentDelta):  # the usual case
        return ChatDelta(content=deltas[0].text) if deltas[0].text else None
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls: list[ToolCallItemDelta] = []
    for delta in deltas:
        if not isinstance(delta, ToolCallDelta):
            continue
        if calls and calls[-1].index == delta.index:
            calls[-1].function.arguments += delta.arguments
        else:
            calls.append(_call_delta(delta))
    if not content and not reasoning and not calls:
        return None
    return ChatDelta(
        content=content or UNSET,
        reasoning=reasoning or UNSET,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _call_delta(delta: ToolCallDelta) -> ToolCallItemDelta:
    if delta.name is None:
        return ToolCallItemDelta(index=delta.index, function=FunctionDelta(arguments=delta.arguments))
    function = FunctionDelta(name=delta.name, arguments=delta.arguments)
    return ToolCallItemDelta(index=delta.index, id=delta.call_id or UNSET, type="function", function=function)
