"""``continuum collect-env``: what a report of a fault should say of the machine and what is installed."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from engine.version import package_version

PREFIXES = ("CONTINUUM_", "CUDA_", "HF_", "KMP_", "NCCL_", "OMP_", "RAY_", "TORCH_", "TRITON_")
"""How the names of environment variables begin that change what the engine does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> int:
    """Print it; the exit code."""
    print(f"continuum-engine: {package_version()}\n")
    # In a process of its own, as torch is loaded by workers only; it warns of being asked so.
    torch_says = [sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-m", "torch.utils.collect_env"]
    print(subprocess.run(torch_says, stdout=subprocess.PIPE, text=True, check=False).stdout)
    print("\nPackages that continuum-engine asks for:")
    for line in _packages():
        print(line)
    print("\nEnvironment variables that are set, without their values:")
    print("\n".join(sorted(name for name in os.environ if name.startswith(PREFIXES))) or "none")
    return 0


def _packages() -> Iterator[str]:
    """Each dependency, those of users' extras too, with its version or that it is missing."""
    try:
        wanted = requires("continuum-engine") or []
    except PackageNotFoundError:
        wanted = []
    wanted = [requirement for requirement in wanted if 'extra == "dev"' not in requirement]
    for name in sorted({re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in wanted}):
        try:
            yield f"{name}: {version(name)}"
        except PackageNotFoundError:
            yield f"{name}: not installed"
