"""The flags of ``continuum serve`` by the sections of its help, with vLLM's names where vLLM has the flag."""

from __future__ import annotations

import argparse

from continuum.cli.flag_group import FlagGroup, number
from continuum.cli.lora_flags import add_lora_flags
from continuum.cli.media_flags import add_media_flags
from continuum.cli.parallel_flags import add_parallelism_flags
from continuum.cli.pooling_flags import add_pooling_flags
from continuum.config import TTL_RULES, ContinuumConfig
from engine.api.config import DEFAULT_THINKING, AccessConfig, LimitsConfig, ServerConfig
from engine.api.http.access_flags import API_KEY_VARIABLE, add_tls_flags
from engine.api.openai_responses.config import ResponsesConfig
from engine.config.engine_config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.config.parallel import ParallelConfig
from engine.tokenization.content_format import CONTENT_FORMATS
from engine.tool_parsers.catalog import REASONING_PARSERS, TOOL_CALL_PARSERS

LOAD_FORMATS = ("auto", "safetensors", "dummy")
MODEL_IMPLS = ("auto", "native", "transformers")

SHORT_HELP = frozenset(
    (
        *("model", "served_model_name", "dtype", "device", "max_model_len", "quantization"),
        *("tensor_parallel_size", "data_parallel_size", "api_server_count"),
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "enable_prefix_caching"),
        *("kv_offloading_size", "kv_offloading_disk_size", "kv_offloading_disk_path"),
        *("scheduling_policy", "max_num_seqs", "max_num_batched_tokens"),
        *("pin_budget", "max_wait_s", "estimator_state"),
        *("host", "port", "dashboard"),
        *("chat_template", "tool_call_parser", "reasoning_parser"),
        *("max_num_queued_reqs", "request_timeout_s"),
        *("api_key", "ssl_certfile", "ssl_keyfile"),
        *("trace", "otlp_traces_endpoint"),
    )
)
"""The flags that most servers need, which the short ``--help`` shows; ``--help=all`` shows all."""

EXPERIMENTAL = frozenset(
    (
        *("ttl_rule", "horizon_s", "cold_horizon_s", "fixed_ttl_s", "answer_ttl_s", "max_ttl_s"),
        *("work_weight", "release_superseded", "kv_cache_scale", "kv_offloading_disk_min_tokens"),
    )
)
"""Flags for experiments and tuning, which may change or be removed in any release."""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all flags, section by section, in the order of the help."""
    _add_model_flags(FlagGroup(parser, "model", ModelConfig))
    add_lora_flags(parser)
    add_pooling_flags(parser)
    add_media_flags(parser)
    add_parallelism_flags(FlagGroup(parser, "parallelism", ModelConfig, ParallelConfig, ServerConfig))
    _add_cache_flags(FlagGroup(parser, "memory and KV cache", CacheConfig, ModelConfig))
    _add_offloading_flags(FlagGroup(parser, "KV offloading", CacheConfig))
    _add_scheduler_flags(FlagGroup(parser, "scheduling", SchedulerConfig))
    _add_pin_flags(
        FlagGroup(parser, "agent policy: pins", ContinuumConfig, text="With --scheduling-policy continuum.")
    )
    _add_job_flags(
        FlagGroup(
            parser,
            "agent policy: order and jobs",
            ContinuumConfig,
            text="With --scheduling-policy continuum.",
        )
    )
    _add_server_flags(FlagGroup(parser, "API server", ServerConfig))
    _add_reply_flags(FlagGroup(parser, "chat templates and reply parsing", ServerConfig))
    _add_responses_flags(FlagGroup(parser, "Responses API", ResponsesConfig))
    _add_limits_flags(FlagGroup(parser, "limits and timeouts", LimitsConfig))
    _add_key_flags(FlagGroup(parser, "security", AccessConfig))
    add_tls_flags(parser.add_argument_group("TLS"))
    _add_observability_flags(parser.add_argument_group("tracing and observability"))


def _add_model_flags(group: FlagGroup) -> None:
    group.flags.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face model folder or hub name (default: the bundled demo model)",
    )
    group.flags.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="Names that requests may use for the model; responses carry the first (default: MODEL)",
    )
    group.add("tokenizer", "Tokenizer folder or hub name (default: MODEL)", metavar="NAME")
    group.add_switch("skip_tokenizer_init", "Load no tokenizer: prompts and answers are token ids")
    group.add("dtype", "Data type of weights and activations; auto: the checkpoint's", choices=DTYPES)
    group.add("device", "Device that runs the model; auto: cuda if available, else cpu", choices=DEVICES)
    group.add(
        "max_model_len",
        "Maximum context length, prompt plus output, in tokens (default: the model's limit)",
        number,
        "TOKENS",
    )
    group.add(
        "quantization",
        "Weight-only quantization at load time (CPU only): int8 per output channel, or int4 in groups "
        "(default: off)",
        choices=QUANTIZATIONS,
    )
    group.add("load_format", "Source of the weights; dummy: random ones, for tests", choices=LOAD_FORMATS)
    group.add(
        "model_impl",
        "Model code to run; auto: native where the architecture is supported, else transformers",
        choices=MODEL_IMPLS,
    )
    group.add(
        "attention_backend",
        "Attention implementation; auto: triton on cuda, a compiled kernel on a CPU with a C++ compiler, "
        "else torch",
        choices=ATTENTION_BACKENDS,
    )
    group.add_switch("enforce_eager", "Disable CUDA graphs: faster start and less memory, slower steps")
    group.add(
        "generation_config",
        "Default sampling parameters: auto reads the model folder's generation_config.json, vllm ignores "
        "it, any other value is a folder to read it from",
        metavar="NAME",
    )
    group.add("seed", "Random seed of the sampler", int, "NUMBER")
    group.add_switch("trust_remote_code", "Execute Python code from the model folder")
    group.add_switch(
        "enable_return_routed_experts",
        "Return the experts that each token was routed to, in completions that are not streamed",
    )


def _add_cache_flags(group: FlagGroup) -> None:
    group.add(
        "gpu_memory_utilization",
        "Fraction of the device's memory for weights, activations and KV cache, from 0 to 1",
        float,
        "FRACTION",
    )
    group.add(
        "kv_cache_memory_bytes",
        "Size of the KV cache in bytes, such as 2G; overrides --gpu-memory-utilization (default: by that)",
        number,
        "BYTES",
    )
    group.add(
        "num_gpu_blocks_override",
        "Number of KV cache blocks; overrides both memory options above (default: as many as fit)",
        int,
        "BLOCKS",
    )
    states = "Number of state slots for linear attention and Mamba layers (default: two fifths of the memory)"
    group.add("num_state_slots", states, int, "STATES")
    group.add_switch("enable_prefix_caching", "Reuse the KV blocks of prompts that begin with equal tokens")
    group.add_switch("disable_cascade_attn", "No joint attention of decodes to a shared prefix (triton only)")
    group.add_switch("disable_hybrid_kv_cache_manager", "Keep KV of all tokens in sliding-window layers, too")
    group.add("block_size", "KV cache block size in tokens", int, "TOKENS")
    group.add("kv_cache_dtype", "Data type of the KV cache; auto: the model's", choices=KV_CACHE_DTYPES)
    group.add("kv_cache_scale", "Divisor of K and V when they are stored in 8 bits", float, "SCALE")
    group.add_switch("kv_cache_metrics", "Export in /metrics how long KV blocks live and when they are used")
    group.add("kv_cache_metrics_sample", "Fraction of KV blocks that these metrics sample", float, "FRACTION")


def _add_offloading_flags(group: FlagGroup) -> None:
    group.add(
        "kv_offloading_size",
        "Host memory for offloaded KV blocks, in GiB (default: no offloading)",
        float,
        "GIB",
    )
    group.add(
        "kv_offloading_disk_size",
        "Disk space for KV blocks evicted from host memory, in GiB; needs --kv-offloading-size and "
        "--kv-offloading-disk-path (default: no disk tier)",
        float,
        "GIB",
    )
    group.add(
        "kv_offloading_disk_path",
        "Folder of the disk tier; its contents are deleted when the server stops",
        metavar="FOLDER",
    )
    group.add(
        "kv_offloading_disk_min_tokens",
        "Recompute, instead of reading from disk, prefixes shorter than this many tokens "
        "(default: measured at startup)",
        int,
        "TOKENS",
    )
    group.add(
        "kv_handover_path",
        "Folder, shared with other servers, where a server that is drained or stops leaves the KV of paused "
        "jobs for their next turns (default: it is recomputed)",
        metavar="FOLDER",
    )


def _add_scheduler_flags(group: FlagGroup) -> None:
    group.flags.add_argument(
        "--scheduling-policy",
        default="continuum",
        metavar="NAME",
        help="Scheduling policy: continuum keeps a job's KV cache across its tool calls; fcfs and priority "
        "are vLLM's; fork, plas, hrrn and others are published policies to compare with (docs/policy.md); "
        "MODULE:ATTRIBUTE is your own",
    )
    group.add("max_num_seqs", "Maximum number of running requests", int, "REQUESTS")
    group.add(
        "max_num_batched_tokens",
        "Token budget of a step: most prefill and decode tokens computed together",
        number,
        "TOKENS",
    )
    group.add_switch("enable_chunked_prefill", "Split long prefills over several steps")
    group.add(
        "long_prefill_token_threshold",
        "Maximum prefill tokens of one request per step; 0: unlimited",
        number,
        "TOKENS",
    )
    group.add_switch(
        "scheduler_reserve_full_isl", "Admit a request only if its whole prompt fits into free KV blocks"
    )
    group.add_switch(
        "async_scheduling", "Schedule the next step while the current one runs (default: on a GPU only)"
    )
    group.add(
        "stream_interval",
        "Number of tokens per event of a stream; a larger number saves work of the API server",
        int,
        "TOKENS",
    )
    group.flags.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='Speculative decoding, as vLLM\'s JSON: {"method": "suffix"} drafts from the job\'s own past, '
        "ngram from the request alone (default: off)",
    )


def _add_pin_flags(group: FlagGroup) -> None:
    group.add("pin_budget", "Maximum fraction of the KV cache that pins may hold", float, "FRACTION")
    group.add(
        "pin_tenant_share",
        "Maximum fraction of the pin budget for one tenant (the API key's name, else the request's user), "
        "even with no other tenant waiting",
        float,
        "FRACTION",
    )
    group.add(
        "max_ttl_s", "Upper bound of a pin's time to live in seconds, whatever the rule", float, "SECONDS"
    )
    group.add(
        "answer_ttl_s", "Pin time to live after a turn without tool calls, in seconds", float, "SECONDS"
    )
    group.add("ttl_rule", "Rule that sets the time to live of a pin", choices=TTL_RULES)
    group.add(
        "horizon_s",
        "median-horizon rule: keep the KV while the median remaining tool time is below this, in seconds",
        float,
        "SECONDS",
    )
    group.add(
        "cold_horizon_s",
        "median-horizon rule: time to live while a tool's times are still unknown, in seconds",
        float,
        "SECONDS",
    )
    group.add("fixed_ttl_s", "fixed rule: time to live of every pin, in seconds", float, "SECONDS")
    group.add_switch(
        "release_superseded", "Evict first the blocks that a job's new prompt no longer contains"
    )


def _add_job_flags(group: FlagGroup) -> None:
    group.add(
        "max_wait_s",
        "Aging: a request that has waited this long goes first and may revoke any pin, in seconds",
        float,
        "SECONDS",
    )
    group.add(
        "max_return_wait_s",
        "Aging of the later turns of a job, in seconds; the smallest bound that applies to a request counts",
        float,
        "SECONDS",
    )
    group.add(
        "max_silent_wait_s",
        "Aging of requests that are not streamed, whose clients receive nothing while they wait, in seconds",
        float,
        "SECONDS",
    )
    group.add(
        "max_first_wait_s",
        "Refuse a new job with HTTP 429 if it is expected to wait for longer than this before it begins, in "
        "seconds (default: never)",
        float,
        "SECONDS",
    )
    group.add(
        "work_weight",
        "Weight of the predicted job length in the queue order: a job is ranked this many seconds later per "
        "second of work beyond the usual; 0: by age only",
        float,
        "WEIGHT",
    )
    group.add_switch("learn_order", "Learn in a separate process how long jobs and calls will still take")
    group.add_switch("infer_jobs", "Recognize jobs without an id by the prefixes of their prompts")
    group.add(
        "max_jobs", "Maximum number of remembered jobs; the longest idle is forgotten first", int, "JOBS"
    )
    group.add("job_idle_s", "Forget a job that was idle for this long, in seconds", float, "SECONDS")
    group.add(
        "estimator_state",
        "File that keeps what was learned across restarts, one server per file (default: not kept)",
        metavar="PATH",
    )


def _add_server_flags(group: FlagGroup) -> None:
    group.add("host", "Address to listen on (default: all interfaces)", metavar="ADDRESS")
    group.add("port", "Port to listen on; 0: any free port", int, "PORT")
    group.add("uds", "Unix domain socket to listen on instead of a port", metavar="PATH")
    group.add_switch("dashboard", "Serve a live view of jobs, pins, blocks and decisions at /dashboard")
    group.add_names(
        "job_headers",
        "More request headers that name the job, for gateways and clients with names of their own "
        "(default: none; docs/api.md lists the known ones)",
        "NAMES",
    )
    group.add_switch("receipts", "Report cached, pinned and recomputed tokens of each turn in usage")
    group.add("keep_alive_s", "Close idle HTTP connections after this many seconds", int, "SECONDS")
    group.add(
        "shutdown_grace_s",
        "Time for running requests to finish after SIGTERM, in seconds",
        float,
        "SECONDS",
    )


def _add_reply_flags(group: FlagGroup) -> None:
    group.add(
        "chat_template",
        "Chat template: a file, or the Jinja text itself (default: the tokenizer's)",
        metavar="TEMPLATE",
    )
    group.add(
        "chat_template_content_format",
        "Message contents passed to the template: strings, or lists of parts (openai); auto: as the "
        "template expects",
        choices=CONTENT_FORMATS,
    )
    group.add_switch(
        "trust_request_chat_template", "Allow requests to send chat templates, which are programs"
    )
    group.add(
        "tool_call_parser",
        "Parser of tool calls; auto: chosen by the chat template; else " + _all_but_auto(TOOL_CALL_PARSERS),
        metavar="NAME",
    )
    group.add("tool_parser_plugin", "Python file that registers a custom tool parser", metavar="PATH")
    group.flags.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="No effect; accepted for vLLM command lines (tool calls are always enabled)",
    )
    group.add(
        "reasoning_parser",
        "Parser of reasoning; auto: chosen by the chat template; else " + _all_but_auto(REASONING_PARSERS),
        metavar="NAME",
    )
    group.add(
        "messages_default_thinking",
        "Reasoning for Messages API requests that do not set it; template: the chat template's default",
        choices=DEFAULT_THINKING,
    )


def _all_but_auto(names: tuple[str, ...]) -> str:
    return ", ".join(name for name in names if name != "auto")


def _add_responses_flags(group: FlagGroup) -> None:
    group.add(
        "max_stored_responses",
        "Maximum number of stored responses; the least recently used is removed first",
        int,
        "RESPONSES",
    )
    size = "Maximum total size of stored responses in bytes"
    group.add("max_stored_response_bytes", size, number, "BYTES")
    group.add(
        "max_background_responses",
        "Maximum number of background responses per API server process; beyond: HTTP 503",
        int,
        "RESPONSES",
    )


def _add_limits_flags(group: FlagGroup) -> None:
    group.add(
        "max_num_queued_reqs",
        "Maximum number of open requests, waiting and running; beyond: HTTP 503 (default: unlimited)",
        int,
        "REQUESTS",
    )
    group.add(
        "max_num_queued_tokens",
        "Maximum number of prompt tokens waiting for prefill; beyond: HTTP 503 (default: unlimited)",
        number,
        "TOKENS",
    )
    group.add(
        "request_timeout_s",
        "End a request with HTTP 504 after this many seconds (default: never)",
        float,
        "SECONDS",
    )
    group.add("max_body_bytes", "Maximum request body size in bytes; beyond: HTTP 413", number, "BYTES")
    group.add(
        "max_connections",
        "Maximum number of connections per API server process; beyond, the longest idle is closed",
        int,
        "CONNECTIONS",
    )
    group.add("head_timeout_s", "Timeout for reading the request headers, in seconds", float, "SECONDS")
    group.add("body_timeout_s", "Timeout for reading the request body, in seconds", float, "SECONDS")
    group.add(
        "core_silence_s",
        "/health returns 503 after the engine core has not answered for this many seconds",
        float,
        "SECONDS",
    )
    group.add(
        "core_step_s",
        "/health returns 503 after the engine core has been in one step for this many seconds",
        float,
        "SECONDS",
    )
    group.add(
        "sse_keep_alive_interval",
        "Interval of keep-alive comments on a silent stream, in seconds; 0: none",
        float,
        "SECONDS",
    )


def _add_key_flags(group: FlagGroup) -> None:
    group.flags.add_argument(
        "--api-key",
        action="extend",
        nargs="+",
        metavar="[NAME:]KEY",
        help="API keys, sent as bearer token or x-api-key; NAME is the key's owner. Prefer the environment "
        f"variable {API_KEY_VARIABLE}, which no process list shows (default: no key needed)",
    )
    group.add(
        "api_key_file",
        "TOML file of more keys, with names and quotas; SIGHUP reads it again (default: none)",
        metavar="FILE",
    )
    group.add(
        "access_log",
        "File for a line of JSON per request: who asked, what, tokens and time, never the text "
        "(default: none)",
        metavar="FILE",
    )
    group.add_switch(
        "share_prefixes_across_tenants",
        "Share cached prefixes between owners of different keys; owners can then detect each other's prompts",
    )
    group.add_names(
        "allowed_hosts",
        "Accepted Host headers besides IP addresses and local names, such as *.example.org, or * "
        "(default: all; without keys on a loopback address: none)",
        "NAMES",
    )
    group.add_names("allowed_origins", "CORS: allowed origins, URLs or * (default: none)", "URLS")
    group.add_names("allowed_methods", "CORS: allowed methods (default: all)", "METHODS")
    group.add_names("allowed_headers", "CORS: allowed request headers (default: all)", "HEADERS")
    group.add_switch("allow_credentials", "CORS: allow cookies")


def _add_observability_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        metavar="PATH",
        help="Write the scheduler trace to this file; compressed if it ends in .zst (default: no trace)",
    )
    group.add_argument(
        "--trace-dir",
        metavar="FOLDER",
        help="Folder for traces that clients start with POST /trace (default: clients cannot)",
    )
    group.add_argument(
        "--trace-max-bytes",
        type=number,
        metavar="BYTES",
        help="Rotate the trace file at this size in bytes, such as 256M (default: one file)",
    )
    group.add_argument(
        "--trace-max-files", type=int, metavar="FILES", help="Keep the last N trace files (default: all)"
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="OpenTelemetry collector for spans of jobs, turns and tool gaps, by OTLP over HTTP; needs "
        "continuum-engine[otel] (default: no spans)",
    )
    group.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="Publish changes of the prefix cache over ZMQ, as vLLM's JSON: "
        '{"enable_kv_cache_events": true}; pins_endpoint adds events of pins (default: off)',
    )
    group.add_argument(
        "--kv-transfer-config",
        metavar="JSON",
        help="Transfer of KV to and from servers, files or host memory, as vLLM's JSON: "
        '{"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 5600}; NixlConnector needs '
        "continuum-engine[nixl] (default: none)",
    )
    group.add_argument("--disable-log-stats", action="store_true", help="Collect no statistics for /metrics")
