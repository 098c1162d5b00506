"""``continuum collect-env``: prints the machine and installed packages, for bug reports."""

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
"""Prefixes of environment variables that change the engine's behavior."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the command takes no arguments."""


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns the exit code."""
    print(f"continuum-engine: {package_version()}\n")
    # In a separate process: only workers load torch. The option hides runpy's warning.
    torch_says = [sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-m", "torch.utils.collect_env"]
    print(subprocess.run(torch_says, stdout=subprocess.PIPE, text=True, check=False).stdout)
    print("\nPackages that continuum-engine needs:")
    for line in _packages():
        print(line)
    print("\nEnvironment variables that are set, without their values:")
    print("\n".join(sorted(name for name in os.environ if name.startswith(PREFIXES))) or "none")
    return 0


def _packages() -> Iterator[str]:
    """Yields each dependency, including those of users' extras, with its version or as missing."""
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
