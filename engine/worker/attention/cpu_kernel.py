"""Builds ``kernels/`` with the machine's own C++ compiler, once, and loads it. Knows nothing of steps.

Nothing here is needed to serve: whoever asks for a kernel goes on without one after ``KernelUnavailable``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_SOURCES = Path(__file__).with_name("kernels")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-w")
_COMPILE_TIMEOUT_S = 60
_CPU_INFO = Path("/proc/cpuinfo")
_LOADED_FILES = Path("/proc/self/maps")
_OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class KernelUnavailable(Exception):
    """There is no compiled kernel; the message says why, as the end of a sentence."""


class PoolAddress(ctypes.Structure):
    """A KV pool; strides in numbers, not bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("layer_stride", ctypes.c_int64),
        ("value_offset", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
    )


class SequenceAddresses(ctypes.Structure):
    """Some sequences of a step; the arrays are int64."""

    _fields_ = (
        ("num_seqs", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
        ("query_lens", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
    )


class HeadAddresses(ctypes.Structure):
    """What a layer brings, [heads, head_dim] per token; strides in numbers; window 0: all is seen."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


class CpuKernel:
    """The compiled code for one head_dim and one type of numbers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend_decodes = _with_types(library.continuum_attend_decodes)
        self._attend_prompts = (
            _with_types(library.continuum_attend_prompts)
            if hasattr(library, "continuum_attend_prompts")
            else None
        )

    @classmethod
    def load(cls, head_dim: int, dtype: torch.dtype) -> CpuKernel:
        """Out of the cache, or else compiled into it. Raises KernelUnavailable."""
        if dtype not in (torch.bfloat16, torch.float32) or head_dim % 8:
            raise KernelUnavailable(
                f"there is none for {str(dtype).removeprefix('torch.')} heads of {head_dim}"
            )
        flags = [*_FLAGS, f"-DCONTINUUM_HEAD_DIM={head_dim}"]
        if dtype == torch.bfloat16:
            flags.append("-DCONTINUUM_BF16")
        try:
            return cls(_load_library(flags))
        except (OSError, AttributeError) as error:
            raise KernelUnavailable(f"it could not be built or loaded ({error})") from error

    @property
    def knows_prompts(self) -> bool:
        """Whether ``attend_prompts`` can be called: it takes a CPU that multiplies pairs of bf16."""
        return self._attend_prompts is not None

    def attend_decodes(
        self, pool: PoolAddress, decodes: SequenceAddresses, layer: int, heads: HeadAddresses, threads: int
    ) -> None:
        """Keep the one new key and value of each sequence in the pool; write its attention to the output."""
        self._attend_decodes(pool, decodes, layer, heads, threads)

    def attend_prompts(
        self, pool: PoolAddress, prompts: SequenceAddresses, layer: int, heads: HeadAddresses, threads: int
    ) -> None:
        """The same for sequences with several new tokens."""
        assert self._attend_prompts is not None
        self._attend_prompts(pool, prompts, layer, heads, threads)


def _with_types(function: Any) -> Callable[..., None]:
    """A function of the library, told what its arguments are."""
    function.restype = None
    function.argtypes = (
        ctypes.POINTER(PoolAddress),
        ctypes.POINTER(SequenceAddresses),
        ctypes.c_int64,
        ctypes.POINTER(HeadAddresses),
        ctypes.c_int64,
    )
    typed: Callable[..., None] = function
    return typed


def _load_library(flags: Sequence[str]) -> ctypes.CDLL:
    compiler = _find_compiler()
    runtime = _openmp_runtime()
    files = [str(_SOURCES / "attention.cpp"), *([] if runtime is None else [runtime])]
    command = [str(compiler), *flags, "-Wl,--as-needed", *files]
    name = f"attention-{_fingerprint(compiler, command)}.so"
    folder = _cache_folder()
    if folder is not None:
        with suppress(OSError):  # a folder that cannot be used: without it, then
            return _load_cached(command, folder / name)
    with tempfile.TemporaryDirectory() as temporary:
        built = Path(temporary) / name
        _compile(command, built)
        return ctypes.CDLL(str(built))


def _load_cached(command: Sequence[str], cached: Path) -> ctypes.CDLL:
    if cached.exists():
        with suppress(OSError):  # a damaged file is built anew
            return ctypes.CDLL(str(cached))
    cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _compile(command, cached)
    return ctypes.CDLL(str(cached))


def _compile(command: Sequence[str], target: Path) -> None:
    """Built beside its place and then moved there, so that no process ever sees half a file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        built = Path(temporary) / target.name
        try:
            result = subprocess.run(
                [*command, "-o", str(built)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KernelUnavailable(f"{command[0]} took longer than {_COMPILE_TIMEOUT_S} s") from error
        if result.returncode or not built.exists():
            reason = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
            raise KernelUnavailable(f"{command[0]} could not compile it ({reason.strip()})")
        built.replace(target)


def _find_compiler() -> Path:
    """The one that CXX names, else the system's."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise KernelUnavailable(f"there is no C++ compiler ({', '.join(names)})")


def _cache_folder() -> Path | None:
    """``continuum`` in the user's cache folder, as XDG has it; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base if base and Path(base).is_absolute() else Path.home() / ".cache") / "continuum"
    except RuntimeError:
        return None


def _openmp_runtime() -> str | None:
    """The file of the OpenMP runtime that torch has brought: with one of its own, the kernel's threads and
    torch's would wait for work on the same cores."""
    try:
        lines = _LOADED_FILES.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    files = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return next((file for file in files if Path(file).name.startswith(_OPENMP_RUNTIMES)), None)


def _fingerprint(compiler: Path, command: Sequence[str]) -> str:
    """Changes with the source, the command, the compiler and the CPU."""
    stat = compiler.resolve().stat()
    parts = (
        *(path.read_text(encoding="utf-8") for path in sorted(_SOURCES.iterdir()) if path.is_file()),
        "\n".join(command[1:]),
        f"{compiler.resolve()} {stat.st_size} {stat.st_mtime_ns}",
        _cpu(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """The CPU's name and what it can do, as Linux tells it."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(line for line in lines if line.startswith(telling))
