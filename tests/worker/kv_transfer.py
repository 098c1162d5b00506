"""Helpers of the tests of KV that moves between servers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="NIXL is not installed")
