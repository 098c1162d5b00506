"""Messages to the user who started the server: on stdout when it is ready, errors on stderr."""

from __future__ import annotations

import socket
import sys

from engine.api.config import ServerConfig
from engine.api.processes.listener import address_of
from engine.media.reader import INSTALLS, can_decode
from engine.records.kv_cache_groups import num_blocks_held
from engine.records.messages import EngineReady

JOB_TOKENS = 32 * 1024
"""The context length of a coding agent after its first turns."""


def say_ready(config: ServerConfig, sock: socket.socket, core: EngineReady) -> None:
    address = address_of(config, sock)
    lines = [*_loaded(core), _pool(core)]
    if core.most_draft_bytes:
        size = f"{core.most_draft_bytes / 2**20:,.0f} MiB"
        lines.append(f"Drafts: up to {size} of memory per engine core, for the texts of earlier turns")
    if config.dashboard:
        lines.append(f"Dashboard: {address}/dashboard")
    print("\n".join([*lines, f"Serving {config.served_model_names[0]} at {address}"]), flush=True)
    for kind in () if core.media is None else core.media.all:
        if not can_decode(kind):
            _complain(f"Warning: {kind.noun}s are left out of prompts until you run: {INSTALLS[kind]}")
    if config.is_open_to_all:
        _complain(
            "Warning: listening on all interfaces without an API key: anyone who can reach this machine "
            "can use the server. Set CONTINUUM_API_KEY, or --host 127.0.0.1 for this machine only."
        )


def _loaded(core: EngineReady) -> list[str]:
    """How long loading took, and what of it; nothing if that is not known."""
    if not core.start_phases:
        return []
    total_s = sum(seconds for _, seconds in core.start_phases)
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in core.start_phases)
    return [f"Loaded in {total_s:.1f} s: {parts}"]


def _pool(core: EngineReady) -> str:
    """The size of the KV pool in tokens and in jobs."""
    job_tokens = min(JOB_TOKENS, core.max_model_len)
    num_blocks = -(-job_tokens // core.block_size)
    num_held = num_blocks_held(core.kv_cache_groups, core.block_size, num_blocks)
    num_tokens = core.num_gpu_blocks * core.block_size * num_blocks // max(1, num_held)
    job = "32k tokens" if job_tokens == JOB_TOKENS else f"{job_tokens:,} tokens, the maximum length"
    return (
        f"KV pool: {num_tokens:,} tokens in {core.num_gpu_blocks:,} blocks of {core.block_size}: "
        f"{num_tokens / job_tokens:,.1f} jobs of {job}"
    )


def say_core_died() -> None:
    _complain("Engine core process died; shutting down.")


def report_api_server_ended(pid: int, exit_code: int) -> None:
    _complain(
        f"API server process {pid} exited with code {exit_code}: aborting its requests and restarting it."
    )


def say_giving_up(num_ended: int, window_s: float) -> None:
    _complain(f"{num_ended} API server processes exited within {window_s:.0f} s; shutting down.")


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
