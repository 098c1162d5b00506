"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """As pip knows it; a checkout that was never installed has none."""
    try:
        return version("continuum-engine")
    except PackageNotFoundError:
        return "unknown"
