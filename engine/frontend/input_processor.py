"""Converts a caller's request to the core's: validation, defaults, ids. Takes and returns tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, TypeVar

import msgspec

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, ContextLengthError, RequestError
from engine.frontend.pooling_inputs import PLACEHOLDER_PARAMS, for_what_the_model_does
from engine.records.kv_transfer import KVLeaseOrder
from engine.records.messages import NO_CONTEXT, EngineCoreRequest, EngineReady, RequestContext
from engine.records.priority import check_priority
from engine.records.sampling_params import MAX_LOGIT_BIAS, SamplingParams, check_vocabulary
from engine.records.structured_outputs import StructuredOutputsParams, ThinkingLimit
from engine.structured_output.backend import TokenTable
from engine.structured_output.compiler import GrammarCheck, GrammarCompiler
from engine.tokenization.no_tokenizer import needs_tokenizer
from engine.tokenization.prompt_encoder import extreme_tokens
from engine.tokenization.tokenizer import Tokenizer

T = TypeVar("T")

_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class _TokenIds(msgspec.Struct):
    """End-of-sequence tokens, as model folders specify them."""

    eos_token_id: _TokenId | list[_TokenId] | None = None

    def as_list(self) -> list[int]:
        ids = self.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else ids


class _Recommended(msgspec.Struct):
    """The fields of a ``generation_config.json`` that are used; others may be anything."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(le=2**53)] | None = None


def _checked(kind: type[T], values: Mapping[str, Any], named_by: str) -> T:
    """Validates the fields of a file; ConfigError names the first of a wrong type."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{named_by} is wrong: {error}.") from error


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of the model's ``generation_config.json``; None for those it does not have."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    eos_token_ids: list[int] = field(default_factory=list)

    @classmethod
    def load(cls, config: ModelConfig) -> GenerationDefaults:
        """Loads the defaults. ``generation_config=vllm`` omits the sampling defaults; the EOS tokens are
        always used."""
        own_source = config.generation_config not in ("auto", "vllm")
        source = config.generation_config if own_source else config.model
        try:
            found = _read_json(source, "generation_config.json")
        except OSError:  # neither a folder nor a valid hub name
            found = None
        if found is None and own_source:
            raise ConfigError(f"generation_config: no generation_config.json in {source!r}.")
        values = found or {}
        eos = values.get("eos_token_id")
        named_by = f"generation_config.json of {source!r}"
        if eos is None:
            eos = _eos_in(_read_json(config.model, "config.json") or {})
            named_by = f"config.json of {config.model!r}"
        defaults = cls(eos_token_ids=_checked(_TokenIds, {"eos_token_id": eos}, named_by).as_list())
        if config.generation_config == "vllm":
            return defaults
        recommended = _checked(_Recommended, values, f"generation_config.json of {source!r}")
        defaults = replace(
            defaults,
            temperature=recommended.temperature,
            top_p=recommended.top_p,
            top_k=recommended.top_k,
            min_p=recommended.min_p,
            repetition_penalty=recommended.repetition_penalty,
            max_tokens=recommended.max_new_tokens,
        )
        try:
            defaults.sampling_params().verify()
        except RequestError as error:
            reason = str(error).replace("max_tokens", "max_new_tokens")
            raise ConfigError(f"generation_config.json of {source!r}: {reason}") from error
        return defaults

    def sampling_params(self) -> SamplingParams:
        """Sampling parameters for a caller that passes none."""
        named = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
        }
        return SamplingParams(**{name: value for name, value in named.items() if value is not None})


def _eos_in(config: Mapping[str, Any]) -> Any:
    """The EOS tokens of a config.json. For a model with other parts besides its decoder they may be in the
    decoder's config."""
    eos = config.get("eos_token_id")
    text = config.get("text_config")
    return text.get("eos_token_id") if eos is None and isinstance(text, dict) else eos


def _read_json(folder_or_name: str, filename: str) -> dict[str, Any] | None:
    """A JSON object of a model folder or hub snapshot; None if there is no such file."""
    from transformers.utils.hub import cached_file

    path = cached_file(
        folder_or_name,
        filename,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return None
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{filename} of {folder_or_name!r} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{filename} of {folder_or_name!r} is not a JSON object.")
    return content


class InputProcessor:
    """Validates a request against the model and completes its sampling parameters."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        ready: EngineReady,
        defaults: GenerationDefaults,
        grammars: GrammarCheck | None = None,
    ) -> None:
        """``grammars`` validates grammars; by default they are compiled here, without limits on time and
        memory."""
        self._tokenizer = tokenizer
        self._max_model_len = ready.max_model_len
        self._vocab_size = ready.vocab_size
        self._tells_prompts = ready.prompt_logprobs
        self._pooling = ready.pooling
        self._most_tokens = ready.max_model_len - (ready.pooling is None)
        """Maximum number of prompt tokens: one is reserved for the output, if there is any."""
        # A tokenizer may have tokens outside the model's vocabulary.
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        eos_ids = [token for token in (*own, *defaults.eos_token_ids) if token < ready.vocab_size]
        self._eos_token_id = eos_ids[0] if eos_ids else None
        self._other_eos_ids = set(eos_ids[1:]) - set(eos_ids[:1])
        self._grammars = grammars or GrammarCompiler(lambda: TokenTable.of(tokenizer, ready.vocab_size))

    def _context_of_told_prompt(self, context: RequestContext) -> RequestContext:
        """The context of a request for its prompt's log-probabilities: the whole prompt is computed, under a
        salt that no other request has."""
        if not self._tells_prompts:
            raise RequestError("prompt_logprobs needs native code of the model on a GPU.", "prompt_logprobs")
        if context.kv_transfer is not None:
            raise RequestError(
                "prompt_logprobs cannot be combined with kv_transfer_params.", "prompt_logprobs"
            )
        return msgspec.structs.replace(context, cache_salt=token_hex(16))

    @property
    def eos_token_ids(self) -> set[int]:
        """The tokens that end an answer unless they are ignored."""
        first = set() if self._eos_token_id is None else {self._eos_token_id}
        return first | self._other_eos_ids

    def process(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        context: RequestContext = NO_CONTEXT,
        fits_context: bool = False,
    ) -> EngineCoreRequest:
        """Returns the core's request, with a unique id; RequestError if it is invalid. ``fits_context``: a
        ``max_tokens`` beyond the rest of the context is clamped to it."""
        context = for_what_the_model_does(context, self._pooling)
        if context.pooling is not None:
            params = PLACEHOLDER_PARAMS
        self._check_prompt(prompt_token_ids)
        check_priority(context.priority)
        params.verify()
        if params.n > 1 and isinstance(context.kv_transfer, KVLeaseOrder):
            raise RequestError("n must be 1 with kv_transfer_params.do_remote_decode.", "n")
        if params.prompt_logprobs is not None:
            context = self._context_of_told_prompt(context)
        _check_experts_start(params.routed_experts_prompt_start, len(prompt_token_ids))
        if fits_context and params.max_tokens is not None:
            remaining = self._max_model_len - len(prompt_token_ids)
            params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, remaining))
        completed = params if context.pooling else self._complete(params, len(prompt_token_ids))
        completed.verify_vocabulary(self._vocab_size)
        if params.structured_outputs is not None:
            completed.structured_outputs = self.check_grammar(
                params.structured_outputs, context.owner
            ).result()
        return EngineCoreRequest(
            request_id=f"{request_id}-{token_hex(4)}",
            prompt_token_ids=prompt_token_ids,
            sampling_params=completed,
            arrival_time=arrival_time,
            external_req_id=request_id,
            **msgspec.structs.asdict(context),
        )

    def check_grammar(
        self, wanted: StructuredOutputsParams, owner: str | None = None
    ) -> Future[StructuredOutputsParams]:
        """Returns the enforceable part of a grammar; RequestError, now or in the future, if it is invalid.
        ``process`` calls this too and blocks, so call it before."""
        wanted.verify()
        if not self._tokenizer.has_texts:
            raise needs_tokenizer("structured_outputs", "use logit_bias or allowed_token_ids")
        return self._grammars.check(wanted.in_texts(), owner or "")

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("The prompt must not be empty.", "prompt")
        if len(token_ids) > self._most_tokens:
            raise prompt_too_long(len(token_ids), self._max_model_len)
        try:
            check_vocabulary("The prompt", extreme_tokens(token_ids), self._vocab_size, "prompt")
        except TypeError as error:
            raise RequestError(f"The prompt must hold token ids: {error}.", "prompt") from error

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        if params.stop and not self._tokenizer.has_texts:
            raise needs_tokenizer("stop", "use stop_token_ids")
        stop_token_ids = params.stop_token_ids
        if self._other_eos_ids and not params.ignore_eos:
            stop_token_ids = sorted({*stop_token_ids, *self._other_eos_ids})
        return msgspec.structs.replace(
            params,
            max_tokens=self._max_tokens(params, num_prompt_tokens),
            stop_token_ids=stop_token_ids,
            eos_token_id=self._eos_token_id,
            structured_outputs=None,  # set below to the enforceable part
            logit_bias=_within_limits(params.logit_bias),
            bad_words_token_ids=self._bad_words(params.bad_words) if params.bad_words else None,
            thinking_limit=self._thinking_limit(params),
        )

    def _thinking_limit(self, params: SamplingParams) -> ThinkingLimit | None:
        """The limit on reasoning in tokens of this tokenizer. RequestError if the texts around reasoning are
        not tokens of it."""
        budget = params.thinking_token_budget
        span = params.reasoning
        if budget is None:
            return None
        if span is None:
            raise RequestError(
                "thinking_token_budget needs a model whose replies begin with reasoning between tags.",
                "thinking_token_budget",
            )
        added = self._tokenizer.added_tokens
        for tag in (span.end, span.start):
            if tag is not None and tag not in added:
                raise RequestError(
                    f"thinking_token_budget needs {tag!r} to be a token, which it is not for this model.",
                    "thinking_token_budget",
                )
        start = None if span.start is None else added[span.start]
        return ThinkingLimit(budget, added[span.end], start)

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Token sequences of the words, without those that contain tokens outside the model's vocabulary."""
        sequences = self._tokenizer.bad_word_token_ids(words)
        return [sequence for sequence in sequences if max(sequence) < self._vocab_size]

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        remaining = self._max_model_len - num_prompt_tokens
        if params.max_tokens is None:
            wanted = len(params.replay_token_ids) if params.replay_token_ids else remaining
            return min(wanted, remaining)
        if params.max_tokens > remaining:
            raise ContextLengthError(
                f"This model's maximum context length is {self._max_model_len} tokens, but "
                f"{num_prompt_tokens + params.max_tokens} were requested ({num_prompt_tokens} in the prompt "
                f"and {params.max_tokens} for the output).",
                "max_tokens",
            )
        return params.max_tokens


def _check_experts_start(start: int, num_prompt_tokens: int) -> None:
    if start > num_prompt_tokens:
        raise RequestError(
            f"routed_experts_prompt_start must be at most the prompt's {num_prompt_tokens} tokens, "
            f"got {start}.",
            "routed_experts_prompt_start",
        )


def _within_limits(biases: dict[int, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    return {token: max(-MAX_LOGIT_BIAS, min(bias, MAX_LOGIT_BIAS)) for token, bias in biases.items()}


def may_fit(tokenizer: Tokenizer, text: str, max_model_len: int) -> bool:
    """Whether the prompt may fit, estimated from its length: tokenizing 16 MB takes half a minute and
    gigabytes."""
    return tokenizer.fewest_tokens_beyond(text, max_model_len - 1) is None


def prompt_too_long(num_tokens: int | None, max_model_len: int, num_chars: int = 0) -> ContextLengthError:
    """Returns the error for a prompt that exceeds the context. ``num_tokens`` is None if not counted; clients
    parse the count, so the message then contains no other one."""
    much = (
        f"a text of {num_chars} characters has more"
        if num_tokens is None
        else f"{num_tokens} tokens > {max_model_len - 1} maximum, with one for output"
    )
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens, but the prompt is too long: {much}.",
        "prompt",
    )
