"""Describes the hardware and libraries of a run, so that runs on different machines can be compared."""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@lru_cache(maxsize=1)
def describe_machine() -> dict[str, str]:
    """Describes each part, by name; unknown parts are left out."""
    described = {
        "python": platform.python_version(),
        "numpy": _numpy(),
        "blas": _blas(),
        "cpu": _cpu(),
        "libc": " ".join(part for part in platform.libc_ver() if part),
    }
    return {name: text for name, text in described.items() if text}


def _numpy() -> str:
    try:
        return version("numpy")
    except PackageNotFoundError:
        return ""


def _blas() -> str:
    """The BLAS with which numpy was built."""
    try:
        from numpy.__config__ import CONFIG
    except ImportError:
        return ""
    blas = CONFIG.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', '')} {blas.get('version', '')}".strip()


def _cpu() -> str:
    """The CPU model from /proc/cpuinfo; the architecture without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, '') or platform.processor()} {platform.machine()}".strip()
