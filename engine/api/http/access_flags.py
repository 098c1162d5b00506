"""Flags of whatever serves HTTP: TLS, and the keys of clients."""

from __future__ import annotations

import argparse
import os

from engine.api.config import TlsConfig
from engine.errors import ConfigError

API_KEY_VARIABLE = "CONTINUUM_API_KEY"
"""Environment variable with API keys, separated by commas; unlike a flag, no process list shows it."""


def add_tls_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags that ``tls_config`` reads."""
    group.add_argument(
        "--ssl-certfile", metavar="PATH", help="Certificate to serve HTTPS with (default: plain HTTP)"
    )
    group.add_argument(
        "--ssl-keyfile", metavar="PATH", help="Private key of the certificate (default: in --ssl-certfile)"
    )
    group.add_argument(
        "--ssl-ca-certs", metavar="PATH", help="CA certificates that client certificates must be signed by"
    )
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        default=0,
        metavar="{0,1,2}",
        help="Client certificates: 0 not requested, 1 optional, 2 required",
    )


def tls_config(args: argparse.Namespace) -> TlsConfig:
    """The configuration of TLS; ConfigError if its files cannot be used."""
    tls = TlsConfig(
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        ca_certs=args.ssl_ca_certs,
        cert_reqs=args.ssl_cert_reqs,
    )
    tls.check()
    return tls


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys of ``--api-key`` and of the environment; ConfigError if that holds none."""
    given = os.environ.get(API_KEY_VARIABLE)
    from_environment = [] if given is None else [key.strip() for key in given.split(",") if key.strip()]
    if given is not None and not from_environment:
        raise ConfigError(f"{API_KEY_VARIABLE} is set but holds no key; without keys it must not be set.")
    return (*(args.api_key or ()), *from_environment)
