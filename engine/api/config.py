"""Configuration of the HTTP server."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from engine.api.http.auth import ApiKeys, fault_of_keys
from engine.api.http.hosts import ANY, is_loopback
from engine.api.openai_responses.config import ResponsesConfig
from engine.api.tenants.key_file import read_key_file
from engine.config.media import MediaConfig
from engine.errors import ConfigError
from engine.tokenization.content_format import CONTENT_FORMATS
from engine.tool_parsers.formats import ReplyFormat, load_plugin

DefaultThinking = Literal["off", "on", "template"]
DEFAULT_THINKING: tuple[str, ...] = get_args(DefaultThinking)

_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,100}")
"""The name of a header, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits on what clients may use of the server."""

    max_num_queued_reqs: int | None = None
    """Maximum number of requests that wait or run, over all API server processes; more are answered with
    503."""
    max_num_queued_tokens: int | None = None
    """Maximum number of prompt tokens of requests without a first token yet; more are answered with 503."""
    max_body_bytes: int = 32 * 2**20
    max_connections: int = 4096
    """Maximum number of connections of one API server process. Beyond it the connection idle longest is
    closed; if none is idle, the new one gets 503."""
    head_timeout_s: float = 10.0
    """Maximum time for the request line and headers."""
    body_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    """Maximum time from a request's start in the engine to its last token; None means no limit."""
    core_silence_s: float = 5.0
    """An engine core that has not answered for this long counts as stalled: /health is 503 until it
    answers."""
    core_step_s: float = 300.0
    """An engine core that has been in one step for this long counts as stalled too."""
    sse_keep_alive_interval: float = 15.0
    """A stream that has been silent for this many seconds sends a comment; 0 means never."""

    def __post_init__(self) -> None:
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_body_bytes", "max_connections"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} must be at least 1, got {limit}.")
        for name in (
            *("head_timeout_s", "body_timeout_s", "request_timeout_s"),
            *("core_silence_s", "core_step_s"),
        ):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"{name} must be above 0, got {seconds}.")
        if not self.sse_keep_alive_interval >= 0:
            raise ConfigError("sse_keep_alive_interval must not be negative.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Access control."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Each is ``KEY`` or ``NAME:KEY``; without any, everyone has access."""
    api_key_file: str | None = None
    """File of more keys, with names and quotas; it is read again at SIGHUP."""
    access_log: str | None = None
    """File to which a line of JSON is appended for each request; none by default."""
    share_prefixes_across_tenants: bool = False
    """Whether owners of different keys share cached prefixes. If so, timing can reveal to one owner what
    another has sent."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that the server answers to, besides addresses and local names; ``*`` means all. Empty means
    all, unless the server listens on a loopback address without keys."""
    allowed_origins: tuple[str, ...] = ()
    """Origins that may send cross-origin requests (CORS); none by default, ``*`` means all."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        if (fault := fault_of_keys(self.api_keys)) is not None:
            raise ConfigError(fault)
        if self.api_key_file is not None:
            self._check_file(self.api_key_file)
        if self.access_log is not None:
            try:
                open(self.access_log, "a").close()
            except (OSError, ValueError) as error:
                raise ConfigError(f"access_log cannot be written: {error}.") from error

    def _check_file(self, path: str) -> None:
        """Raises ConfigError if it is wrong, or has a name or secret that another key has."""
        taken = ApiKeys(self.api_keys)
        for name, key in read_key_file(path).items():
            if name in taken.names or taken.has(key.digest):
                raise ConfigError(f"api_key_file {path}: {name!r} has the name or the secret of an api_key.")

    @property
    def needs_key(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def separates_owners(self) -> bool:
        """Whether owners share no cached prefixes: true if keys have owners, unless configured otherwise."""
        are_named = bool(ApiKeys(self.api_keys).names) or self.api_key_file is not None
        return are_named and not self.share_prefixes_across_tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """HTTPS, which is off without a certificate."""

    certfile: str | None = None
    keyfile: str | None = None
    """The private key; None if ``certfile`` holds it, too."""
    ca_certs: str | None = None
    """Certificate authorities for client certificates."""
    cert_reqs: int = 0
    """0: clients need no certificate; 1: a certificate that is sent must be valid; 2: clients need
    one."""

    def __post_init__(self) -> None:
        if self.certfile is None and (self.keyfile or self.ca_certs or self.cert_reqs):
            raise ConfigError("ssl_keyfile, ssl_ca_certs and ssl_cert_reqs need ssl_certfile.")
        if self.cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.cert_reqs}.")
        if self.cert_reqs and self.ca_certs is None:
            raise ConfigError(
                "ssl_cert_reqs needs ssl_ca_certs, the CA that signs the clients' certificates."
            )

    def check(self) -> None:
        """Raises ConfigError if the files cannot be used."""
        if self.certfile is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_certfile or ssl_keyfile cannot be used: {error}.") from error
        try:
            if self.ca_certs is not None:
                context.load_verify_locations(self.ca_certs)
        except OSError as error:
            raise ConfigError(f"ssl_ca_certs cannot be used: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's address and model names, and how it reads replies."""

    served_model_names: tuple[str, ...]
    """Names that a request may use for the model; responses carry the first."""
    host: str | None = None
    """None means all interfaces."""
    port: int = 8000
    """0 means any free port."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead."""
    chat_template: str | None = None
    """The chat template as Jinja text; None means the tokenizer's own."""
    chat_template_content_format: str = "auto"
    """Whether the template is given contents as strings (``string``) or as lists of parts
    (``openai``); ``auto`` detects it from the template."""
    tool_call_parser: str = "auto"
    """The parser of tool calls: one of ``TOOL_CALL_PARSERS``, or a plug-in's name."""
    reasoning_parser: str = "auto"
    """The parser of reasoning; ``auto`` detects it from the chat template."""
    tool_parser_plugin: str | None = None
    """A Python file that registers a custom tool parser."""
    messages_default_thinking: DefaultThinking = "off"
    """Whether the model reasons if a Messages request does not specify it; ``template`` leaves it to the
    template."""
    trust_request_chat_template: bool = False
    """Whether requests may contain a chat template. A template is a program, and may run forever."""
    job_headers: tuple[str, ...] = ()
    """Names of more headers, in lower case, whose value names the job of a request."""
    receipts: bool = True
    """Whether ``usage`` holds a receipt: the cached, recomputed and pinned KV of the turn's job."""
    dashboard: bool = True
    """Whether ``GET /dashboard`` serves the live page of the engine."""
    keep_alive_s: int = 600
    """How long idle connections are kept. An agent's tool call takes longer than the usual 5 s."""
    shutdown_grace_s: float = 5.0
    """How long running requests may continue after SIGTERM before they end with an error."""
    api_server_count: int = 1
    """Number of API server processes for one engine core; they do HTTP, tokenizing and detokenizing."""
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    limits: LimitsConfig = LimitsConfig()
    access: AccessConfig = AccessConfig()
    tls: TlsConfig = TlsConfig()
    media: MediaConfig = field(default_factory=MediaConfig)

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ConfigError("served_model_name needs at least one name.")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}.")
        if self.chat_template_content_format not in CONTENT_FORMATS:
            raise ConfigError(
                f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, got "
                f"{self.chat_template_content_format!r}."
            )
        if self.messages_default_thinking not in DEFAULT_THINKING:
            known = ", ".join(DEFAULT_THINKING)
            raise ConfigError(
                f"messages_default_thinking must be one of {known}, got {self.messages_default_thinking!r}."
            )
        for name in self.job_headers:
            if not _HEADER.fullmatch(name):
                raise ConfigError(f"job_headers must be names of headers in lower case, got {name!r}.")
        self.reply_format(chat_template=None)
        if self.keep_alive_s < 0 or self.shutdown_grace_s < 0:
            raise ConfigError("keep_alive_s and shutdown_grace_s must not be negative.")
        if self.api_server_count < 1:
            raise ConfigError(f"api_server_count must be at least 1, got {self.api_server_count}.")

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Host names that are accepted besides local ones; None accepts any.

        A client that sends a key, or connects by the path of a socket, cannot be a page whose name
        was rebound to this machine.
        """
        named = self.access.allowed_hosts
        if self.uds is not None or ANY in named:
            return None
        if named:
            return named
        return () if is_loopback(self.host) and not self.access.needs_key else None

    @property
    def is_open_to_all(self) -> bool:
        """Whether everyone who can reach this machine may use the server."""
        everywhere = self.uds is None and self.host in (None, "", "0.0.0.0", "::")
        return everywhere and not self.access.needs_key and self.tls.cert_reqs != ssl.CERT_REQUIRED

    def reply_format(
        self, chat_template: str | None, special_tokens: Mapping[str, int] | None = None
    ) -> ReplyFormat:
        """The reply format of the model's template and tokens; ConfigError for an unknown name."""
        if self.tool_parser_plugin is not None:
            load_plugin(self.tool_parser_plugin)
        return ReplyFormat.choose(self.tool_call_parser, self.reasoning_parser, chat_template, special_tokens)
