"""What tests of KV that moves between servers share."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest


def has_mooncake() -> bool:
    """Its package, and the library of the system that it needs."""
    try:
        import_module("mooncake.engine")
    except ImportError:
        return False
    return True


NEEDS_MOONCAKE = pytest.mark.skipif(not has_mooncake(), reason="Mooncake is not installed, or no libibverbs")
NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="NIXL is not installed")
