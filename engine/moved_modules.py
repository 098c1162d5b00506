"""Import paths of earlier versions that still work: each is another name of the module that took its place.

They go with the next minor version. Importing one gives a DeprecationWarning that names the new path.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

_PATHS = [
    "continuum.cli",
    "eval.cli.main",
    "engine.async_llm",
    "engine.frontend.async_llm",
    "engine.core.block_hash",
    "engine.core.kv_cache.block_hash",
    "engine.engine_core",
    "engine.core_process.engine_core",
    "engine.llm",
    "engine.frontend.llm",
    "engine.llm_engine",
    "engine.frontend.llm_engine",
    "engine.outputs",
    "engine.core.outputs",
    "engine.policy",
    "engine.core.policy",
    "engine.request",
    "engine.core.request",
    "engine.worker.tiny_models",
    "engine.worker.loading.tiny_models",
]
MOVED = dict(zip(_PATHS[::2], _PATHS[1::2], strict=True))
"""New path by old path, of the modules that programs outside of this repository import."""


class _Alias(InspectLoader):
    """Gives the moved module itself, so that a class is the same under both paths."""

    def __init__(self, old: str) -> None:
        self._new = MOVED[old]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        message = f"{spec.name} has moved to {self._new}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        module = import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its new path; only its spec, which the import replaced, is given back."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m OLD.PATH``."""
        spec = find_spec(self._new)
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(self._new)

    def get_source(self, fullname: str) -> None:
        return None


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Alias(fullname)) if fullname in MOVED else None


def install() -> None:
    """Make the old paths importable. Searched last: a module that is there is never replaced."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
