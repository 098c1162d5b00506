"""The interface to a store of KV that others bring, and the one that is chosen.

vLLM's V1 asks a connector to copy each layer within a step. Here a block of all layers is one row of the
pool, and the engine copies rows beside the steps, checks names, and recomputes what is lost: a store only
keeps bytes under names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import ConfigError
from engine.process.outside_module import import_outside


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What a store is made with."""

    options: Mapping[str, Any]
    """``kv_connector_extra_config`` as it was given."""
    role: str
    """``scheduler``: asks what is held | ``worker``: reads and writes."""
    rank: int
    block_bytes: int
    """Length of each block in bytes; 0 for the scheduler, which sees none."""

    def text(self, name: str, default: str | None = None) -> str:
        """An option that is a text; ConfigError if it is missing without ``default``, or no text."""
        given: str = _option(self.options, name, str, default)
        return given

    def number(self, name: str, default: int) -> int:
        """An option that is an integer of at least 1; ConfigError if it is not."""
        given: int = _option(self.options, name, int, default)
        if given < 1:
            raise ConfigError(f"kv_connector_extra_config: {name} must be at least 1, got {given}.")
        return given

    def check_names(self, *known: str) -> None:
        """ConfigError for an option that is not one of these."""
        for name in self.options:
            if name not in known:
                raise ConfigError(
                    f"kv_connector_extra_config: unknown field {name!r}; choose from "
                    f"{', '.join(sorted(known))}."
                )


class KVStore(Protocol):
    """Keeps the content of KV blocks under keys: texts of up to 130 characters, which name the model, the
    layout, the rank, the tokens and who owns them.

    Made with a ``StoreConfig``: once in the core's process, with the role ``scheduler``, and once in each
    rank's, with the role ``worker``. All methods may be called on several threads at once. What they raise
    is logged, and costs recomputation.
    """

    def num_held(self, keys: Sequence[str]) -> int:
        """How many of these blocks, from the first on, are held. Called once when a request comes in, which
        waits for it: after an error, or a second, the store is not asked again for 5 s."""

    def read(self, keys: Sequence[str], into: memoryview) -> None:
        """Fill the buffer with these blocks, one after another: [len(keys) * block_bytes]. Raise unless each
        is whole and as it was written. Up to 8 threads read."""

    def write(self, keys: Sequence[str], content: memoryview) -> None:
        """Keep these blocks, some of which may be held already: [len(keys) * block_bytes]. The buffer is used
        again afterwards."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete those of these blocks that are held: nobody will ask for them."""

    def close(self) -> None:
        """Release what the store holds in this process. Nothing is called after it."""


METHODS = ("num_held", "read", "write", "delete", "close")


def load_store(module_path: str, name: str, config: StoreConfig) -> KVStore:
    """Make the store of this class in this module. ConfigError if it cannot be."""
    try:
        module = import_outside(module_path)
    except ImportError as error:
        raise ConfigError(f"kv_connector_module_path: {module_path} cannot be imported: {error}.") from error
    kind = getattr(module, name, None)
    missing = [method for method in METHODS if not callable(getattr(kind, method, None))]
    if not isinstance(kind, type) or missing:
        lacks = "is not a class there" if not isinstance(kind, type) else f"has no {missing[0]}()"
        raise ConfigError(f"kv_connector: {name} of {module_path} {lacks}.")
    try:
        store: KVStore = kind(config)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"kv_connector: {name} could not start: {str(error) or repr(error)}.") from error
    return store


def _option(options: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    given = options.get(name, default)
    if given is None:
        raise ConfigError(f"kv_connector_extra_config needs {name}.")
    if not isinstance(given, kind) or isinstance(given, bool):
        words = {str: "a text", int: "an integer"}
        raise ConfigError(f"kv_connector_extra_config: {name} must be {words[kind]}, got {given!r}.")
    return given
