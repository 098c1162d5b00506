"""Model folders, as the worker's tests have them."""

from __future__ import annotations

from tests.worker.conftest import model_folders  # noqa: F401 (a fixture)
