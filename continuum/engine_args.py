"""Flags of ``continuum serve`` and the configuration records they make; V1's names where it has them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from continuum.config import TTL_RULES, ContinuumConfig
from engine.api.config import DEFAULT_THINKING, AccessConfig, LimitsConfig, ServerConfig, TlsConfig
from engine.api.openai_responses.config import ResponsesConfig
from engine.config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    TelemetryConfig,
    TraceConfig,
)
from engine.content_format import CONTENT_FORMATS
from engine.errors import ConfigError
from engine.tool_parsers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS

LOAD_FORMATS = ("auto", "safetensors", "dummy")
MODEL_IMPLS = ("auto", "native", "transformers")
API_KEY_VARIABLE = "CONTINUUM_API_KEY"
"""Environment variable with one API key, or several with commas between: no process list shows it."""

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

Record = TypeVar("Record")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags, in the groups that ``--help`` shows."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face model folder, or a hub name; without it, the small agent model that comes along",
    )
    _add_server_flags(_Group(parser, "server", ServerConfig))
    _add_responses_flags(_Group(parser, "Responses API", ResponsesConfig))
    _add_limits_flags(_Group(parser, "limits", LimitsConfig))
    _add_access_flags(_Group(parser, "access", AccessConfig))
    _add_tls_flags(parser.add_argument_group("TLS"))
    _add_model_flags(_Group(parser, "model", ModelConfig))
    _add_cache_flags(_Group(parser, "KV cache", CacheConfig))
    _add_scheduler_flags(_Group(parser, "scheduler", SchedulerConfig))
    _add_continuum_flags(_Group(parser, "jobs and pins (scheduling policy continuum)", ContinuumConfig))
    _add_observation_flags(parser.add_argument_group("observation"))


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The record that a core process starts from."""
    return EngineConfig(
        model=_record(ModelConfig, args),
        cache=_record(CacheConfig, args),
        scheduler=_record(SchedulerConfig, args),
        trace=_record(TraceConfig, args, trace_path=args.trace),
        log_stats=not args.disable_log_stats,
        telemetry=TelemetryConfig(
            otlp_traces_endpoint=args.otlp_traces_endpoint,
            model_name=args.served_model_name[0] if args.served_model_name else args.model,
        ),
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The record that the HTTP server starts from."""
    template = None if args.chat_template is None else _template_text(args.chat_template)
    names = tuple(args.served_model_name or (args.model,))
    tls = TlsConfig(
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        ca_certs=args.ssl_ca_certs,
        cert_reqs=args.ssl_cert_reqs,
    )
    tls.check()
    return _record(
        ServerConfig,
        args,
        chat_template=template,
        served_model_names=names,
        responses=_record(ResponsesConfig, args),
        limits=_record(LimitsConfig, args),
        access=_record(AccessConfig, args, api_keys=_api_keys(args)),
        tls=tls,
    )


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    given = os.environ.get(API_KEY_VARIABLE)
    from_environment = [] if given is None else [key.strip() for key in given.split(",") if key.strip()]
    if given is not None and not from_environment:
        raise ConfigError(f"{API_KEY_VARIABLE} is set but holds no key; without keys it must not be set.")
    return (*(args.api_key or ()), *from_environment)


def continuum_config(args: argparse.Namespace) -> ContinuumConfig:
    """The agent policy's record; its flags with another policy would be ignored, so they are refused."""
    defaults = _defaults(ContinuumConfig)
    if args.scheduling_policy != "continuum":
        for name, default in defaults.items():
            if getattr(args, name, default) != default:
                raise ConfigError(f"{_flag(name)} needs --scheduling-policy continuum.")
    return _record(ContinuumConfig, args)


class _Group:
    """Flags that fill one record: names and defaults come from its fields."""

    def __init__(self, parser: argparse.ArgumentParser, title: str, record: type[Any]) -> None:
        self.flags = parser.add_argument_group(title)
        self._defaults = _defaults(record)

    def add(
        self,
        name: str,
        text: str,
        kind: Callable[[str], Any] = str,
        metavar: str | None = None,
        choices: Sequence[str] | None = None,
        short: str | None = None,
    ) -> None:
        self.flags.add_argument(
            *(() if short is None else (short,)),
            _flag(name),
            type=kind,
            default=self._defaults[name],
            metavar=metavar,
            choices=choices,
            help=text,
        )

    def add_names(self, name: str, text: str, metavar: str) -> None:
        """``--name A,B``"""
        self.flags.add_argument(
            _flag(name), type=_names, default=argparse.SUPPRESS, metavar=metavar, help=text
        )

    def add_switch(self, name: str, text: str) -> None:
        """``--name`` and ``--no-name``."""
        self.flags.add_argument(
            _flag(name), action=argparse.BooleanOptionalAction, default=self._defaults[name], help=text
        )


def _add_server_flags(group: _Group) -> None:
    group.add("host", "address to listen on; all interfaces by default", metavar="ADDRESS")
    group.add("port", "port to listen on; 0 takes a free one", int, "PORT")
    group.add("uds", "listen on this Unix socket instead", metavar="PATH")
    group.flags.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use for the model; MODEL by default",
    )
    group.add(
        "chat_template", "file of a chat template, or its text; the tokenizer's by default", metavar="PATH"
    )
    group.add(
        "chat_template_content_format",
        "contents as the chat template gets them: as it reads them (auto), texts, or lists of parts (openai)",
        choices=CONTENT_FORMATS,
    )
    group.add_switch("trust_request_chat_template", "let requests bring chat templates, which are programs")
    group.add(
        "tool_call_parser",
        "how replies are read for tool calls: as the chat template shows (auto), or "
        + ", ".join(name for name in TOOL_CALL_PARSERS if name != "auto"),
        metavar="NAME",
    )
    group.add(
        "reasoning_parser",
        "how replies are read for thoughts: as the chat template shows (auto), or "
        + ", ".join(name for name in REASONING_PARSERS if name != "auto"),
        metavar="NAME",
    )
    group.add(
        "messages_default_thinking",
        "whether the model thinks where a Messages request does not say; template: as its default is",
        choices=DEFAULT_THINKING,
    )
    group.add("tool_parser_plugin", "Python file that registers a tool parser of your own", metavar="PATH")
    group.flags.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="accepted for V1's command lines; tools are always on",
    )
    group.add_switch("receipts", "tell in usage what was cached, held and computed again for a turn's job")
    group.add_switch("dashboard", "show at /dashboard what the engine does: jobs, pins, blocks, decisions")
    group.add("keep_alive_s", "keep idle connections this long: tools take their time", int, "SECONDS")
    group.add("shutdown_grace_s", "let running requests go on this long after SIGTERM", float, "SECONDS")
    group.add("api_server_count", "front-end processes before the one engine core", int, "PROCESSES")


def _add_responses_flags(group: _Group) -> None:
    group.add(
        "max_stored_responses", "responses kept for later turns; the longest unused go", int, "RESPONSES"
    )
    group.add("max_stored_response_bytes", "bytes they may take, such as 256M", _number, "BYTES")
    group.add(
        "max_background_responses",
        "most made in the background at once by a server process; beyond: 503",
        int,
        "RESPONSES",
    )


def _add_limits_flags(group: _Group) -> None:
    group.add(
        "max_num_queued_reqs", "most requests in hand, waiting or running; beyond: 503", int, "REQUESTS"
    )
    group.add(
        "max_num_queued_tokens",
        "most prompt tokens waiting to be computed; beyond: 503",
        _number,
        "TOKENS",
    )
    group.add("max_body_bytes", "largest request body, such as 32M; beyond: 413", _number, "BYTES")
    group.add(
        "max_connections",
        "most connections of a server process; beyond, the one idle longest is closed",
        int,
        "CONNECTIONS",
    )
    group.add("head_timeout_s", "a request's headers must come within this", float, "SECONDS")
    group.add("body_timeout_s", "a request's body must come within this", float, "SECONDS")
    group.add(
        "request_timeout_s", "a request is ended with 504 after this; never by default", float, "SECONDS"
    )
    group.add("core_silence_s", "/health is 503 if the core does not answer for this", float, "SECONDS")
    group.add("core_step_s", "/health is 503 if the core is in one step for this", float, "SECONDS")
    group.add(
        "sse_keep_alive_interval", "a silent stream sends a comment this often; 0: never", float, "SECONDS"
    )


def _add_access_flags(group: _Group) -> None:
    group.flags.add_argument(
        "--api-key",
        action="extend",
        nargs="+",
        metavar="[NAME:]KEY",
        help="keys, one of which a request needs as bearer token or x-api-key; NAME is whose key it is. "
        f"Better put them into the environment variable {API_KEY_VARIABLE}",
    )
    group.add_switch(
        "share_prefixes_across_tenants",
        "owners of different keys reuse each other's prefixes, and so can tell what others have sent",
    )
    group.add_names(
        "allowed_hosts",
        "names in Host to answer to beside addresses and local names, such as *.example.org, or *; "
        "all by default, but for a server on a loopback address without keys",
        "NAMES",
    )
    group.add_names("allowed_origins", "web pages that may ask (CORS): URLs or *; none by default", "URLS")
    group.add_names("allowed_methods", "methods these may use; all by default", "METHODS")
    group.add_names("allowed_headers", "headers these may send; all by default", "HEADERS")
    group.add_switch("allow_credentials", "these may send cookies")


def _add_tls_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ssl-certfile", metavar="PATH", help="serve HTTPS with this certificate")
    group.add_argument("--ssl-keyfile", metavar="PATH", help="its key, if that is in a file of its own")
    group.add_argument("--ssl-ca-certs", metavar="PATH", help="who signs the certificates of clients")
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        default=0,
        metavar="NUMBER",
        help="certificates of clients: 0 not needed, 1 checked if shown, 2 needed",
    )


def _add_model_flags(group: _Group) -> None:
    group.add("tokenizer", "tokenizer folder or name; the model's by default", metavar="NAME")
    group.add("dtype", "type of weights and KV", choices=DTYPES)
    group.add("device", "where the model runs; auto takes cuda where there is one", choices=DEVICES)
    group.add(
        "max_model_len",
        "longest prompt plus output in tokens; the model's limit by default",
        _number,
        "TOKENS",
    )
    group.add("seed", "seed of the sampler", int, "NUMBER")
    group.add("generation_config", "auto: the folder's sampling defaults; vllm: none of them", metavar="NAME")
    group.add("load_format", "where weights come from; dummy makes random ones", choices=LOAD_FORMATS)
    group.add("model_impl", "whose model code runs", choices=MODEL_IMPLS)
    group.add(
        "attention_backend",
        "auto: on cuda triton; on a CPU a kernel compiled for it where there is a C++ compiler; torch: plain",
        choices=ATTENTION_BACKENDS,
    )
    group.add(
        "quantization",
        "round the weights to so many bits as they are loaded, on a CPU: to save memory; not by default",
        choices=QUANTIZATIONS,
    )
    group.add(
        "tensor_parallel_size",
        "processes that compute the model together, with a GPU, or a share of the CPU's cores, each",
        int,
        "RANKS",
        short="-tp",
    )
    group.add_switch("enforce_eager", "capture no CUDA graphs: less memory, slower steps")
    group.add_switch("trust_remote_code", "run code that comes with the model")


def _add_cache_flags(group: _Group) -> None:
    group.add("block_size", "tokens per KV block", int, "TOKENS")
    group.add("kv_cache_dtype", "type of stored K and V; auto: the model's", choices=KV_CACHE_DTYPES)
    group.add("kv_cache_scale", "what K and V are divided by when stored in 8 bits", float, "NUMBER")
    group.add("gpu_memory_utilization", "share of the memory that weights and KV may take", float, "SHARE")
    group.add("kv_cache_memory_bytes", "exact size of the KV pool, such as 2G", _number, "BYTES")
    group.add("num_gpu_blocks_override", "exact number of KV blocks", int, "BLOCKS")
    group.add("kv_offloading_size", "host memory for copies of KV blocks; none by default", float, "GIB")
    group.add("kv_offloading_disk_size", "disk for copies that host memory drops; none", float, "GIB")
    group.add("kv_offloading_disk_path", "folder for them; what it holds ends with the server", str, "FOLDER")
    group.add(
        "kv_offloading_disk_min_tokens",
        "compute fewer rather than read them from disk; measured at the start by default",
        int,
        "TOKENS",
    )
    group.add_switch("enable_prefix_caching", "reuse the KV of equal prefixes")


def _add_scheduler_flags(group: _Group) -> None:
    group.flags.add_argument(
        "--scheduling-policy",
        default="continuum",
        metavar="NAME",
        help="order of requests: continuum, which also keeps a job's KV across its tool calls, fcfs, "
        "priority, or to compare with: program-fcfs, fixed-ttl:SECONDS, fork, plas, gate:SHARE",
    )
    group.add("max_num_seqs", "most requests running at once", int, "REQUESTS")
    group.add("max_num_batched_tokens", "token budget of a step", _number, "TOKENS")
    group.add_switch("enable_chunked_prefill", "let a long prompt take several steps")
    group.add(
        "long_prefill_token_threshold",
        "most prompt tokens of one request per step; 0: no limit",
        _number,
        "TOKENS",
    )
    group.add_switch("scheduler_reserve_full_isl", "start a request only when all its tokens fit")
    group.add_switch("async_scheduling", "plan a step while the one before it runs; by default on a GPU only")


def _add_continuum_flags(group: _Group) -> None:
    group.add("ttl_rule", "what decides how long a job's KV is held", choices=TTL_RULES)
    group.add(
        "horizon_s", "median-horizon: hold while half of such calls are back within this", float, "SECONDS"
    )
    group.add("cold_horizon_s", "median-horizon: hold this long before anything is learnt", float, "SECONDS")
    group.add("fixed_ttl_s", "fixed: hold this long", float, "SECONDS")
    group.add(
        "work_weight",
        "jobs of a kind that is more work than others are ranked so many seconds later per second of it, and "
        "earlier if less; 0: by age alone",
        float,
        "NUMBER",
    )
    group.add("answer_ttl_s", "hold this long after a turn that called no tool", float, "SECONDS")
    group.add("max_ttl_s", "no rule holds longer", float, "SECONDS")
    group.add("pin_budget", "largest share of the KV pool that may be held", float, "SHARE")
    group.add(
        "pin_tenant_share",
        "largest share of that for one tenant (owner of the API key, else the request's user), even if alone",
        float,
        "SHARE",
    )
    group.add(
        "max_wait_s",
        "who has waited this long may take what is held, and starts before all who came later",
        float,
        "SECONDS",
    )
    group.add(
        "max_return_wait_s",
        "the same for a turn of a job that has begun, where that is less",
        float,
        "SECONDS",
    )
    group.add_switch("infer_jobs", "recognise jobs that no client names by what their prompts continue")
    group.add_switch("release_superseded", "reuse first what a job's next prompt shows to be of no more use")
    group.add("max_jobs", "jobs remembered; beyond, the one idle longest is forgotten", int, "JOBS")
    group.add("job_idle_s", "a job idle for so long is forgotten", float, "SECONDS")
    group.add(
        "estimator_state",
        "file that keeps what was learnt about tools across restarts; one server per file",
        metavar="PATH",
    )


def _add_observation_flags(group: argparse._ArgumentGroup) -> None:
    _add_trace_flags(group)
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send spans of jobs, turns and tool gaps to this OpenTelemetry collector, by OTLP over HTTP; "
        "needs continuum-engine[otel]",
    )
    group.add_argument("--disable-log-stats", action="store_true", help="collect no statistics for /metrics")


def _add_trace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", metavar="PATH", help="write the scheduler trace there, compressed if it ends in .zst"
    )
    group.add_argument(
        "--trace-dir", metavar="FOLDER", help="let clients have traces begun in this folder: POST /trace"
    )
    group.add_argument(
        "--trace-max-bytes",
        type=_number,
        metavar="BYTES",
        help="a file of a trace is followed by a next one when it has about so many, such as 256M",
    )
    group.add_argument(
        "--trace-max-files", type=int, metavar="FILES", help="so many files of a trace are kept, the last"
    )


def _record(kind: type[Record], args: argparse.Namespace, **given: object) -> Record:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    from_args = {field.name: getattr(args, field.name) for field in fields if hasattr(args, field.name)}
    return kind(**{**from_args, **given})


def _defaults(record: type[Any]) -> dict[str, Any]:
    return {
        field.name: field.default
        for field in dataclasses.fields(record)
        if field.default is not dataclasses.MISSING
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(text: str) -> int:
    """``4096``, ``32k`` (thousands) or ``2G`` (powers of 1024), as V1 reads them."""
    unit = _UNITS.get(text[-1:], 1)
    digits = text if unit == 1 else text[:-1]
    try:
        return int(digits) if unit == 1 else int(float(digits) * unit)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 32k or 2G") from None


def _names(text: str) -> tuple[str, ...]:
    """Names with commas between, or a JSON list of them as V1 takes."""
    if not text.startswith("["):
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        return tuple(str(name) for name in json.loads(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names") from None


def _template_text(path_or_text: str) -> str:
    """As in V1: a path, or the template itself if it looks like one."""
    if "{" in path_or_text:
        return path_or_text
    try:
        return Path(path_or_text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {path_or_text!r}: {error}.") from error
