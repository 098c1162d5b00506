"""The servers that are measured: ours, and those that a file describes. Starts none of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from benchmarks.cpu.cases import GROUPS
from benchmarks.cpu.models import MAX_MODEL_LEN, MODELS, BenchModel
from eval.errors import UNREADABLE, PeersFileError

OURS = "ours"
MODEL = "{model}"
PORT = "{port}"
FILE_NAME = "peers.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A server for one model; ``{port}`` is replaced by its port."""

    name: str
    command: list[str]
    base_url: str
    model_name: str
    """The model's name in requests."""
    ready_path: str | None = None
    start_timeout_s: float = 300.0
    environment: Mapping[str, str] = field(default_factory=dict)
    groups: frozenset[str] = frozenset(GROUPS)
    """The groups of cases that it takes part in."""


Name = Annotated[str, msgspec.Meta(min_length=1)]


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server of another make, as the file describes it."""

    name: Name
    command: Name
    base_url: Annotated[str, msgspec.Meta(pattern="^http://")] = "http://127.0.0.1:{port}/v1"
    ready_path: Annotated[str, msgspec.Meta(pattern="^/")] | None = None
    """Path that is polled until it answers 200, before the first completion is tried."""
    model_name: Name = MODEL
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 300.0
    environment: dict[str, str] = {}
    models: dict[str, str] = {}
    """Values that replace {model}, by our name of the model; our folder replaces it otherwise."""
    cases: tuple[str, ...] = GROUPS

    def contender(self, model: str, folder: Path) -> Contender:
        place = self.models.get(model, str(folder))
        return Contender(
            name=self.name,
            command=[part.replace(MODEL, place) for part in shlex.split(self.command)],
            base_url=self.base_url,
            model_name=self.model_name.replace(MODEL, place),
            ready_path=self.ready_path,
            start_timeout_s=self.start_timeout_s,
            environment=self.environment,
            groups=frozenset(self.cases),
        )


class _PeersFile(msgspec.Struct, forbid_unknown_fields=True):
    peers: Annotated[list[Peer], msgspec.Meta(min_length=1)]


def ours(model: BenchModel, folder: Path) -> Contender:
    """Returns ``continuum serve`` with its defaults, except for names, lengths and KV pool size."""
    command = [sys.executable, "-m", "continuum.cli", "serve", str(folder), "--host", "127.0.0.1"]
    command += ["--port", PORT, "--served-model-name", model.name, "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--kv-cache-memory-bytes", str(model.kv_bytes)]
    return Contender(
        name=OURS, command=command, base_url=f"http://127.0.0.1:{PORT}/v1", model_name=model.name
    )


def read_peers(path: Path) -> list[Peer]:
    """Returns the servers of a TOML or JSON file, or of a folder's peers.toml.

    Raises PeersFileError, which names the file and the field.
    """
    if path.is_dir():
        path /= FILE_NAME
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        peers = decode(path.read_bytes(), type=_PeersFile).peers
    except OSError as error:
        raise PeersFileError(f"Cannot read the servers of {path}: {error.strerror}.") from error
    except UNREADABLE as error:
        raise PeersFileError(f"{path} does not describe servers: {error}.") from error
    for number, peer in enumerate(peers):
        if complaint := _complaint(peer, [each.name for each in peers[:number]]):
            raise PeersFileError(f"{path}: `$.peers[{number}].{complaint}.")
    return peers


def _complaint(peer: Peer, names_before: list[str]) -> str | None:
    """Returns the name of an invalid field, a backtick and what is wrong with it; None if all are valid."""
    if peer.name == OURS or peer.name in names_before:
        return f"name` is {peer.name!r}, which is taken"
    for place in (MODEL, PORT):
        if place not in peer.command:
            return f"command` does not say where {place} goes"
    if PORT not in peer.base_url:
        return f"base_url` does not say where {PORT} goes"
    try:
        shlex.split(peer.command)
    except ValueError as error:
        return f"command` is no command: {error}"
    if unknown := [name for name in peer.models if name not in MODELS]:
        return f"models` names {unknown[0]!r}; there is {', '.join(MODELS)}"
    if unknown := [name for name in peer.cases if name not in GROUPS]:
        return f"cases` names {unknown[0]!r}; there is {', '.join(GROUPS)}"
    return None
