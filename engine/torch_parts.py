"""A part of torch that a core's process does without until somebody asks for it. Does not import torch."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_META_KERNELS = "torch._meta_registrations"


class _LeftOut(ModuleType):
    """In the place of a module that is imported once something of it is wanted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module there is, by imports and by ``inspect``
            raise AttributeError(name)
        _take_in(self)
        return getattr(sys.modules[self.__name__], name)


def leave_out_meta_kernels() -> None:
    """torch, unless it is imported already, comes without its Python kernels for tensors that have shapes and
    no memory: 17 MB and a fifth of a second for whoever tries models on them."""
    if "torch" not in sys.modules and _META_KERNELS not in sys.modules:
        sys.modules[_META_KERNELS] = _LeftOut(_META_KERNELS)


def take_in_meta_kernels() -> None:
    """For somebody who does. Nothing happens if they are there."""
    module = sys.modules.get(_META_KERNELS)
    if isinstance(module, _LeftOut):
        _take_in(module)


def _take_in(module: _LeftOut) -> None:
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]
        import_module(module.__name__)
