"""``LLM.embed``, ``encode``, ``classify`` and ``score``, and their outputs; V1's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.errors import EngineGenerateError, RequestError
from engine.frontend.llm_engine import LLMEngine
from engine.frontend.pooling_inputs import PLACEHOLDER_PARAMS, PoolingInputs, model_that_pools
from engine.frontend.prompts import Prompt, as_prompts
from engine.frontend.request_output import RequestOutput
from engine.records.adapters import Adapter, LoRARequest
from engine.records.messages import EngineCoreRequest, RequestContext
from engine.records.pooling import PoolingParams, PoolingTask
from engine.tokenization.tokenization_options import read_tokenization_kwargs

Array = npt.NDArray[np.float32]
AskedAdapters = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one or none for each."""


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The output of a pooling model."""

    data: Array
    """Array [size], or [num_tokens, size] for a task with an answer per token."""


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """The output for one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """One prompt's embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """One prompt's classes."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """How well one pair of texts fits."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput


class PoolingMethods:
    """The methods of an ``LLM`` with a pooling model. RequestError for other models, and for invalid input
    before anything runs."""

    engine: LLMEngine

    @cached_property
    def _pooling_inputs(self) -> PoolingInputs:
        return PoolingInputs(self.engine.tokenizer, self.engine.ready)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        lora_request: AskedAdapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Returns the outputs in the order of the prompts. ``prompt_name``: name of the text in the model's
        folder that is put before each. ``truncate_prompt_tokens``: tokens to keep of a longer prompt; -1: as
        many as fit. ``lora_request``: the adapter of each prompt; needs ``enable_lora``.
        ``tokenization_kwargs``: V1's mapping for ``truncate_prompt_tokens`` and ``add_special_tokens``."""
        inputs = self._pooling_inputs
        options = read_tokenization_kwargs(tokenization_kwargs, "right")
        if options.truncation_side != "right":
            raise RequestError(
                "tokenization_kwargs.truncation_side must be right for a model that pools.",
                "tokenization_kwargs",
            )
        if truncate_prompt_tokens is None:
            truncate_prompt_tokens = options.truncate_prompt_tokens
        limit = inputs.limit(truncate_prompt_tokens)
        prefix = inputs.prefix(prompt_name)
        adds = options.add_special_tokens
        token_ids = [
            inputs.encode(prompt, limit, prefix=prefix, add_special_tokens=adds, field="prompts")
            if isinstance(prompt, str)
            else prompt[:limit]
            for prompt in as_prompts(prompts)
        ]
        params = pooling_params or PoolingParams()
        if pooling_task is not None:
            params = msgspec.structs.replace(params, task=pooling_task)
        return self._pooled([(ids, params) for ids in token_ids], use_tqdm, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        lora_request: AskedAdapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Returns one embedding per prompt."""
        found = self.encode(
            prompts,
            pooling_params,
            pooling_task="embed",
            truncate_prompt_tokens=truncate_prompt_tokens,
            prompt_name=prompt_name,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            use_tqdm=use_tqdm,
        )
        return [
            EmbeddingRequestOutput(
                one.request_id, one.prompt_token_ids, EmbeddingOutput(one.outputs.data.tolist())
            )
            for one in found
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: AskedAdapters = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Returns the probabilities of the model's classes for each prompt."""
        found = self.encode(
            prompts,
            pooling_params,
            pooling_task="classify",
            truncate_prompt_tokens=truncate_prompt_tokens,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
        )
        return [
            ClassificationRequestOutput(
                one.request_id, one.prompt_token_ids, ClassificationOutput(one.outputs.data.tolist())
            )
            for one in found
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        chat_template: str | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Returns how well each text of ``data_2`` fits the one of ``data_1``, or the one at the same index:
        a cross-encoder's score, or the cosine of two embeddings. ``chat_template``: the template for a
        cross-encoder's pairs, as messages with the roles ``query`` and ``document``."""
        firsts, seconds = paired(_as_texts(data_1), _as_texts(data_2), "data_1", "data_2")
        model = model_that_pools(self.engine.ready.pooling)
        inputs = self._pooling_inputs
        if chat_template is not None and not model.is_cross_encoder:
            raise RequestError("chat_template needs a cross-encoder.", "chat_template")
        template = None if chat_template is None else inputs.pair_template(chat_template)
        if "embed" in model.tasks:
            asked = pooling_params, truncate_prompt_tokens, lora_request, use_tqdm
            return self._cosines(firsts, seconds, *asked)
        check_scores(model.is_cross_encoder, model.size)
        limit = inputs.limit(truncate_prompt_tokens)
        params = pooling_params or PoolingParams()
        pairs = []
        for first, second in zip(firsts, seconds, strict=True):
            ids, first_segment = inputs.encode_pair(first, second, limit, "data_2", template=template)
            pairs.append((ids, msgspec.structs.replace(params, first_segment=first_segment)))
        found = self._pooled(pairs, use_tqdm, lora_request)
        return [_scored(one, float(one.outputs.data[0])) for one in found]

    def _cosines(
        self,
        firsts: list[str],
        seconds: list[str],
        params: PoolingParams | None,
        truncate: int | None,
        lora_request: LoRARequest | None,
        use_tqdm: bool,
    ) -> list[ScoringRequestOutput]:
        texts: list[Prompt] = list(dict.fromkeys([*firsts, *seconds]))
        found = self.encode(
            texts,
            params,
            pooling_task="embed",
            truncate_prompt_tokens=truncate,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
        )
        by_text = dict(zip(texts, found, strict=True))
        return [
            _scored(by_text[second], cosine(by_text[first].outputs.data, by_text[second].outputs.data))
            for first, second in zip(firsts, seconds, strict=True)
        ]

    def _pooled(
        self,
        asked: Sequence[tuple[list[int], PoolingParams]],
        use_tqdm: bool,
        lora_request: AskedAdapters = None,
    ) -> list[PoolingRequestOutput]:
        adapters = self._adapters_for(lora_request, len(asked))
        requests = [
            self.engine.check_request(
                f"pool-{number}", ids, PLACEHOLDER_PARAMS, RequestContext(pooling=params, adapter=adapter)
            )
            for number, ((ids, params), adapter) in enumerate(zip(asked, adapters, strict=True))
        ]
        outputs = {
            output.request_id: output for output in self._run(requests, [None] * len(requests), use_tqdm)
        }
        return [_answer(outputs[f"pool-{number}"]) for number in range(len(requests))]

    def _adapters_for(self, asked: AskedAdapters, count: int) -> list[Adapter | None]:
        raise NotImplementedError

    def _run(
        self, requests: Sequence[EngineCoreRequest], prompts: Sequence[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        raise NotImplementedError


def paired(
    firsts: list[str], seconds: list[str], first_name: str, second_name: str
) -> tuple[list[str], list[str]]:
    """Two lists of the same length: a single text is paired with all others. RequestError for other
    lengths."""
    if not firsts or not seconds:
        raise RequestError(f"{first_name} and {second_name} must not be empty.", second_name)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise RequestError(
            f"{first_name} needs one text or as many as {second_name}, got {len(firsts)} and {len(seconds)}.",
            first_name,
        )
    return firsts, seconds


def check_scores(is_cross_encoder: bool, num_classes: int) -> None:
    if not is_cross_encoder:
        raise RequestError(
            f"This model has {num_classes} classes; scores need an embedding model or one class.", "model"
        )


def cosine(first: Array, second: Array) -> float:
    """The cosine of the angle between two embeddings; 0 if one is zero."""
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0


def _answer(output: RequestOutput) -> PoolingRequestOutput:
    if output.pooled is None:
        raise EngineGenerateError(str(output.outputs[0].stop_reason))
    return PoolingRequestOutput(
        output.request_id,
        output.prompt_token_ids,
        PoolingOutput(output.pooled.array()),
        output.num_cached_tokens,
    )


def _scored(one: PoolingRequestOutput, score: float) -> ScoringRequestOutput:
    return ScoringRequestOutput(one.request_id, one.prompt_token_ids, ScoringOutput(score))


def _as_texts(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)
