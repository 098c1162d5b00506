"""``kv_transfer_params``: what proxies pass from the server that computes a prompt to the one that continues.

The fields are vLLM V1's, so that its proxies work unchanged: the first server gets ``do_remote_decode``, and
the params in its answer are sent to the second one.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import msgspec

from engine.config.engine_config import EngineConfig
from engine.errors import RequestError
from engine.records.kv_transfer import KVLeased, KVLeaseOrder, KVTransfer, RemotePrefix

FIELD = "kv_transfer_params"
_LEASE_ID = re.compile(r"[0-9a-f]{32}")
"""Matches the ids that servers generate; an id is put into messages unchanged."""


class KVTransferParams(msgspec.Struct, kw_only=True):
    """The fields that are read; others are ignored."""

    do_remote_decode: bool | None = None
    """Compute the prompt, and lease its KV to another server."""
    do_remote_prefill: bool | None = None
    """Fetch the prompt's KV from another server."""
    remote_request_id: str | None = None
    """The id that gives access to the lease."""
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None
    """Number of tokens at the start of the prompt whose KV is leased."""
    remote_lease_s: float | None = None
    """Seconds for which each renewal holds the lease."""
    tp_size: int | None = None


class KVTransferDoor:
    """Reads the params of requests, and writes those of answers."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        """Without a configuration, no transfer is possible."""
        self._config = None if config is None else config.kv_transfer
        self._tp_size = 1 if config is None else config.model.tensor_parallel_size
        given = None if self._config is None else self._config.engine_id
        self._engine_id = given or str(uuid4())

    def read(self, given: Mapping[str, Any] | None) -> KVTransfer | None:
        """Returns the transfer that the params request; None without params, or if they request nothing.

        RequestError for a field that is wrong or missing, and for a transfer that this server does not
        support.
        """
        if not given:
            return None
        try:
            params = msgspec.convert(dict(given), KVTransferParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"{FIELD}: {error}.", FIELD) from error
        if params.do_remote_decode and params.do_remote_prefill:
            raise RequestError(f"{FIELD}: do_remote_decode and do_remote_prefill cannot both be on.", FIELD)
        if params.do_remote_decode:
            return self._order()
        return self._prefix(params) if params.do_remote_prefill else None

    def _order(self) -> KVLeaseOrder:
        config = self._config
        if config is None or not config.leases_out:
            raise RequestError(
                f"{FIELD}.do_remote_decode: this server does not lease KV (kv_transfer_config, kv_role).",
                FIELD,
            )
        return KVLeaseOrder(secrets.token_hex(16), config.kv_connector_extra_config.lease_s)

    def _prefix(self, params: KVTransferParams) -> RemotePrefix | None:
        config = self._config
        if config is None or not config.fetches:
            raise RequestError(
                f"{FIELD}.do_remote_prefill: this server fetches no KV (kv_transfer_config).", FIELD
            )
        lease_id = params.remote_request_id
        host = params.remote_host
        port = params.remote_port
        if lease_id is None or host is None or port is None or params.remote_num_tokens is None:
            raise RequestError(
                f"{FIELD}.do_remote_prefill needs remote_request_id, remote_host, remote_port and "
                "remote_num_tokens.",
                FIELD,
            )
        if _LEASE_ID.fullmatch(lease_id) is None:
            raise RequestError(f"{FIELD}.remote_request_id must be 32 hexadecimal digits.", FIELD)
        if params.remote_num_tokens < 0:
            raise RequestError(f"{FIELD}.remote_num_tokens must be at least 0.", FIELD)
        if not all(config.allows_port(port + rank) for rank in range(self._tp_size)):
            raise RequestError(
                f"{FIELD}.remote_port: KV is not fetched from port {port}; the server's operator may add it "
                "to allowed_ports (kv_transfer_config, kv_connector_extra_config).",
                FIELD,
            )
        if not config.allows(host):
            raise RequestError(
                f"{FIELD}.remote_host: KV is not fetched from {host!r}; the server's operator may add it to "
                "allowed_peers (kv_transfer_config, kv_connector_extra_config).",
                FIELD,
            )
        must_load = config.kv_load_failure_policy == "fail"
        if params.tp_size not in (None, self._tp_size) and not must_load:
            return None  # slices of other sizes: everything is recomputed
        asked_s = params.remote_lease_s or 30.0
        if not math.isfinite(asked_s):
            raise RequestError(f"{FIELD}.remote_lease_s must be a finite number.", FIELD)
        lease_s = min(max(asked_s, 1.0), 86400.0)
        return RemotePrefix(lease_id, params.remote_num_tokens, host, port, lease_s, must_load)

    def tell(self, leased: KVLeased | None) -> dict[str, Any] | None:
        """Returns the params for the request to the server that continues; None if nothing is leased."""
        if leased is None or self._config is None:
            return None
        lease_s = self._config.kv_connector_extra_config.lease_s
        return {
            "do_remote_prefill": leased.num_tokens > 0,
            "do_remote_decode": False,
            "remote_block_ids": leased.block_ids,
            "remote_engine_id": self._engine_id,
            "remote_request_id": leased.lease_id,
            "remote_host": leased.host,
            "remote_port": leased.port,
            "remote_num_tokens": leased.num_tokens,
            "remote_lease_s": lease_s,
            "remote_blocks_expiry_time": time.time() + lease_s,
            "tp_size": self._tp_size,
        }
