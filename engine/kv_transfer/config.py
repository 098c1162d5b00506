"""The record of ``kv_transfer_config``, vLLM V1's JSON, and how it is read."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.json_options import check_names, make_record, read_fields

OPTION = "kv_transfer_config"
EXAMPLE = '{"kv_connector": "TCPConnector", "kv_role": "kv_both"}'
PEER_CONNECTORS = ("TCPConnector", "NixlConnector", "MooncakeConnector")
CONNECTORS = (*PEER_CONNECTORS, "SharedStorageConnector", "OffloadingConnector")
PROTOCOLS = ("tcp", "rdma")
ROLES = ("kv_producer", "kv_consumer", "kv_both")
FAILURE_POLICIES = ("recompute", "fail")
NEAR_PORTS = 64
"""Servers that belong together usually listen side by side."""
LOOPBACK = ("localhost", "127.0.0.0/8", "::1/128")


class KVConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``kv_connector_extra_config``."""

    lease_s: float = 30.0
    """For how long blocks are held for the server that reads them, and again from each renewal on
    (``TCPConnector``, ``NixlConnector``, ``MooncakeConnector``)."""
    allowed_peers: tuple[str, ...] = ()
    """Hosts, addresses and networks such as 10.0.0.0/24 that KV may be fetched from, beside this machine's
    loopback (the same)."""
    allowed_ports: tuple[int | str, ...] = ()
    """Ports, and ranges such as "5600-5700", that KV may be fetched from, beside those next to ``kv_port``,
    up to 64 below or above (the same)."""
    mooncake_protocol: str = "tcp"
    """``tcp`` | ``rdma`` (``MooncakeConnector``)."""
    cpu_bytes_to_use: int | None = None
    """Host memory for offloaded blocks, in bytes (``OffloadingConnector``)."""
    shared_storage_path: str | None = None
    """Folder in which servers keep KV for each other and for their next start
    (``SharedStorageConnector``)."""
    shared_storage_max_bytes: int | None = None
    """Above it, the files that were not used for longest are deleted; of one model and its ranks. None: no
    limit (``SharedStorageConnector``)."""

    def check_peers(self) -> None:
        """ConfigError for a network or a range of ports that is none."""
        for peer in self.allowed_peers:
            _network_of(peer)
        for ports in self.allowed_ports:
            _ports_of(ports)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Where KV goes to and comes from, beside the device."""

    kv_connector: str
    """``TCPConnector``: KV of prompts moves from a server that computes them to one that goes on |
    ``NixlConnector``, ``MooncakeConnector``: the same, read from memory to memory |
    ``SharedStorageConnector``: it is kept as files, which all servers of a model share |
    ``OffloadingConnector``: to this server's own host memory, as ``kv_offloading_size``."""
    kv_role: str = "kv_both"
    """``kv_producer``: leases KV out, or saves it | ``kv_consumer``: fetches it | ``kv_both``."""
    engine_id: str | None = None
    """Name of this server in what its clients pass on; made up by default."""
    kv_ip: str = "127.0.0.1"
    """Address at which others fetch KV from this server, and which they are told."""
    kv_port: int = 5600
    """Port of the first rank; each further rank, and each further core's, is higher by one."""
    kv_load_failure_policy: str = "recompute"
    """What becomes of a request whose KV cannot be fetched: ``recompute`` | ``fail``."""
    kv_connector_extra_config: KVConnectorOptions = field(default_factory=KVConnectorOptions)

    def __post_init__(self) -> None:
        for name, choices in (
            ("kv_connector", CONNECTORS),
            ("kv_role", ROLES),
            ("kv_load_failure_policy", FAILURE_POLICIES),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        if not 1 <= self.kv_port <= 65535:
            raise ConfigError(f"kv_port must be from 1 to 65535, got {self.kv_port}.")
        options = self.kv_connector_extra_config
        if not 0.1 <= options.lease_s <= 86400:
            raise ConfigError(f"lease_s must be from 0.1 to 86400 seconds, got {options.lease_s}.")
        if options.mooncake_protocol not in PROTOCOLS:
            raise ConfigError(
                f"mooncake_protocol must be one of {', '.join(PROTOCOLS)}, got {options.mooncake_protocol!r}."
            )
        options.check_peers()
        is_offloading = self.kv_connector == "OffloadingConnector"
        if is_offloading != (options.cpu_bytes_to_use is not None):
            raise ConfigError("OffloadingConnector and cpu_bytes_to_use need each other.")
        if (self.kv_connector == "SharedStorageConnector") != (options.shared_storage_path is not None):
            raise ConfigError("SharedStorageConnector and shared_storage_path need each other.")
        if options.shared_storage_max_bytes is not None and options.shared_storage_path is None:
            raise ConfigError("shared_storage_max_bytes needs shared_storage_path.")
        for name in ("cpu_bytes_to_use", "shared_storage_max_bytes"):
            size = getattr(options, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name} must be at least 1, got {size}.")

    @property
    def leases_out(self) -> bool:
        """Whether others fetch KV from this server."""
        return self.kv_connector in PEER_CONNECTORS and self.kv_role != "kv_consumer"

    @property
    def fetches(self) -> bool:
        """Whether this server fetches KV from others."""
        return self.kv_connector in PEER_CONNECTORS and self.kv_role != "kv_producer"

    @property
    def storage_path(self) -> str | None:
        """The folder in which KV is kept for other servers and for the next start; None without."""
        return self.kv_connector_extra_config.shared_storage_path

    @property
    def saves(self) -> bool:
        """Whether KV is written to that folder."""
        return self.storage_path is not None and self.kv_role != "kv_consumer"

    @property
    def loads_saved(self) -> bool:
        """Whether KV is read from that folder."""
        return self.storage_path is not None and self.kv_role != "kv_producer"

    @property
    def offloading_gib(self) -> float | None:
        """Host memory for offloaded blocks, as ``kv_offloading_size`` has it."""
        size = self.kv_connector_extra_config.cpu_bytes_to_use
        return None if size is None else size / 2**30

    def allows_port(self, port: int) -> bool:
        """Whether KV may be fetched from this port: a client's request names it."""
        ranges = map(_ports_of, self.kv_connector_extra_config.allowed_ports)
        is_near = abs(port - self.kv_port) <= NEAR_PORTS
        return 1 <= port <= 65535 and (is_near or any(port in ports for ports in ranges))

    def allows(self, host: str) -> bool:
        """Whether KV may be fetched from this host: a client's request names it."""
        allowed = (*LOOPBACK, self.kv_ip, *self.kv_connector_extra_config.allowed_peers)
        if host in allowed:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for peer in allowed if (network := _network_of(peer)) is not None)


def _ports_of(given: int | str) -> range:
    """The ports that a number or a range names. ConfigError for one that names none."""
    first, dash, last = str(given).partition("-")
    try:
        ports = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ConfigError(f"allowed_ports: {given!r} is neither a port from 1 to 65535 nor a range of them.")
    return ports


def _network_of(peer: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The network that a text means; None for a host's name. ConfigError for a malformed network."""
    try:
        return ipaddress.ip_network(peer)
    except ValueError as error:
        if "/" in peer or not peer:
            raise ConfigError(f"allowed_peers: {error}.") from error
        return None


def read_kv_transfer_config(
    given: str | Mapping[str, Any] | KVTransferConfig | None,
) -> KVTransferConfig | None:
    """The record of what was given, JSON or fields; ConfigError names the field that is wrong."""
    if given is None or isinstance(given, KVTransferConfig):
        return given
    fields = read_fields(OPTION, given, EXAMPLE)
    check_names(OPTION, fields, KVTransferConfig)
    if "kv_connector" not in fields:
        raise ConfigError(f"{OPTION} needs kv_connector; choose from {', '.join(CONNECTORS)}.")
    return make_record(OPTION, fields, KVTransferConfig)
