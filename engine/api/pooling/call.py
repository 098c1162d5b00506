"""Runs one request to a pooling model: tokenizes its inputs, runs them together, and answers in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from time import time

import msgspec
import numpy as np
import numpy.typing as npt

from engine.api.http.streams import merge
from engine.api.openai.chat_parts import texts_only
from engine.api.pooling.bodies import InputBody, PoolingBody, PoolingUsage
from engine.api.prompt.chat_messages import Message
from engine.api.prompt.prompts import ChatPrompt
from engine.api.service.model import Model
from engine.errors import ContextLengthError, EngineGenerateError, RequestError
from engine.frontend.pooling_inputs import PLACEHOLDER_PARAMS, PoolingInputs, model_that_pools
from engine.frontend.pooling_methods import check_scores, cosine, paired
from engine.records.pooling import PoolingParams

Array = npt.NDArray[np.float32]
Asked = tuple[list[int], PoolingParams]
"""The tokens of a prompt, and its parameters."""


class PoolingCall:
    """Answers one request."""

    def __init__(
        self, model: Model, body: PoolingBody, headers: Mapping[str, str], request_id: str, prefix: str
    ) -> None:
        """``prefix``: the beginning of the response's id. RequestError if the model generates."""
        self.about = model_that_pools(model.server.engine.ready.pooling)
        self.id = f"{prefix}-{request_id}"
        self.created = int(time())
        self.model = model
        self._body = body
        self._context = model.context(headers, body.identity())
        self._num_tokens = 0

    @property
    def usage(self) -> PoolingUsage:
        """The token usage of everything that was run for this request."""
        return PoolingUsage(prompt_tokens=self._num_tokens, total_tokens=self._num_tokens)

    async def of_inputs(self, body: InputBody, params: PoolingParams) -> list[Array]:
        """Returns the answers to the inputs of a body."""
        params.checked(self.about)
        if body.messages is not None:
            chat = await self._chat(body, body.messages)
            return await self._run(lambda: [(chat, params)])
        inputs = self._inputs()
        given = body.inputs()
        limit = inputs.limit(body.truncate_prompt_tokens)
        prefix = inputs.prefix(body.prompt_name)

        def asked() -> list[Asked]:
            return [
                (
                    inputs.encode(one, limit, prefix=prefix, add_special_tokens=body.add_special_tokens)
                    if isinstance(one, str)
                    else one[:limit],
                    params,
                )
                for one in given
            ]

        return await self._run(asked)

    async def _chat(self, body: InputBody, messages: list[Message]) -> list[int]:
        """Tokenizes a chat with the model's template. It is not truncated, since the pooled token may be its
        last."""
        limit = self._inputs().limit(body.truncate_prompt_tokens)
        left_out = self.model.server.left_out()
        chat = ChatPrompt(
            messages=texts_only(messages, left_out),
            media=left_out.media,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
        )
        try:
            prompt = await self.model.server.prompts.encode_chat(chat, owner=self._context.owner)
        except ContextLengthError as error:
            raise ContextLengthError(str(error), "messages") from error
        if limit is not None and len(prompt.token_ids) > limit:
            raise RequestError(
                f"messages have {len(prompt.token_ids)} tokens, more than truncate_prompt_tokens, {limit}: "
                "a chat is not truncated, as the end of its template must stay.",
                "messages",
            )
        return prompt.token_ids

    async def scores(self, firsts: list[str], seconds: list[str], names: tuple[str, str]) -> list[float]:
        """Scores how well each of the second texts fits the first one, or the first one at the same index."""
        firsts, seconds = paired(firsts, seconds, *names)
        if "embed" in self.about.tasks:
            return await self._cosines(firsts, seconds, names[1])
        check_scores(self.about.is_cross_encoder, self.about.size)
        params = self._body.params("classify").checked(self.about)
        inputs = self._inputs()
        limit = inputs.limit(self._body.truncate_prompt_tokens)

        def asked() -> list[Asked]:
            pairs = []
            for first, second in zip(firsts, seconds, strict=True):
                ids, first_segment = inputs.encode_pair(first, second, limit, names[1])
                pairs.append((ids, msgspec.structs.replace(params, first_segment=first_segment)))
            return pairs

        return [float(answer[0]) for answer in await self._run(asked)]

    async def shortened(self, texts: list[str], max_tokens: int) -> list[str]:
        """Truncates each text to at most ``max_tokens`` tokens."""
        inputs = self._inputs()
        return await asyncio.to_thread(lambda: [inputs.first_tokens(text, max_tokens) for text in texts])

    async def _cosines(self, firsts: list[str], seconds: list[str], field: str) -> list[float]:
        """The cosines of the embeddings; each text is embedded once."""
        texts = list(dict.fromkeys([*firsts, *seconds]))
        params = self._body.params("embed").checked(self.about)
        inputs = self._inputs()
        limit = inputs.limit(self._body.truncate_prompt_tokens)
        prefix = inputs.prefix(None)

        def asked() -> list[Asked]:
            return [(inputs.encode(text, limit, prefix=prefix, field=field), params) for text in texts]

        found = dict(zip(texts, await self._run(asked), strict=True))
        return [cosine(found[first], found[second]) for first, second in zip(firsts, seconds, strict=True)]

    def _inputs(self) -> PoolingInputs:
        inputs = self.model.server.pooling_inputs
        assert inputs is not None, "the model pools"
        return inputs

    async def _run(self, asked: Callable[[], Sequence[Asked]]) -> list[Array]:
        """Returns the answers in the order of the prompts, which are tokenized on another thread."""
        prompts = await asyncio.to_thread(asked)
        self._num_tokens += sum(len(token_ids) for token_ids, _ in prompts)
        answers: list[Array | None] = [None] * len(prompts)
        with self.model.server.admission.admit(len(prompts), self._context) as permit:
            streams = [
                self.model.server.generation.generate(
                    token_ids,
                    PLACEHOLDER_PARAMS,
                    f"{self.id}-{number}",
                    msgspec.structs.replace(self._context, pooling=params),
                    permit=permit,
                )
                for number, (token_ids, params) in enumerate(prompts)
            ]
            async with aclosing(merge(streams)) as outputs:
                async for number, output in outputs:
                    if output.pooled is not None:
                        answers[number] = output.pooled.array()
        missing = [number for number, answer in enumerate(answers) if answer is None]
        if missing:
            raise EngineGenerateError(f"Input {missing[0]} of this request was not answered.")
        return [answer for answer in answers if answer is not None]
