"""POST /v1/messages and /v1/messages/count_tokens: a turn of a conversation in Anthropic's format."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.api.anthropic.bodies import TokenCount
from engine.api.anthropic.cache_inquiry import CacheInquiry
from engine.api.anthropic.input import read_history
from engine.api.anthropic.request import MessagesRequest, PromptRequest, ToolChoice
from engine.api.anthropic.tools import Tool, function_tools
from engine.api.anthropic.turn import MessageAnswer, MessageTerms
from engine.api.endpoints import endpoint, json_response, model_of, read_body
from engine.api.errors import ApiFormat
from engine.api.field_names import renamed_fields
from engine.api.http.connection import EventStream, while_connected
from engine.api.http.streams import begun
from engine.api.service.model import Model
from engine.api.turn.conversation import Conversation, NamedTool
from engine.api.turn.conversation import ToolChoice as ConversationToolChoice
from engine.api.turn.conversation_turn import ConversationTurn
from engine.errors import RequestError
from engine.records.messages import NO_CONTEXT, RequestContext
from engine.records.sampling_params import SamplingParams

router = APIRouter()

_FIELD_NAMES = {"prompt": "messages", "stop": "stop_sequences"}
"""The clients' names for the engine's fields."""


@endpoint(router, "POST", "/v1/messages", body=MessagesRequest)
async def create_message(request: Request) -> Response:
    """The next message of a conversation, in Anthropic's format."""
    body = await read_body(request, MessagesRequest)
    model = model_of(request, body.model)
    context = model.context(request.headers, body.identity())
    request_id = f"msg_{request.state.request_id}"
    params = body.sampling_params(model.server.sampling_defaults())
    conversation = _conversation(model, body, request_id, params, context)
    patience = model.server.patience()
    turn = ConversationTurn(model, conversation, patience.accepted)
    inquiry = await CacheInquiry.begin(request, model, body, conversation)
    answer = MessageAnswer(_terms(model, body, request, request_id), inquiry)

    async def respond() -> Response:
        with renamed_fields(_FIELD_NAMES):
            if not body.stream:
                return json_response(await answer.whole(await turn.whole()))
            turns = await begun(turn.stream(), patience)
        said_early = turn.num_prompt_tokens if patience.is_over else None
        events = answer.events(turns, said_early)
        return EventStream(events, ApiFormat.ANTHROPIC, request.state.request_id, answer.sign_of_life)

    return await while_connected(request, respond())


@endpoint(router, "POST", "/v1/messages/count_tokens", body=PromptRequest)
async def count_message_tokens(request: Request) -> Response:
    """The number of input tokens of a message, counted without the engine core."""
    body = await read_body(request, PromptRequest)
    model = model_of(request, body.model)
    conversation = _conversation(model, body, request.state.request_id, SamplingParams(), NO_CONTEXT)

    async def count() -> Response:
        return json_response(TokenCount(await ConversationTurn(model, conversation).count()))

    return await while_connected(request, count())


def _conversation(
    model: Model,
    body: PromptRequest,
    request_id: str,
    params: SamplingParams,
    context: RequestContext,
) -> Conversation:
    """Builds the conversation, independent of the API."""
    left_out = model.server.left_out()
    history = read_history(body.system, body.messages, left_out)
    tools = function_tools(body.tools, left_out)
    if body.mcp_servers:
        left_out.add("mcp_servers", "this server does not run tools of MCP servers")
    return Conversation(
        request_id=request_id,
        messages=history.messages,
        params=params,
        tools=tools,
        tool_choice=_tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls(),
        context=context,
        chat_template=body.chat_template,
        chat_template_kwargs=body.template_kwargs(model.server.config.messages_default_thinking),
        add_generation_prompt=not history.continues_reply,
        continue_final_message=history.continues_reply,
        is_open=context.job is not None and context.job.prewarms,
        fits_context=True,
        thinking_budget=body.thinking_budget(),
        left_out=left_out.notes,
        media=left_out.media,
    )


def _tool_choice(choice: ToolChoice | None, tools: list[Tool] | None) -> ConversationToolChoice:
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if not tools:
        raise RequestError(f"tool_choice {choice.type!r} needs tools.", "tool_choice")
    if choice.type == "any":
        return "required"
    if choice.name is None or choice.name not in [tool["function"]["name"] for tool in tools]:
        raise RequestError("tool_choice.name must be the name of one of the tools.", "tool_choice.name")
    return NamedTool(choice.name)


def _terms(model: Model, body: MessagesRequest, request: Request, message_id: str) -> MessageTerms:
    omits = body.thinking is not None and body.thinking.display == "omitted"
    caches = body.last_breakpoint() is not None and model.server.engine.config.cache.enable_prefix_caching
    return MessageTerms(
        message_id=message_id,
        model_name=body.model or model.name,
        max_tokens=body.max_tokens,
        max_model_len=model.server.max_model_len,
        stop_sequences=body.stop_sequences or [],
        cache_block_tokens=model.server.engine.ready.block_size if caches else None,
        asked_lifetime_s=body.asked_lifetime_s(),
        omits_thinking=omits or "redact-thinking" in request.headers.get("anthropic-beta", ""),
        returns_token_ids=bool(body.return_token_ids),
    )
