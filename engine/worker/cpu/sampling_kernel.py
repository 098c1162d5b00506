"""Calls the compiled sampling kernel with raw addresses. Knows nothing of requests.

It draws as ``TorchPicker`` does, against which it is tested, but reads each row of logits only a few times.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from engine.process.process_log import start_log
from engine.worker.attention.backend import IntArray
from engine.worker.cpu.kernels.library import KernelUnavailable, load_sampling_library, typed
from engine.worker.sampler import Picked, TokenPicker, TorchPicker
from engine.worker.sampling_batch import SamplingBatch

_ADDRESSES = (
    *("logits", "temperature", "top_p", "min_p", "top_k", "draws"),
    *("repetition", "presence", "frequency"),
    *("history", "history_row", "num_prompt", "num_output", "tokens", "best"),
)
_NUMBERS = ("stride", "history_stride", "num_rows", "vocab_size", "is_bf16")


class _Rows(ctypes.Structure):
    """``sampling.h``"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


class CompiledPicker:
    """Picks tokens in one compiled pass over the rows, which the threads share."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sample = typed(library.continuum_sample, ctypes.POINTER(_Rows), ctypes.c_int64)

    def pick(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        history: IntArray,
        draws: npt.NDArray[np.float64],
    ) -> Picked:
        """See ``TokenPicker``. The logits are not changed."""
        if logits.dtype not in (torch.bfloat16, torch.float32) or logits.stride(1) != 1:
            logits = logits.float().contiguous()
        num_rows, vocab_size = logits.shape
        picked = Picked(np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.float32))
        arrays = (
            np.where(batch.greedy, np.float32(0), batch.temperature),
            *(batch.top_p, batch.min_p, batch.top_k, draws),
            *(batch.repetition_penalty, batch.presence_penalty, batch.frequency_penalty),
            *(history, batch.rows, batch.num_prompt_tokens, batch.num_output_tokens),
            *(picked.token_ids, picked.best),
        )
        history_stride = history.strides[0] // history.itemsize
        is_bf16 = logits.dtype == torch.bfloat16
        rows = _Rows(
            logits.data_ptr(),
            *(array.ctypes.data for array in arrays),
            *(logits.stride(0), history_stride, num_rows, vocab_size, is_bf16),
        )
        self._sample(rows, torch.get_num_threads())
        return picked


def token_picker() -> TokenPicker:
    """The fastest one of this machine's CPU: the compiled kernel, or torch without a compiler."""
    try:
        return _compiled_picker()
    except (KernelUnavailable, AttributeError) as error:
        start_log.warning("Tokens are drawn by torch, more slowly: %s.", error)
        return TorchPicker()


@cache
def _compiled_picker() -> CompiledPicker:
    return CompiledPicker(load_sampling_library())
