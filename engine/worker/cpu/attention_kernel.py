"""Calls the compiled attention kernel with raw addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from engine.worker.cpu.kernels.library import KernelUnavailable, load_library, typed


class PoolAddress(ctypes.Structure):
    """A KV pool; strides are in elements, not bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
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
    """One layer's query, key, value and output, [heads, head_dim] per token. Strides are in elements; window
    and chunk 0 mean full attention, soft_cap 0 none; sinks: fp32 [num_heads], or null; value_size: how many
    numbers of a latent are its value."""

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
        ("chunk", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("soft_cap", ctypes.c_double),
        ("sinks", ctypes.c_void_p),
        ("value_size", ctypes.c_int64),
    )


class CpuKernel:
    """The compiled attention for one head_dim and one dtype."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._attend_decode = _attending(library.continuum_attend_decode)
        has_prefill = hasattr(library, "continuum_attend_prefill")
        self._attend_prefill = _attending(library.continuum_attend_prefill) if has_prefill else None
        self._attend_latent = _attending(library.continuum_attend_latent) if has_prefill else None

    @classmethod
    def load(cls, head_dim: int, dtype: torch.dtype) -> CpuKernel:
        """Load the library for this type and size. Raises KernelUnavailable."""
        library = load_library(head_dim, dtype)
        try:
            return cls(library)
        except AttributeError as error:
            raise KernelUnavailable(f"loading failed: {error}") from error

    @property
    def has_prefill(self) -> bool:
        """Whether ``attend_prefill`` and ``attend_latent`` can be called: they need a CPU with
        AVX512_BF16."""
        return self._attend_prefill is not None

    def attend_decode(
        self, pool: PoolAddress, decodes: SequenceAddresses, slot: int, heads: HeadAddresses, threads: int
    ) -> None:
        """Attend with one query per sequence: write its new key and value to the pool, and its attention to
        the output."""
        self._attend_decode(pool, decodes, slot, heads, threads)

    def attend_prefill(
        self, pool: PoolAddress, prompts: SequenceAddresses, slot: int, heads: HeadAddresses, threads: int
    ) -> None:
        """Attend with several new tokens per sequence; otherwise like ``attend_decode``."""
        assert self._attend_prefill is not None
        self._attend_prefill(pool, prompts, slot, heads, threads)

    def attend_latent(
        self, pool: PoolAddress, sequences: SequenceAddresses, slot: int, heads: HeadAddresses, threads: int
    ) -> None:
        """Attend to latents, with any number of new tokens per sequence. Keys and values of ``heads`` are the
        latents; its value_size is a multiple of 32."""
        assert self._attend_latent is not None
        self._attend_latent(pool, sequences, slot, heads, threads)


def _attending(function: Any) -> Callable[..., None]:
    pool = ctypes.POINTER(PoolAddress)
    sequences = ctypes.POINTER(SequenceAddresses)
    return typed(function, pool, sequences, ctypes.c_int64, ctypes.POINTER(HeadAddresses), ctypes.c_int64)
