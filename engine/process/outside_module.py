"""Imports a module that the operator names: a policy's, or a store's."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def import_outside(name: str) -> ModuleType:
    """The module, which may be in the working directory; ImportError if there is none."""
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)  # other processes of ours get this path
    return import_module(name)
