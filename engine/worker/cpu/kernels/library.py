"""Compiles the C++ kernels in this folder with the machine's own compiler, once, and loads them. Knows
nothing of steps.

The server runs without them: after ``KernelUnavailable``, callers fall back to torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from engine.process.process_log import start_log

_SOURCES = Path(__file__).parent
_DECODER_SOURCE = _SOURCES / "kernels.cpp"
_STATES_SOURCE = _SOURCES / "states.cpp"
_SAMPLING_SOURCE = _SOURCES / "sampling.cpp"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-w")
_COMPILE_TIMEOUT_S = 900
"""A busy machine may take minutes; without kernels, all later starts are slow as well."""
_SAID_EVERY_S = 10
_CPU_INFO = Path("/proc/cpuinfo")
_LOADED_FILES = Path("/proc/self/maps")
_OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class KernelUnavailable(Exception):
    """There is no compiled kernel; the message says why, as the end of a sentence."""


def load_library(head_dim: int, dtype: torch.dtype) -> ctypes.CDLL:
    """Load the kernels for one head_dim and one dtype from the cache; compile them if they are not there.

    Raises KernelUnavailable.
    """
    if dtype not in (torch.bfloat16, torch.float32) or head_dim % 8:
        raise KernelUnavailable(f"none for {str(dtype).removeprefix('torch.')} with head size {head_dim}")
    flags = [*_FLAGS, f"-DCONTINUUM_HEAD_DIM={head_dim}"]
    if dtype == torch.bfloat16:
        flags.append("-DCONTINUUM_BF16")
    return _load_library(_DECODER_SOURCE, flags)


def load_state_library() -> ctypes.CDLL:
    """Load the kernels for models with states, of all sizes and both dtypes, in the same way.

    Raises KernelUnavailable.
    """
    return _load_library(_STATES_SOURCE, _FLAGS)


def load_sampling_library() -> ctypes.CDLL:
    """Load the kernel that draws tokens, for logits of both dtypes, in the same way.

    Raises KernelUnavailable.
    """
    return _load_library(_SAMPLING_SOURCE, _FLAGS)


def typed(function: Any, *arguments: type[Any]) -> Callable[..., None]:
    """Declare the argument types of a library's function, which returns nothing."""
    function.restype = None
    function.argtypes = arguments
    typed_function: Callable[..., None] = function
    return typed_function


def _load_library(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    try:
        return _load(source, flags)
    except OSError as error:
        raise KernelUnavailable(f"building or loading failed: {error}") from error


def _load(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    compiler = _find_compiler()
    runtime = _openmp_runtime()
    files = [str(source), *([] if runtime is None else [runtime])]
    command = [str(compiler), *flags, "-Wl,--as-needed", *files]
    name = f"{source.stem}-{_fingerprint(compiler, command)}.so"
    folder = _cache_folder()
    if folder is not None:
        with suppress(OSError):  # the folder cannot be used: compile without a cache
            return _load_cached(command, folder / name)
    with tempfile.TemporaryDirectory() as temporary:
        built = Path(temporary) / name
        _compile(command, built)
        return ctypes.CDLL(str(built))


def _load_cached(command: Sequence[str], cached: Path) -> ctypes.CDLL:
    if cached.exists():
        with suppress(OSError):  # a damaged file is compiled again
            return ctypes.CDLL(str(cached))
    cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(cached.parent):  # cores that start together compile once
        if not cached.exists() or _is_damaged(cached):
            _compile(command, cached)
    return ctypes.CDLL(str(cached))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder for one process at a time; a process that dies frees the lock. Creates no file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_damaged(cached: Path) -> bool:
    try:
        ctypes.CDLL(str(cached))
    except OSError:
        return True
    return False


def _compile(command: Sequence[str], target: Path) -> None:
    """Compile to a temporary folder and move the result to ``target``, so that no process ever sees half a
    file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        built = Path(temporary) / target.name
        start_log.info("Compiling CPU kernels (once; cached in %s).", target.parent)
        code, told = _run_compiler([*command, "-o", str(built)])
        if code or not built.exists():
            reason = next((line for line in told.splitlines() if "error" in line), "no message")
            raise KernelUnavailable(f"{command[0]} failed: {reason.strip()}")
        built.replace(target)


def _run_compiler(command: Sequence[str]) -> tuple[int, str]:
    """Returns its exit code and its error output; logs from time to time that it is still running."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as compiler:
        began = time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                told = compiler.communicate(timeout=_SAID_EVERY_S)[1]
                return compiler.returncode, told
            elapsed_s = time.monotonic() - began
            if elapsed_s > _COMPILE_TIMEOUT_S:
                compiler.kill()
                raise KernelUnavailable(f"{command[0]} timed out after {_COMPILE_TIMEOUT_S} s")
            start_log.info("Compiling CPU kernels: %.0f s elapsed.", elapsed_s)


def _find_compiler() -> Path:
    """The compiler that CXX names, or else the system's."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise KernelUnavailable(f"no C++ compiler found ({', '.join(names)})")


def _cache_folder() -> Path | None:
    """``continuum`` in the user's cache folder (XDG); None without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base if base and Path(base).is_absolute() else Path.home() / ".cache") / "continuum"
    except RuntimeError:
        return None


def _openmp_runtime() -> str | None:
    """The file of the OpenMP runtime that torch has loaded. With a second runtime, the kernels' threads and
    torch's would spin on the same cores."""
    try:
        lines = _LOADED_FILES.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    files = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return next((file for file in files if Path(file).name.startswith(_OPENMP_RUNTIMES)), None)


def _fingerprint(compiler: Path, command: Sequence[str]) -> str:
    """A hash of the sources, the command, the compiler and the CPU."""
    stat = compiler.resolve().stat()
    parts = (
        *(
            path.read_text(encoding="utf-8")
            for path in sorted(_SOURCES.iterdir())
            if path.suffix in (".cpp", ".h")
        ),
        "\n".join(command[1:]),
        f"{compiler.resolve()} {stat.st_size} {stat.st_mtime_ns}",
        _cpu(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """The CPU's name and features, as Linux reports them."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(line for line in lines if line.startswith(fields))
