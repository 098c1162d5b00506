"""Prefill by a kernel that supports neither variable lengths nor a causal mask after a cached context.

The queries attend to the cached tokens without a mask, and to the new tokens with a causal mask; the two
results are merged by their log-sum-exp (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import pad

from engine.worker.gpu.prompt_paths.path import AttentionKind, Prompts

DenseAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]
]
"""Takes (query, key, value [1, heads, tokens, head_dim], whether causal, scale); returns the
output, and the log-sum-exp (natural) of the scores [1, heads, query tokens]."""


def cudnn_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN's attention as a DenseAttention. ValueError for dtypes that are not 16 bits."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"cuDNN would read {query.dtype} values as float16")
    output, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return output, log_sum.reshape(query.shape[:3])


class TwoParts:
    """A DenseKernel.

    It calls the kernel with few different sizes, because it may plan for each size, and a plan can take as
    long as a step. The cached part is split into portions of ``cached_step`` tokens times a power of two.
    Query rows are padded to multiples of ``query_step``, four per power of two. The remaining cached tokens
    are put before the new ones in the causal part, with padding queries whose output is dropped.
    """

    name = "cuDNN in two parts"

    def __init__(
        self, attention: DenseAttention = cudnn_attention, cached_step: int = 1024, query_step: int = 256
    ) -> None:
        self._attention = attention
        self._cached_step = cached_step
        self._query_step = query_step

    def can(self, kind: AttentionKind) -> bool:
        return kind.window is None and kind.soft_cap is None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prompts: Prompts,
        kind: AttentionKind,
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        token = 0
        kv_token = 0
        for chunk in prompts.chunks:
            queries = slice(token, token + chunk.query_len)
            context = slice(kv_token, kv_token + chunk.seq_len)
            output[queries] = self._attend_one(query[queries], key[context], value[context], kind.scale)
            token = queries.stop
            kv_token = context.stop
        return output

    def _attend_one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query [num_queries, num_heads, head_dim]; key, value [seq_len, num_kv_heads, head_dim]"""
        context = len(key) - len(query)
        cached = context - context % self._cached_step
        result = self._attend_square(query, key[cached:], value[cached:], scale)
        for part in portions(cached, self._cached_step):
            result = merge(result, self._attend_cached(query, key[part], value[part], scale))
        return result[0].to(query.dtype)

    def _attend_square(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The causal part: the last tokens of key and value are those of the queries. Returns output like
        query, and its log-sum-exp [num_queries, num_heads]"""
        before = len(key) - len(query)
        behind = -len(key) % self._query_step
        group = query.shape[1] // key.shape[1]
        key, value = (_heads_first(x, 0, behind).repeat_interleave(group, dim=1) for x in (key, value))
        output, log_sum = self._attention(_heads_first(query, before, behind), key, value, True, scale)
        rows = slice(before, before + len(query))
        return output[0].transpose(0, 1)[rows], log_sum[0].transpose(0, 1)[rows]

    def _attend_cached(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The part without a mask: the query heads of a group become rows of their KV head. Results like
        those of the causal part."""
        num_queries, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        grouped = query.view(num_queries, num_kv_heads, -1, head_dim).transpose(1, 2)
        rows = grouped.reshape(-1, num_kv_heads, head_dim)
        padded = _heads_first(rows, 0, padding(len(rows), self._query_step))
        output, log_sum = self._attention(
            padded, _heads_first(key, 0, 0), _heads_first(value, 0, 0), False, scale
        )
        output = output[0, :, : len(rows)]
        log_sum = log_sum[0, :, : len(rows)]
        output = output.view(num_kv_heads, num_queries, -1, head_dim).transpose(0, 1)
        log_sum = log_sum.view(num_kv_heads, num_queries, -1).transpose(0, 1)
        return output.reshape(query.shape), log_sum.reshape(num_queries, num_heads)


def merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention over two sets of keys: outputs [tokens, heads, head_dim] and the log-sum-exp of
    their scores [tokens, heads] -> the same over both sets, in fp32"""
    log_sums = first[1].float(), second[1].float()
    weight = torch.sigmoid(log_sums[0] - log_sums[1])[..., None]
    return torch.lerp(second[0].float(), first[0].float(), weight), torch.logaddexp(*log_sums)


def portions(num_tokens: int, step: int) -> Iterator[slice]:
    """Split the tokens, a multiple of ``step``, into the fewest slices of step times a power of two."""
    start = 0
    while start < num_tokens:
        size = step << ((num_tokens - start) // step).bit_length() - 1
        yield slice(start, start + size)
        start += size


def padding(num_rows: int, step: int) -> int:
    """The number of rows to add for a multiple of ``step`` and of a quarter of their largest power of two."""
    return -num_rows % max(step, (1 << num_rows.bit_length() - 1) // 4)


def _heads_first(rows: torch.Tensor, before: int, behind: int) -> torch.Tensor:
    """[tokens, heads, head_dim] -> [1, heads, before + tokens + behind, head_dim], zeros around"""
    if before or behind:
        rows = pad(rows, (0, 0, 0, 0, before, behind))
    return rows.transpose(0, 1)[None]
