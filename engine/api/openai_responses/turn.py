"""One request of the Responses API: from its body to the conversation that is generated, and from what the
engine gives to events and to the response that is kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import replace
from time import time

from msgspec import UNSET
from msgspec.structs import replace as changed

from engine.api.answer_reader import AnswerOutput
from engine.api.conversation import Conversation
from engine.api.conversation_turn import ConversationTurn, TurnOutput
from engine.api.errors import CONTEXT_LENGTH_EXCEEDED, explain
from engine.api.http.streams import begun
from engine.api.left_out import LeftOut
from engine.api.openai.bodies import ChatTokenLogprob, receipt_fields
from engine.api.openai.logprobs import chat_logprobs
from engine.api.openai_responses.conversation_lock import ConversationLock
from engine.api.openai_responses.events import (
    ErrorEvent,
    Event,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from engine.api.openai_responses.history import History, load_history
from engine.api.openai_responses.items import (
    ENDED,
    ConversationId,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
    new_response_id,
)
from engine.api.openai_responses.reply import Reply
from engine.api.openai_responses.request import REASONING_SEALED, ResponsesRequest
from engine.api.openai_responses.store import ResponseStore, StoredResponse
from engine.api.openai_responses.tools import Tools
from engine.api.openai_responses.truncation import without_oldest
from engine.api.served_model import ServedModel
from engine.api.usage import TurnUsage
from engine.errors import ContextLengthError, RequestError
from engine.messages import TurnReceipt
from engine.sampling_params import RequestOutputKind

_LAST_EVENTS = {"completed": ResponseCompleted, "incomplete": ResponseIncomplete}
"""By status; all others end with ``response.failed``."""


class ResponseTurn:
    """A request on its way. Used once: by ``whole`` or by ``events``, or else given up."""

    def __init__(
        self,
        model: ServedModel,
        store: ResponseStore,
        body: ResponsesRequest,
        history: History,
        headers: Mapping[str, str],
        response_id: str,
        lock: ConversationLock | None,
    ) -> None:
        self._model = model
        self._store = store
        self._body = body
        self._history = history
        self._lock = lock
        """Of its conversation, if it was begun in one."""
        self._tools = Tools()
        self._conversation = self._read(headers, response_id)
        self._reply = Reply(response_id, self._tools, seals_reasoning=body.includes(REASONING_SEALED))
        self.patience = model.patience()
        """Of its answer, if that is a stream."""
        self._number = 0
        self._is_kept = False
        self._has_told_its_end = False
        self.response = self._blank(response_id)
        """As far as it is known; each state is another object."""

    @classmethod
    async def begin(
        cls, model: ServedModel, store: ResponseStore, body: ResponsesRequest, headers: Mapping[str, str]
    ) -> ResponseTurn:
        """The next turn, which has its conversation to itself until it has ended or was given up.

        RequestError if it cannot be made, as far as that is seen before the engine has it.
        """
        named, response_id = body.conversation_name, new_response_id()
        lock = None if named is None else await ConversationLock.take(store, named, response_id)
        try:
            history = await load_history(store, body, response_id)
            return cls(model, store, body, history, headers, response_id, lock)
        except BaseException:
            if lock is not None:
                await lock.release()
            raise

    @classmethod
    async def sketch(
        cls, model: ServedModel, store: ResponseStore, body: ResponsesRequest, headers: Mapping[str, str]
    ) -> ResponseTurn:
        """What the next turn would be: it may be counted, not made."""
        response_id = new_response_id()
        history = await load_history(store, body, response_id)
        return cls(model, store, body, history, headers, response_id, lock=None)

    async def give_up(self) -> None:
        """It will not be made."""
        if self._lock is not None:
            await self._lock.release()

    # ---- what is asked ----

    def _read(self, headers: Mapping[str, str], response_id: str) -> Conversation:
        """The request in no dialect."""
        body, previous = self._body, self._history.previous
        left_out = LeftOut()
        messages = self._history.messages(body.instructions, left_out)
        if not messages.messages:
            raise RequestError(
                "input has nothing that the model can be shown: thoughts without text and records of what "
                "other servers did are left out.",
                "input",
            )
        self._tools.add(body.tools or [], "tools")
        for tools, where in messages.tools:
            self._tools.add(tools, where)
        choice = self._tools.choose(body.tool_choice)
        params = body.sampling_params(self._model.sampling_defaults(), body.num_logprobs())
        self._model.check_params(params)  # also of one in the background, whose faults nobody is told later
        return Conversation(
            request_id=response_id,
            messages=messages.messages,
            params=params,
            tools=self._tools.functions or None,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            context=self._model.context(headers, body.identity_after(previous.job_id if previous else None)),
            chat_template_kwargs=body.template_kwargs(),
            left_out=[*left_out.notes, *self._tools.warnings],
        )

    def _blank(self, response_id: str) -> Response:
        body, params = self._body, self._conversation.params
        named = body.conversation_name
        return Response(
            id=response_id,
            created_at=int(time()),
            status="queued" if body.background else "in_progress",
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.output_limit(),
            max_tool_calls=body.max_tool_calls,
            model=self._model.name,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            conversation=None if named is None else ConversationId(named),
            prompt_cache_key=body.prompt_cache_key if isinstance(body.prompt_cache_key, str) else None,
            reasoning=body.echoed_reasoning(),
            safety_identifier=body.safety_identifier,
            store=body.keeps,
            temperature=params.temperature,
            text=body.echoed_text(),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
            metadata=body.metadata or {},
            warnings=self._tools.warnings or UNSET,
        )

    # ---- what comes of it ----

    async def count_input_tokens(self) -> int:
        """Length of the prompt."""
        return await ConversationTurn(self._model, self._conversation).count()

    async def whole(self) -> Response:
        """The complete response. What goes wrong is raised."""
        async for _ in self.events():
            pass
        return self.response

    async def to_the_end(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """The events; what goes wrong becomes the last ones."""
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except Exception as error:
            for event in await self._fail(error):
                yield event

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events up to the response's end; the first ones come with the engine's first output, unless it
        runs in the background."""
        held = nullcontext() if self._lock is None else self._lock.renewed()
        async with held, aclosing(self._made()) as made:
            async for event in made:
                yield event

    async def _made(self) -> AsyncGenerator[Event, None]:
        if self._body.background:
            await self._keep()
            yield self._numbered(ResponseCreated(response=self.response))
            yield self._numbered(ResponseQueued(response=self.response))
        last: TurnOutput | None = None
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                if last is None:
                    for event in await self._start():
                        yield event
                last = output
                answer = output.answers[0]
                for news in self._reply.add(answer.deltas, self._logprobs(answer)):
                    yield self._numbered(news)
        assert last is not None, "the engine ends a request with an output"
        async for event in self._end(last):
            yield event

    async def _outputs(self) -> AsyncGenerator[TurnOutput, None]:
        """The engine's outputs; what does not fit is left out if the client agreed to that."""
        # One that runs in the background tells when it begins to run, whoever listens.
        body = self._body
        by_step = body.stream or body.background or self._conversation.params.logprobs is not None
        kind = RequestOutputKind.DELTA if by_step else RequestOutputKind.FINAL_ONLY
        conversation = self._conversation
        while True:
            try:
                turn = ConversationTurn(self._model, conversation, self.patience.taken)
                outputs = await begun(turn.stream(kind))
                break
            except ContextLengthError as error:
                shorter = without_oldest(conversation.messages) if body.truncation == "auto" else None
                if shorter is None:
                    raise _named_as_asked(error, body) from None
                conversation = replace(conversation, messages=shorter)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    def _logprobs(self, answer: AnswerOutput) -> list[ChatTokenLogprob]:
        logprobs = chat_logprobs(answer.raw.logprobs, self._body.return_tokens_as_token_ids)
        return [] if logprobs is None else logprobs.content

    async def _start(self) -> list[Event]:
        self.response = changed(self.response, status="in_progress")
        in_progress = ResponseInProgress(response=self.response)
        if self._body.background:
            await self._keep()
            return [self._numbered(in_progress)]
        return [self._numbered(ResponseCreated(response=self.response)), self._numbered(in_progress)]

    async def _end(self, last: TurnOutput) -> AsyncGenerator[Event, None]:
        """The last events. The response is kept before its client can ask for it."""
        cut_off = last.answers[0].finish_reason == "length"
        for event in self._reply.end("incomplete" if cut_off else "completed"):
            yield self._numbered(event)
        self.response = changed(
            self.response,
            status="incomplete" if cut_off else "completed",
            completed_at=None if cut_off else int(time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut_off else None,
            output=self._reply.items,
            usage=_usage(last.usage, last.receipt),
        )
        await self._keep(last.receipt)
        for event in self._last_events():
            yield event

    async def _fail(self, error: Exception) -> list[Event]:
        failure = explain(error)
        code = _error_code(error, failure.status)
        # Clients want to be told of a response before they are told of its end.
        begun = [] if self._number else [self._numbered(ResponseCreated(response=self.response))]
        self.response = changed(
            self.response,
            status="failed",
            output=self._reply.items,
            error=ResponseError(code=code, message=failure.message, param=failure.field),
        )
        await self._keep()
        told = ErrorEvent(code=code, message=failure.message, param=failure.field)
        return [*begun, self._numbered(told), *self._last_events()]

    def _last_events(self) -> list[Event]:
        """The one that tells of the response's end, once."""
        if self._has_told_its_end:
            return []
        self._has_told_its_end = True
        kind = _LAST_EVENTS.get(self.response.status, ResponseFailed)
        return [self._numbered(kind(response=self.response))]

    async def cancelled(self) -> list[Event]:
        """The last events of a run that was ended from outside. Its response is kept unless it was deleted;
        it stays as it is if it had just ended by itself."""
        if self.response.status not in ENDED:
            self.response = changed(self.response, status="cancelled", output=self._reply.items)
        await self._keep()
        return self._last_events()

    def _numbered(self, event: Event) -> Event:
        event.sequence_number = self._number
        self._number += 1
        return event

    async def _keep(self, receipt: TurnReceipt | None = None) -> None:
        if not self._body.keeps:
            return
        previous, job = self._history.previous, self._conversation.context.job
        said = job.job_id if job is not None else None
        stored = StoredResponse(
            response=self.response,
            input=self._history.own,
            previous_id=previous.response.id if previous else None,
            job_id=receipt.job_id if receipt is not None else said,
        )
        if self._is_kept:
            await self._store.update(stored)  # a response that was deleted meanwhile does not come back
        else:
            self._is_kept = True
            await self._store.put(stored)


def _named_as_asked(error: ContextLengthError, body: ResponsesRequest) -> ContextLengthError:
    """The limit of the output under the name that the client gave it."""
    if error.field == "max_tokens" and body.max_output_tokens is not None:
        return ContextLengthError(str(error), "max_output_tokens")
    return error


def _usage(usage: TurnUsage, receipt: TurnReceipt | None) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.cached_tokens,
            cache_write_tokens=max(0, usage.prompt_tokens - usage.cached_tokens),
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        receipt=receipt_fields(receipt, usage.left_out),
    )


def _error_code(error: Exception, status: int) -> str:
    """OpenAI's word for it, on which clients decide whether to try again."""
    if isinstance(error, ContextLengthError):
        return CONTEXT_LENGTH_EXCEEDED
    return "invalid_prompt" if status < 500 else "server_error"
