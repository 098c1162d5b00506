"""Fixtures of model folders, shared with the worker's tests."""

from __future__ import annotations

from tests.worker.conftest import model_folders  # noqa: F401 (a fixture)
