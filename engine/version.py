"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The version as pip knows it; ``unknown`` for a checkout that was never installed."""
    try:
        return version("continuum-engine")
    except PackageNotFoundError:
        return "unknown"
