"""The engine as the endpoints use it: one model under its public names, the turns of jobs, a way to end all.

It must not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from time import time
from typing import cast

from engine.api.chat_messages import Message, normalise
from engine.api.config import ServerConfig
from engine.api.core_pulse import CorePulse
from engine.api.errors import ModelNotFoundError, RequestTimeoutError, ServerClosingError
from engine.api.http.auth import ApiKeys
from engine.api.http.streams import Patience
from engine.api.identity import ClientIdentity, request_context
from engine.api.limits import Admission, Seat
from engine.api.prefix_killers import BILLING_HEADER, without_billing_header
from engine.api.processes.load_board import LoadBoard, Tally
from engine.api.processes.siblings import ALONE, Siblings
from engine.api.strict_templates import in_some_shape
from engine.api.system_messages import with_one_system
from engine.async_llm import AsyncLLM
from engine.content_format import ContentFormat
from engine.errors import ContextLengthError, EngineDeadError, RequestError
from engine.input_processor import may_fit, prompt_too_long
from engine.messages import RequestContext, ToolCall, TurnReceipt
from engine.metrics import Metrics
from engine.request_output import RequestOutput
from engine.sampling_params import SamplingParams
from engine.tool_parsers.formats import ReplyFormat

INLINE_CHARS = 4096
"""Longer texts are tokenised on another thread, so that the other streams go on."""
MAX_COUNTED_CHARS = 2**20
"""Of a prompt that cannot fit: so much is tokenised to say how long it is, in less than a second."""
INLINE_MESSAGES = 32
"""Longer chats are also rendered there."""
MAX_LISTED_TOKENS = 4 * 2**20
"""Of one text; a body of the default limit may hold eight times as many."""


class ServedModel:
    """What a request needs of the engine."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, siblings: Siblings = ALONE) -> None:
        """``siblings``: the front-end processes that count what they have in hand together."""
        self.engine = engine
        self.config = config
        self.siblings = siblings
        self.name = config.served_model_names[0]
        self.names = config.served_model_names
        self.created = int(time())
        self.metrics = Metrics(self.name, engine.ready.max_model_len, shared_folder=siblings.folder)
        self.metrics.record_pool(engine.ready.block_size, engine.ready.num_gpu_blocks)
        engine.add_stats_listener(self.metrics.record)
        self._board = LoadBoard(siblings)
        owners = ApiKeys(config.access.api_keys).names
        self._admission = Admission(config.limits, self._board, self.metrics.record_rejection, owners)
        self.sse_keep_alive_s = config.limits.sse_keep_alive_interval or None
        self.pulse = CorePulse(engine, config.limits.core_silence_s, config.limits.core_step_s)
        self._request_timeout_s = config.limits.request_timeout_s
        self._chat_template = config.chat_template
        self._content_format = ContentFormat(config.chat_template_content_format)
        self._trusts_templates = config.trust_request_chat_template
        self.reply_format = self._reply_format(config)
        self.gives_receipts = config.receipts
        self._parts_prefixes = config.access.parts_prefixes
        self._live: set[str] = set()
        self._timed_out: set[str] = set()
        self._num_seated = 0
        self._unseated = asyncio.Event()
        self._draining = False
        self._ended = False

    @property
    def max_model_len(self) -> int:
        return self.engine.ready.max_model_len

    @property
    def num_live(self) -> int:
        """Requests being generated, by all front-end processes."""
        return self._board.total(Tally.LIVE)

    @property
    def is_closing(self) -> bool:
        """Whether the server takes no more requests, since it is about to stop."""
        return self._draining

    def patience(self) -> Patience:
        """Of one request's answer, if that is a stream."""
        return Patience(self.sse_keep_alive_s)

    def count_viewers(self, number: int) -> None:
        """So many more look at the dashboard, or less."""
        self._board.add(Tally.VIEWERS, number)
        self.metrics.record_viewers(self._board.total(Tally.VIEWERS), time())

    def check_name(self, name: str | None) -> None:
        """A request without a model's name takes the one there is."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(name, self.names)

    def sampling_defaults(self) -> SamplingParams:
        return self.engine.generation_defaults.sampling_params()

    def default_max_tokens(self, num_prompt_tokens: int) -> int | None:
        """What the model's generation config sets, as far as there is room; None if it says nothing."""
        limit = self.engine.generation_defaults.max_tokens
        return None if limit is None else max(1, min(limit, self.max_model_len - num_prompt_tokens))

    def context(self, headers: Mapping[str, str], said: ClientIdentity) -> RequestContext:
        """What goes with the request to the core, as its headers and its body say it."""
        return request_context(headers, said, parts_prefixes=self._parts_prefixes)

    def check_params(self, params: SamplingParams) -> None:
        """RequestError for what is out of its range: before a place is taken, or anything made, for it."""
        params.verify()
        params.verify_vocabulary(self.engine.ready.vocab_size)

    @contextmanager
    def seat(self, num_requests: int, context: RequestContext) -> Iterator[Seat]:
        """A place for a request, before any work is done for it; OverloadedError or ServerClosingError."""
        if self._draining:
            raise ServerClosingError
        with self._admission.seat(num_requests, context.job) as seat:
            self._num_seated += 1
            try:
                yield seat
            finally:
                self._num_seated -= 1
                if not self._num_seated:
                    self._unseated.set()

    async def encode(
        self, text: str, *, add_special_tokens: bool, owner: str | None, is_prompt: bool = False
    ) -> list[int]:
        """The text's tokens. ``is_prompt``: ContextLengthError if they are certainly too many to serve."""
        owner = owner if self._parts_prefixes else None
        tokenizer = self.engine.tokenizer

        def encode() -> list[int] | None:
            if is_prompt and not may_fit(tokenizer, text, self.max_model_len):
                return None
            return tokenizer.encode(text, add_special_tokens=add_special_tokens, owner=owner)

        tokens = encode() if len(text) <= INLINE_CHARS else await asyncio.to_thread(encode)
        if tokens is None:
            raise await self._too_long(text, add_special_tokens, owner)
        return tokens

    async def _too_long(self, text: str, add_special_tokens: bool, owner: str | None) -> ContextLengthError:
        """With how many tokens the prompt has, unless they would take long to count."""
        if len(text) > MAX_COUNTED_CHARS:
            return prompt_too_long(None, self.max_model_len, len(text))
        num_tokens = await self.count(text, add_special_tokens=add_special_tokens, owner=owner)
        return prompt_too_long(num_tokens, self.max_model_len)

    async def count(self, text: str, *, add_special_tokens: bool, owner: str | None) -> int:
        """How many tokens the text has, whatever its length."""
        num_tokens = 0
        async for tokens in self._steps(text, add_special_tokens, owner):
            num_tokens += len(tokens)
        return num_tokens

    async def listed(self, text: str, *, add_special_tokens: bool, owner: str | None) -> list[int]:
        """All of the text's tokens, to be shown; RequestError if they are too many for that."""
        listed: list[int] = []
        async for tokens in self._steps(text, add_special_tokens, owner):
            listed += tokens
            if len(listed) > MAX_LISTED_TOKENS:
                raise RequestError(
                    f"The text has more than {MAX_LISTED_TOKENS} tokens, the most that are listed; the "
                    "endpoints that count tokens take more.",
                    "prompt",
                )
        return listed

    async def _steps(
        self, text: str, add_special_tokens: bool, owner: str | None
    ) -> AsyncGenerator[list[int], None]:
        """Tokens as they are made: on another thread if the text is long, which others have between steps."""
        if len(text) <= INLINE_CHARS:
            yield self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens, owner=owner)
            return
        steps = self.engine.tokenizer.steps(text, add_special_tokens, owner)
        while (tokens := await asyncio.to_thread(next, steps, None)) is not None:
            yield tokens

    async def count_chat(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        chat_template: str | None,
        chat_template_kwargs: Message | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        owner: str | None,
    ) -> int:
        """How many tokens ``render_chat`` would give."""
        text = await self.chat_text(
            messages,
            tools,
            chat_template,
            chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return await self.count(text, add_special_tokens=False, owner=owner)

    async def render_chat(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        chat_template: str | None,
        chat_template_kwargs: Message | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        owner: str | None,
        is_prompt: bool = False,
    ) -> list[int]:
        """The conversation's tokens; ``is_prompt``: they are to be served, as in ``encode``."""
        text = await self.chat_text(
            messages,
            tools,
            chat_template,
            chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return await self.encode(text, add_special_tokens=False, owner=owner, is_prompt=is_prompt)

    async def chat_text(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        chat_template: str | None,
        chat_template_kwargs: Message | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The conversation as text, by the request's template, else the server's, else the tokenizer's."""
        if chat_template is not None and not self._trusts_templates:
            raise RequestError(
                "chat_template is taken from requests only by a server with --trust-request-chat-template.",
                "chat_template",
            )
        normal = with_one_system(self._without_prefix_killers(normalise(messages)))

        def render(shape: list[Message]) -> str:
            return self.engine.tokenizer.chat_text(
                shape,
                tools,
                chat_template or self._chat_template,
                add_generation_prompt,
                continue_final_message,
                chat_template_kwargs,
                self._content_format,
            )

        if chat_template is not None or _is_long(messages):  # a template of others may run for ever
            return await asyncio.to_thread(in_some_shape, normal, render)
        return in_some_shape(normal, render)

    def _without_prefix_killers(self, messages: list[Message]) -> list[Message]:
        without = without_billing_header(messages)
        if without is None:
            return messages
        self.metrics.record_prefix_killer(BILLING_HEADER)
        return without

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        context: RequestContext,
        *,
        seat: Seat,
        on_taken: Callable[[], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs. OverloadedError if the prompt is too much beside the others; if the request
        was ended, ServerClosingError or RequestTimeoutError."""
        if self._ended:
            raise ServerClosingError
        prefill = seat.prefill(len(prompt_token_ids))
        self._live.add(request_id)
        self._board.add(Tally.LIVE, 1)
        watch = self._watch(request_id)
        try:
            outputs = self.engine.generate(prompt_token_ids, params, request_id, context, on_taken=on_taken)
            async with aclosing(cast(AsyncGenerator[RequestOutput, None], outputs)):
                async for output in outputs:
                    prefill.done()
                    for answer in output.outputs:
                        if answer.finish_reason == "abort":
                            raise self._why_ended(request_id)
                    yield output
        finally:
            prefill.done()
            self._board.add(Tally.LIVE, -1)
            self._live.discard(request_id)
            self._timed_out.discard(request_id)
            if watch is not None:
                watch.cancel()

    def _watch(self, request_id: str) -> asyncio.Task[None] | None:
        if self._request_timeout_s is None:
            return None
        return asyncio.create_task(self._end_late(request_id, self._request_timeout_s))

    async def _end_late(self, request_id: str, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        self._timed_out.add(request_id)
        await self.engine.abort(request_id)

    def _why_ended(self, request_id: str) -> Exception:
        if self._request_timeout_s is not None and request_id in self._timed_out:
            return RequestTimeoutError(self._request_timeout_s)
        return ServerClosingError()

    async def close_turn(
        self, context: RequestContext, last: RequestOutput, calls: list[ToolCall]
    ) -> TurnReceipt | None:
        """A turn has ended: tell the engine which tools run now; what it does about the job's KV."""
        job, receipt = context.job, last.receipt
        if job is not None and not job.is_last_step:
            # Of a single question it is known beforehand what is decided: nothing is held for it.
            is_question = job.job_id is None and not calls and (receipt is None or receipt.turn == 1)
            with suppress(EngineDeadError):  # the answer itself is complete
                decided = await self.engine.tool_gap_started(last.request_id, calls, wait=not is_question)
                receipt = decided or receipt
        if receipt is None:
            return None
        self.metrics.record_receipt(receipt)
        return receipt if self.gives_receipts else None

    async def check_health(self) -> None:
        """EngineDeadError if the engine is dead, CoreStalledError if it stands still, ServerClosingError if
        no more requests are taken."""
        await self.engine.check_health()
        self.pulse.check()
        if self._draining:
            raise ServerClosingError

    async def drain(self) -> None:
        """Take no more requests; returns when the last one has ended."""
        self._draining = True
        while self._num_seated:
            self._unseated.clear()
            await self._unseated.wait()

    async def end_all(self) -> None:
        """End every request that is still running with an error, and take no more."""
        self._draining = self._ended = True
        for request_id in list(self._live):
            await self.engine.abort(request_id)

    def _reply_format(self, config: ServerConfig) -> ReplyFormat:
        tokenizer = self.engine.tokenizer
        template = config.chat_template or tokenizer.hf.chat_template
        return config.reply_format(None if template is None else str(template), tokenizer.special_tokens)


def _is_long(messages: Sequence[Message]) -> bool:
    """Whether to render the chat takes so long that others should go on meanwhile."""
    if len(messages) > INLINE_MESSAGES:
        return True
    num_characters = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else (content,)
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            num_characters += len(text) if isinstance(text, str) else 0
    return num_characters > 16 * INLINE_CHARS
