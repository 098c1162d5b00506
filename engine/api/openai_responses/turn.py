"""One request of the Responses API: from its body to a conversation, and from the engine's outputs to events
and the stored response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from time import time

from msgspec import UNSET, UnsetType
from msgspec.structs import replace as changed

from engine.api.errors import CONTEXT_LENGTH_EXCEEDED, RATE_LIMIT_EXCEEDED, explain
from engine.api.http.streams import begun
from engine.api.openai.bodies import ChatTokenLogprob
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
from engine.api.openai_responses.input_items import MessageList
from engine.api.openai_responses.items import (
    ENDED,
    ConversationId,
    IncompleteDetails,
    Response,
    ResponseError,
    new_response_id,
)
from engine.api.openai_responses.known_turns import KnownTurn, KnownTurns, asked_of, known_turn
from engine.api.openai_responses.prompt_cache import PromptCacheDiagnostics, told_diagnosis
from engine.api.openai_responses.reply import Reply
from engine.api.openai_responses.request import REASONING_SEALED, ResponsesRequest
from engine.api.openai_responses.response_usage import usage_of_response
from engine.api.openai_responses.store import ResponseStore, StoredResponse
from engine.api.openai_responses.tools import Tools
from engine.api.openai_responses.truncation import without_oldest
from engine.api.prompt_cache.diagnostics import CacheDiagnostics
from engine.api.prompt_cache.fingerprint import PromptPrint
from engine.api.service.model import Model
from engine.api.turn.answer_reader import AnswerOutput
from engine.api.turn.conversation import ContinuedPrompt, Conversation
from engine.api.turn.conversation_turn import ConversationTurn, TurnOutput
from engine.errors import ContextLengthError, RequestError, TooLateError
from engine.records.messages import TurnReceipt
from engine.records.sampling_params import RequestOutputKind

_LAST_EVENTS = {"completed": ResponseCompleted, "incomplete": ResponseIncomplete}
"""The last event by status; other responses end with ``response.failed``."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The sender of a request and its model: the inputs of a turn besides the body."""

    model: Model
    store: ResponseStore
    turns: KnownTurns
    headers: Mapping[str, str]
    diagnostics: CacheDiagnostics


class ResponseTurn:
    """Runs one request. An instance is used once: by ``whole``, by ``events``, or it is given up."""

    def __init__(
        self,
        asker: Asker,
        body: ResponsesRequest,
        history: History,
        response_id: str,
        lock: ConversationLock | None,
    ) -> None:
        self._asker = asker
        self._model = model = asker.model
        self._store = asker.store
        self._body = body
        self._history = history
        self._diagnostics = asker.diagnostics
        self._lock = lock
        """The lock of its conversation, if it belongs to one."""
        self._tools = Tools()
        self._messages = MessageList(None)
        self._conversation = self._read(asker.headers, response_id)
        self._reply_ids: list[int] = []
        self._reply = self._new_reply(response_id)
        self.patience = model.server.patience()
        """The maximum wait of its stream for the first output."""
        self._is_compacted = False
        """Whether the oldest part of the conversation was left out."""
        self._number = 0
        self._is_kept = False
        self._has_told_its_end = False
        self.response = self._blank(response_id)
        """The response so far; each state is a new object."""

    @classmethod
    async def begin(cls, asker: Asker, body: ResponsesRequest) -> ResponseTurn:
        """Starts the next turn, which locks its conversation until it ends or is given up.

        RequestError for errors found before the engine receives it.
        """
        named = body.conversation_name
        response_id = new_response_id()
        lock = None if named is None else await ConversationLock.take(asker.store, named, response_id)
        try:
            history = await load_history(asker.store, body, response_id, asker.turns)
            turn = cls(asker, body, history, response_id, lock)
            if history.known is not None and not await turn._continue(history.known):
                await turn._load_all()
            return turn
        except BaseException:
            if lock is not None:
                await lock.release()
            raise

    @classmethod
    async def sketch(cls, asker: Asker, body: ResponsesRequest) -> ResponseTurn:
        """Returns the next turn for counting only; it is not run."""
        response_id = new_response_id()
        history = await load_history(asker.store, body, response_id)
        return cls(asker, body, history, response_id, lock=None)

    async def give_up(self) -> None:
        """Gives the turn up and unlocks its conversation."""
        if self._lock is not None:
            await self._lock.release()

    # ---- the request ----

    def _read(self, headers: Mapping[str, str], response_id: str) -> Conversation:
        """Builds the conversation, independent of the API."""
        body = self._body
        previous = self._history.previous
        known = self._history.known
        left_out = self._model.server.left_out()
        messages = self._history.messages(body.instructions, left_out)
        if not messages.messages:
            raise RequestError(
                "input has nothing to show to the model: reasoning without text, and records of tools that "
                "other servers ran, are left out.",
                "input",
            )
        self._tools.add(body.tools or [], "tools")
        for tools, where in messages.tools:
            self._tools.add(tools, where)
        self._messages = messages
        params = body.sampling_params(self._model.server.sampling_defaults(), body.num_logprobs())
        enforces = params.structured_outputs is None and self._model.server.enforces_texts
        choice = self._tools.choose(body.tool_choice, enforces_texts=enforces)
        self._model.server.check_params(params)  # a background response could not report the error later
        return Conversation(
            request_id=response_id,
            messages=messages.messages,
            params=params,
            tools=self._tools.functions or None,
            tool_choice=choice,
            free_inputs=self._tools.free_inputs,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            context=changed(
                self._model.context(headers, body.identity_after(previous.job_id if previous else None)),
                keeps_tokens=body.keeps and not body.prewarms,
            ),
            is_open=body.prewarms,
            chat_template_kwargs=body.template_kwargs(),
            thinking_budget=body.thinking_budget(),
            left_out=[*(known.left_out if known else ()), *left_out.notes, *self._tools.warnings],
            media=left_out.media,
        )

    def _new_reply(self, response_id: str) -> Reply:
        return Reply(response_id, self._tools, seals_reasoning=self._body.includes(REASONING_SEALED))

    async def _continue(self, known: KnownTurn) -> bool:
        """Makes the prompt append to the previous turn; False if it must be rendered as a whole."""
        conversation = self._conversation
        tokens = None
        is_text = not (self._messages.tools or conversation.has_media)
        if is_text and known.asked == self._asked():
            owner = conversation.context.owner
            tokens = await self._model.server.prompts.continue_chat(known.prompt, conversation, owner=owner)
        self._model.server.metrics.record_continued_prompt(appended=tokens is not None)
        if tokens is None:
            return False
        continued = ContinuedPrompt(tokens, known.num_replies, known.num_results, known.fingerprint)
        self._conversation = replace(conversation, continued=continued)
        return True

    def _asked(self) -> bytes:
        return asked_of(self._conversation, self._body.instructions, self._model.name)

    def _served_tier(self) -> str | None:
        body = self._body
        return self._model.served_tier(body.service_tier, body.priority, self._conversation.context)

    def _blank(self, response_id: str) -> Response:
        body = self._body
        params = self._conversation.params
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
            prompt_cache_options=body.echoed_cache_options(),
            prompt_cache_retention=body.prompt_cache_retention or UNSET,
            reasoning=body.echoed_reasoning(),
            safety_identifier=body.safety_identifier,
            service_tier=self._served_tier() or "default",
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

    # ---- the response ----

    async def count_input_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return await ConversationTurn(self._model, self._conversation).count()

    async def whole(self) -> Response:
        """Runs the turn and returns the complete response; raises errors."""
        async for _ in self.events():
            pass
        return self.response

    async def to_the_end(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yields the events; an error becomes the last ones."""
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except Exception as error:
            for event in await self._fail(error):
                yield event

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields the events up to the end. The first ones come with the engine's first output, unless the
        response runs in the background."""
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
                self._reply_ids += answer.raw.token_ids
                for news in self._reply.add(answer.deltas, self._logprobs(answer)):
                    yield self._numbered(news)
        assert last is not None, "the engine ends a request with an output"
        async for event in self._end(last):
            yield event

    async def _outputs(self) -> AsyncGenerator[TurnOutput, None]:
        """Yields the engine's outputs. Truncates a conversation that is too long if the client allows it."""
        # A background response reports when it starts to run.
        body = self._body
        by_step = body.stream or body.background or self._conversation.params.logprobs is not None
        kind = RequestOutputKind.DELTA if by_step else RequestOutputKind.FINAL_ONLY
        while True:
            try:
                turn = ConversationTurn(self._model, self._conversation, self.patience.accepted)
                outputs = await begun(turn.stream(kind))
                break
            except ContextLengthError as error:
                if self._conversation.continued is not None:
                    await self._load_all()
                    continue
                whole = self._conversation.messages
                shorter = without_oldest(whole) if body.truncation == "auto" else None
                if shorter is None:
                    raise body.named(error) from None
                self._conversation = replace(self._conversation, messages=shorter)
                self._is_compacted = True
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _load_all(self) -> None:
        """Reads the whole history, because the prompt cannot append to the previous turn."""
        self._history = await load_history(self._store, self._body, self.response.id)
        self._tools = Tools()
        self._conversation = self._read(self._asker.headers, self.response.id)
        self._reply = self._new_reply(self.response.id)

    def _logprobs(self, answer: AnswerOutput) -> list[ChatTokenLogprob]:
        logprobs = chat_logprobs(answer.raw.logprobs, self._body.return_tokens_as_token_ids)
        return [] if logprobs is None else logprobs.content

    async def _start(self) -> list[Event]:
        self.response = changed(self.response, status="in_progress")
        in_progress = ResponseInProgress(response=self.response)
        if self._body.background:
            await self._keep()
            return [self._numbered(in_progress)]
        return [*self._created(), self._numbered(in_progress)]

    def _created(self) -> list[Event]:
        """The response's first event, if none was sent yet."""
        return [] if self._number else [self._numbered(ResponseCreated(response=self.response))]

    def sign_of_life(self) -> bytes:
        """Returns an event that changes nothing, numbered like the others."""
        kind = ResponseInProgress if self._number else ResponseCreated
        return self._numbered(kind(response=self.response)).encode()

    async def _end(self, last: TurnOutput) -> AsyncGenerator[Event, None]:
        """Yields the last events. The response is stored before its client can request it."""
        cut_off = last.answers[0].finish_reason == "length" and not self._body.prewarms
        if not self._body.prewarms:
            for event in self._reply.end("incomplete" if cut_off else "completed"):
                yield self._numbered(event)
        self.response = changed(
            self.response,
            status="incomplete" if cut_off else "completed",
            completed_at=None if cut_off else int(time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut_off else None,
            output=self._reply.items,
            usage=usage_of_response(last.usage, last.receipt),
            kv_transfer_params=last.output.kv_transfer_params or UNSET,
            prompt_cache_diagnostics=await self._diagnose(last),
        )
        await self._keep(last.receipt)
        for event in self._last_events():
            yield event

    async def _diagnose(self, last: TurnOutput) -> PromptCacheDiagnostics | UnsetType:
        """Diagnoses why the prompt named for comparison was not reused, if one is named. Keeps this prompt
        for later."""
        conversation = self._conversation
        compared = self._body.compared_with
        told: PromptCacheDiagnostics | UnsetType = UNSET
        if compared is not None:
            earlier = await self._diagnostics.earlier(compared)
            diagnosis = self._diagnostics.diagnose(earlier, conversation, last)
            told = told_diagnosis(diagnosis, is_compacted=self._is_compacted)
        if self._body.keeps or self._body.prompt_cache_options is not None:
            kept = await self._diagnostics.keep(self.response.id, conversation, last)
            self._let_append(last, kept)
        return told

    def _let_append(self, last: TurnOutput, kept: PromptPrint) -> None:
        """Lets the next turn's prompt append to this one's."""
        if self._body.keeps and not self._body.prewarms and not self._is_compacted:
            turn = known_turn(
                self._conversation,
                self._history.known,
                [turn.response.id for turn in self._history.before],
                self._asked(),
                self._messages,
                last,
                self._reply_ids,
                kept,
            )
            if turn is not None:
                self._asker.turns.put(self.response.id, turn)

    async def _fail(self, error: Exception) -> list[Event]:
        failure = explain(error)
        code = _error_code(error, failure.status)
        # Clients expect a response's first event before its last.
        created = self._created()
        self.response = changed(
            self.response,
            status="failed",
            output=self._reply.items,
            error=ResponseError(code=code, message=failure.message, param=failure.field),
        )
        await self._keep()
        event = ErrorEvent(code=code, message=failure.message, param=failure.field)
        return [*created, self._numbered(event), *self._last_events()]

    def _last_events(self) -> list[Event]:
        """Returns the event of the response's end, only once."""
        if self._has_told_its_end:
            return []
        self._has_told_its_end = True
        kind = _LAST_EVENTS.get(self.response.status, ResponseFailed)
        return [self._numbered(kind(response=self.response))]

    async def cancelled(self) -> list[Event]:
        """Returns the last events of a cancelled run. Stores its response unless it was deleted; a response
        that had just completed stays completed."""
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
        previous = self._history.previous
        job = self._conversation.context.job
        job_id = job.job_id if job is not None else None
        stored = StoredResponse(
            response=self.response,
            input=self._history.own,
            previous_id=previous.response.id if previous else None,
            job_id=receipt.job_id if receipt is not None else job_id,
        )
        if self._is_kept:
            await self._store.update(stored)  # a deleted response is not stored again
        else:
            self._is_kept = True
            await self._store.put(stored)


def _error_code(error: Exception, status: int) -> str:
    """OpenAI's error code, from which clients decide whether to retry."""
    if isinstance(error, ContextLengthError):
        return CONTEXT_LENGTH_EXCEEDED
    if isinstance(error, TooLateError):
        return RATE_LIMIT_EXCEEDED
    return "invalid_prompt" if status < 500 else "server_error"
