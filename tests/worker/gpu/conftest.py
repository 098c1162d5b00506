"""The tests of this folder run Triton's kernels on CPU tensors, in its interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if "triton" not in sys.modules:  # Triton reads it once, when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


class _WithoutTriton(pytest.Module):
    """A test module that cannot be imported."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        pytest.skip("triton is not installed (the extra gpu has it)")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if find_spec("triton") is not None:
        return None
    return _WithoutTriton.from_parent(parent, path=module_path)


@pytest.fixture
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes linears of a row with few programs, because the interpreter's time grows with their number.
    test_triton_rows.py compares the tiles of a GPU with torch."""
    from engine.worker.gpu import triton_rows

    monkeypatch.setattr(triton_rows, "row_tiles", lambda inputs: triton_rows.RowTiles(128, 128, 4))
