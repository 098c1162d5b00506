"""The file of API keys: each with a name and quotas. It may be read again while the server runs.

::

    [alice]
    key = "SECRET"                  # or sha256 = "..." of the key
    running_requests = 8
    models = ["base", "sql"]
    service_tier = "flex"

    [alice.per_minute]              # and per_day
    requests = 60
    prompt_tokens = 200_000
    output_tokens = 20_000
    computed_tokens = 50_000        # of prompts what was not cached, and all output
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from engine.api.http.auth import KEY_NAME
from engine.api.service.tiers import KeyTier
from engine.errors import ConfigError

MAX_KEYS = 1024
MAX_BYTES = 2**20

_NAME = re.compile(KEY_NAME)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Limits(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The most that a key may use in a minute or a day; None: no limit."""

    requests: Count | None = None
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    computed_tokens: Count | None = None
    """Prompt tokens that were not cached, and output tokens."""


class TenantKey(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A key and its quotas."""

    key: str | None = None
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """The key's digest, for a file without secrets."""
    running_requests: Count | None = None
    """Most requests at once."""
    models: list[str] | None = None
    """Names of the models and adapters that it may use; None: all."""
    service_tier: KeyTier | None = None
    """The tier of its requests that name none; none may name a better one. None: any."""
    per_minute: Limits = Limits()
    per_day: Limits = Limits()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return bytes.fromhex(self.sha256 or "") if self.key is None else sha256(self.key.encode()).digest()


def read_key_file(path: str) -> dict[str, TenantKey]:
    """The keys of the file, by name. ConfigError, which names the field and no secret, if it is wrong."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error.strerror}.") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"api_key_file {path} has more than {MAX_BYTES} bytes.")
    try:
        keys = msgspec.toml.decode(content, type=dict[str, TenantKey])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path}: {error}.") from error
    _check(path, keys)
    return keys


def _check(path: str, keys: dict[str, TenantKey]) -> None:
    if not 0 < len(keys) <= MAX_KEYS:
        raise ConfigError(f"api_key_file {path} must have from 1 to {MAX_KEYS} keys, got {len(keys)}.")
    owners: dict[bytes, str] = {}
    for name, key in keys.items():
        where = f"api_key_file {path}: {name[:64]!r}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where} is not a valid name, which has up to 64 letters, digits, dots, dashes and "
                "underscores."
            )
        if (key.key is None) == (key.sha256 is None):
            raise ConfigError(f"{where} needs either key or sha256.")
        if key.key is not None and not key.key.strip():
            raise ConfigError(f"{where}: key must not be empty.")
        if key.digest in owners:
            raise ConfigError(f"{where} and {owners[key.digest]!r} have the same secret.")
        owners[key.digest] = name
