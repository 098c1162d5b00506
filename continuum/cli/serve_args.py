"""Builds the configuration records from the flags of ``continuum serve``."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TypeVar

from continuum.cli.flag_group import defaults_of, flag_of
from continuum.cli.lora_flags import lora_config
from continuum.cli.media_flags import media_limits_of
from continuum.config import ContinuumConfig
from engine.api.config import AccessConfig, LimitsConfig, ServerConfig
from engine.api.http.access_flags import api_keys, tls_config
from engine.api.openai_responses.config import ResponsesConfig
from engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    TelemetryConfig,
    TraceConfig,
)
from engine.config.kv_events import read_kv_events_config
from engine.config.kv_transfer import read_kv_transfer_config
from engine.config.media import MediaConfig
from engine.config.parallel import ParallelConfig
from engine.config.pooling import read_pooling_config
from engine.config.speculative import read_speculative_config
from engine.errors import ConfigError
from engine.kv_transfer.offloading import with_offloading

Record = TypeVar("Record")

_FLAGS_OF_FIELDS = {"trace_path": "--trace", "api_keys": "--api-key"}
"""Fields whose flags have different names."""


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration of the engine core."""
    kv_transfer = read_kv_transfer_config(args.kv_transfer_config, args.kv_handover_path)
    return EngineConfig(
        model=_record(ModelConfig, args, **media_limits_of(args)),
        cache=with_offloading(_record(CacheConfig, args), kv_transfer),
        kv_transfer=kv_transfer,
        scheduler=_record(SchedulerConfig, args, max_loras=None),
        trace=_record(TraceConfig, args, trace_path=args.trace),
        parallel=_record(ParallelConfig, args),
        log_stats=not args.disable_log_stats,
        speculative=read_speculative_config(args.speculative_config),
        lora=lora_config(args),
        pooling=read_pooling_config(args.runner, args.pooler_config, args.hf_overrides),
        kv_events=read_kv_events_config(args.kv_events_config),
        telemetry=TelemetryConfig(
            otlp_traces_endpoint=args.otlp_traces_endpoint,
            model_name=args.served_model_name[0] if args.served_model_name else args.model,
        ),
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The configuration of the HTTP server."""
    template = None if args.chat_template is None else _template_text(args.chat_template)
    names = tuple(args.served_model_name or (args.model,))
    tls = tls_config(args)
    return _record(
        ServerConfig,
        args,
        chat_template=template,
        served_model_names=names,
        responses=_record(ResponsesConfig, args),
        limits=_record(LimitsConfig, args),
        access=_record(AccessConfig, args, api_keys=api_keys(args)),
        tls=tls,
        media=_record(MediaConfig, args),
    )


def continuum_config(args: argparse.Namespace) -> ContinuumConfig:
    """The agent policy's configuration. ConfigError for its flags with a policy that would ignore them."""
    defaults = defaults_of(ContinuumConfig)
    if args.scheduling_policy != "continuum":
        for name, default in defaults.items():
            if getattr(args, name, default) != default:
                raise ConfigError(f"{flag_of(name)} needs --scheduling-policy continuum.")
    return _record(ContinuumConfig, args)


def _record(kind: type[Record], args: argparse.Namespace, **given: object) -> Record:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    from_args = {field.name: getattr(args, field.name) for field in fields if hasattr(args, field.name)}
    return kind(**{**from_args, **given})


def _template_text(path_or_text: str) -> str:
    """Returns a template's text, given as a path or, as in vLLM, as the text itself."""
    if "{" in path_or_text:
        return path_or_text
    try:
        return Path(path_or_text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {path_or_text!r}: {error}.") from error


def named_by_flag(error: ConfigError, args: argparse.Namespace) -> ConfigError:
    """Returns the error of a record, prefixed with the flag of the field that it names."""
    field = re.match(r"\w+", str(error))
    name = "" if field is None else field[0]
    if name not in _FLAGS_OF_FIELDS and name not in args:
        return error
    return ConfigError(f"argument {_FLAGS_OF_FIELDS.get(name, flag_of(name))}: {error}")
