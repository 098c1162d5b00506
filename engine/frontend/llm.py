"""Offline inference: takes prompts or conversations, and returns finished outputs in the same order."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import msgspec

from engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    TraceConfig,
)
from engine.config.kv_events import read_kv_events_config
from engine.config.kv_transfer import read_kv_transfer_config
from engine.config.lora import read_lora_config
from engine.config.media import MediaConfig, media_limits
from engine.config.pooling import read_pooling_config
from engine.config.speculative import read_speculative_config
from engine.core.policy import PolicyFactory, fcfs
from engine.core.scheduler_report import SchedulerStatistics
from engine.errors import ConfigError, RequestError
from engine.executor import ExecutorFactory
from engine.frontend.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from engine.frontend.llm_engine import LLMEngine
from engine.frontend.media_inputs import MediaInputs
from engine.frontend.options_of_v1 import why_not
from engine.frontend.pooling_methods import PoolingMethods
from engine.frontend.prompts import GivenPrompt, Prompt, PromptInput, as_inputs, as_prompts
from engine.frontend.request_output import RequestOutput
from engine.kv_transfer.offloading import with_offloading
from engine.media.store import MediaLease
from engine.model_executor import model_executor
from engine.policy_loader import load_policy
from engine.records.adapters import Adapter, LoRARequest, find_adapter
from engine.records.messages import EngineCoreRequest, JobRef, RequestContext
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.tokenization.content_format import CONTENT_FORMATS, ContentFormat
from engine.tokenization.tokenization_options import TokenizationOptions, read_tokenization_kwargs
from engine.tokenization.tokenizer import Tokenizer

T = TypeVar("T")

POOLING_OPTIONS = ("runner", "pooler_config", "hf_overrides")
MEDIA_OPTIONS = ("allowed_media_domains", "mm_processor_cache_gb")
MODEL_MEDIA_OPTIONS = ("limit_mm_per_prompt", "mm_processor_kwargs", "language_model_only")
LORA_OPTIONS = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras")

Conversation = Sequence[Mapping[str, Any]]


def engine_config(model: str, **options: Any) -> EngineConfig:
    """Builds the engine's config from flat options, the fields of its records; ConfigError for unknown
    ones."""
    parts: dict[str, Any] = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "trace": TraceConfig,
    }
    speculative = read_speculative_config(options.pop("speculative_config", None))
    kv_events = read_kv_events_config(options.pop("kv_events_config", None))
    kv_transfer = read_kv_transfer_config(
        options.pop("kv_transfer_config", None), options.get("kv_handover_path")
    )
    pooling = read_pooling_config(
        options.pop("runner", "auto"), options.pop("pooler_config", None), options.pop("hf_overrides", None)
    )
    lora = read_lora_config(**{name: options.pop(name) for name in LORA_OPTIONS if name in options})
    pictures = media_limits(*(options.pop(name, None) for name in MODEL_MEDIA_OPTIONS))
    taken: dict[str, dict[str, Any]] = {name: {} for name in (*parts, "engine")}
    taken["model"] |= pictures
    owner = {field.name: name for name, record in parts.items() for field in dataclasses.fields(record)} | {
        field.name: "engine" for field in dataclasses.fields(EngineConfig) if field.name not in parts
    }
    for name in ("speculative", "kv_events", "parallel", "kv_transfer", "lora", "pooling", "max_loras"):
        del owner[name]
    known = [*owner, *LORA_OPTIONS, *POOLING_OPTIONS, *MEDIA_OPTIONS, *MODEL_MEDIA_OPTIONS]
    known += ["speculative_config", "kv_events_config", "kv_transfer_config"]
    for option, value in options.items():
        if option not in owner or option == "model":
            unknown = f"Unknown option {option!r}; choose from {', '.join(sorted(known))}."
            raise ConfigError(why_not(option) or unknown)
        taken[owner[option]][option] = value
    return EngineConfig(
        model=ModelConfig(model=model, **taken["model"]),
        cache=with_offloading(CacheConfig(**taken["cache"]), kv_transfer),
        scheduler=SchedulerConfig(**taken["scheduler"]),
        trace=TraceConfig(**taken["trace"]),
        speculative=speculative,
        kv_events=kv_events,
        kv_transfer=kv_transfer,
        lora=lora,
        pooling=pooling,
        **taken["engine"],
    )


class LLM(PoolingMethods):
    """A model, ready to generate or pool. Options are the fields of the records in ``engine.config``."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        scheduling_policy: str | PolicyFactory = fcfs,
        executor_factory: ExecutorFactory = model_executor,
        multiprocess: bool = True,
        **options: Any,
    ) -> None:
        """``scheduling_policy``: ``fcfs``, ``priority``, a class or function of a module, or its name as
        ``module:attribute``. ``multiprocess`` runs the core in its own process. Raises ConfigError or
        ModelLoadError."""
        media = MediaConfig(**{name: options.pop(name) for name in MEDIA_OPTIONS if name in options})
        config = engine_config(os.fspath(model), **options)
        if isinstance(scheduling_policy, str):
            scheduling_policy = load_policy(scheduling_policy)
        self.engine = LLMEngine(config, executor_factory, scheduling_policy, multiprocess=multiprocess)
        self._media = MediaInputs(self.engine.tokenizer, self.engine.ready.media, media)
        self._request_ids = itertools.count()
        self._adapters: dict[tuple[str, str], Adapter] = {}
        """Adapters by the names and paths that requests used."""

    def generate(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        jobs: JobRef | Sequence[JobRef | None] | None = None,
        priority: int | Sequence[int] = 0,
        kv_transfer_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns finished outputs in the order of the prompts. A prompt is a text, token ids, or a mapping
        with pictures or audio: ``{"prompt": ..., "multi_modal_data": {"image": ...}}``. Without parameters
        the model's defaults apply, clamped to the rest of the context.

        An invalid request raises RequestError before any of them runs. One that fails inside the engine has
        the finish reason ``error`` and does not affect the others.

        ``kv_transfer_params``: where the KV of each prompt is, or ``{"do_remote_decode": True}`` to lease it;
        the outputs then have the params for the engine that continues. ``lora_request``: the adapter of each
        prompt, in V1's form; needs ``enable_lora``. ``tokenization_kwargs``: see ``TokenizationOptions``.
        """
        options = None if tokenization_kwargs is None else read_tokenization_kwargs(tokenization_kwargs)
        all_prompts = as_inputs(prompts)
        count = len(all_prompts)
        given_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", given_params, count)
        all_jobs = _one_each("jobs", jobs, count)
        priorities = _one_each("priority", priority, count)
        read = self.engine.kv_transfer.read
        transfers = [read(each) for each in _one_each("kv_transfer_params", kv_transfer_params, count)]
        adapters = self._adapters_for(lora_request, count)
        contexts = [
            RequestContext(job=job, priority=p, kv_transfer=transfer, adapter=adapter)
            for job, p, transfer, adapter in zip(all_jobs, priorities, transfers, adapters, strict=True)
        ]
        with self._media.lease() as lease:
            requests = [
                self._request(given, own, context, lease, options, fits_context=sampling_params is None)
                for given, own, context in zip(all_prompts, params, contexts, strict=True)
            ]
            outputs = self._run(requests, [given.text for given in all_prompts], use_tqdm)
        order = {request.external_req_id: position for position, request in enumerate(requests)}
        return sorted(outputs, key=lambda output: order[output.request_id])

    def _request(
        self,
        given: PromptInput,
        params: SamplingParams,
        context: RequestContext,
        lease: MediaLease | None,
        options: TokenizationOptions | None,
        *,
        fits_context: bool,
    ) -> EngineCoreRequest:
        prompt, media = self._media.expanded(given, lease)
        if options is not None:
            if media:
                raise RequestError(
                    "tokenization_kwargs is not supported for a prompt with pictures or audio.",
                    "tokenization_kwargs",
                )
            most = self.engine.ready.max_model_len - (params.max_tokens or 1)
            prompt = options.tokens(self.engine.tokenizer, prompt, most)
        context = msgspec.structs.replace(context, media=media)
        request_id = str(next(self._request_ids))
        params = _final_only(params)
        return self.engine.check_request(request_id, prompt, params, context, fits_context=fits_context)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        jobs: JobRef | Sequence[JobRef | None] | None = None,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Like ``generate``, for one conversation or several, rendered with the model's chat template."""
        conversations: list[Any] = [messages] if _is_conversation(messages) else list(messages)
        tokenizer = self.get_tokenizer()
        content_format = _content_format(chat_template_content_format)
        in_parts = tokenizer.reads_parts(chat_template, tools, content_format)

        def render(conversation: Conversation) -> str:
            return tokenizer.chat_text(
                conversation,
                tools,
                chat_template,
                add_generation_prompt,
                continue_final_message,
                chat_template_kwargs,
                content_format,
            )

        prompts = [self._media.rendered(each, render, in_parts=in_parts) for each in conversations]
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            jobs=jobs,
            priority=priority,
            lora_request=lora_request,
        )

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Returns the most probable sequences of each prompt, by beam search.

        Raises RequestError for wrong parameters, and if prompt and ``max_tokens`` exceed the context.
        """
        params.verify()
        tokenizer = self.get_tokenizer()
        token_ids = [
            tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in as_prompts(prompts)
        ]
        room = self.engine.ready.max_model_len - max(map(len, token_ids), default=0)
        if params.max_tokens > room:
            raise RequestError(f"max_tokens is {params.max_tokens}, but {room} fit.", "max_tokens")
        eos_token_ids = self.engine.eos_token_ids
        found = search_beams(
            lambda beams, step: self.generate(beams, step, use_tqdm=False), token_ids, params, eos_token_ids
        )
        for sequence in itertools.chain.from_iterable(found) if tokenizer.has_texts else ():
            sequence.text = tokenizer.decode(sequence.tokens)
        return [BeamSearchOutput(sequences) for sequences in found]

    def _adapters_for(
        self, asked: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[Adapter | None]:
        """The adapter of each of ``count`` prompts."""
        return [self._adapter(each) for each in _one_each("lora_request", asked, count)]

    def _adapter(self, asked: LoRARequest | None) -> Adapter | None:
        """The adapter of a request. Its folder is read again if the worker has dropped it, because a trainer
        may have written another one there."""
        if asked is None:
            return None
        if self.engine.config.lora is None:
            raise RequestError("lora_request needs enable_lora.", "lora_request")
        named = asked.lora_name, asked.lora_path
        known = self._adapters.get(named)
        if known is not None:
            try:
                self.engine.load_adapter(known)
                return known
            except RequestError:
                self.engine.unload_adapter(known)
        adapter = self._adapters[named] = find_adapter(*named)
        self.engine.load_adapter(adapter)
        return adapter

    def _run(
        self, requests: Sequence[EngineCoreRequest], prompts: Sequence[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Adds the requests and steps until all are finished; aborts them if interrupted."""
        outputs: list[RequestOutput] = []
        progress = _Progress(len(requests), use_tqdm)
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                self.engine.add_checked(request, prompt)
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    outputs.append(output)
                    progress.add(output)
        finally:
            progress.close()
            self.engine.abort_all()
        return outputs

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation config."""
        return self.engine.generation_defaults.sampling_params()

    def sleep(self, level: int = 1) -> None:
        """Frees memory: that of the KV pool, and with level 2 that of the weights; on CPUs. Call ``wake_up``
        before the next ``generate``. RequestError if the model cannot sleep."""
        self.engine.sleep(level)

    def wake_up(self) -> None:
        """Ends the sleep; loads weights that were dropped."""
        self.engine.wake_up()

    def update_weights(self, path: str | os.PathLike[str]) -> None:
        """Loads the weights of another folder of the same architecture, with an empty cache. RequestError if
        they cannot be served; then the previous ones stay."""
        self.engine.rest("update_weights", os.fspath(path))

    def reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Drops cached pictures and clips: their files, and the encoders' outputs."""
        if self._media.clear():
            self.engine.reset_encoder_cache()

    def statistics(self) -> SchedulerStatistics:
        return self.engine.statistics()

    def close(self) -> None:
        """Stops the core and frees the model. Repeatable."""
        self._media.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Progress:
    """The progress bar, with token rates."""

    def __init__(self, count: int, shown: bool) -> None:
        from tqdm.auto import tqdm  # every core imports this module and needs no bar

        self._bar = tqdm(total=count, desc="Processed prompts", disable=not shown, dynamic_ncols=True)
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        if not self._bar.disable:
            elapsed_s = max(float(self._bar.format_dict["elapsed"]), 1e-6)
            self._bar.postfix = (
                f"in {self._num_prompt_tokens / elapsed_s:.0f} tok/s, "
                f"out {self._num_output_tokens / elapsed_s:.0f} tok/s"
            )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def _content_format(name: str) -> ContentFormat:
    if name not in CONTENT_FORMATS:
        raise RequestError(
            f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, got {name!r}.",
            "chat_template_content_format",
        )
    return ContentFormat(name)


def _one_each(name: str, given: T | Sequence[T], count: int) -> list[T]:
    """Returns one value per prompt; a single value applies to all."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{name} has {len(given)} items for {count} prompts.", name)
    return list(given)


def _final_only(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _is_conversation(messages: Conversation | Sequence[Conversation]) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping)
