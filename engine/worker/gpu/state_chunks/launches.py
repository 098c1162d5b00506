"""Launches the kernels for chunks: two functions that compute all chunked sequences of a step."""

from __future__ import annotations

import torch
import triton

from engine.worker.gpu.state_chunks import kernels, prepare
from engine.worker.gpu.state_chunks.table import StepTable
from engine.worker.gpu.tiling import padded
from engine.worker.states.operations import DeltaRule, Scan

_STATE_NUMBERS = 4096
"""Numbers of the part of a state that a program holds, in 32 registers of each of its 128 threads."""
_OUTPUT_COLUMNS = 64


def delta_rule_chunks(rule: DeltaRule, pool: torch.Tensor, output: torch.Tensor, table: StepTable) -> None:
    """See ``StateOps``; rows of tokens are contiguous. Fills their rows of ``output`` and their states."""
    q, k, v, *_ = rule
    num_tokens, num_heads, v_size = v.shape
    k_size = k.shape[2]
    recalling = v.new_empty(num_tokens, num_heads, k_size)
    values = torch.empty_like(output)
    weights = _weights(output)
    prepare.prepare_delta[(len(table.chunks), num_heads)](
        *rule,
        recalling,
        values,
        *weights,
        table.chunks,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        HEADS_EACH=num_heads // k.shape[1],
        K_SIZE=k_size,
        V_SIZE=v_size,
        PADDED_K=padded(k_size),
        PADDED_V=padded(v_size),
        num_warps=8,
    )
    corrections = torch.empty_like(output)
    states = _states(k, values, weights, pool, table, (recalling, corrections))
    _outputs(q, k, corrections, weights, states, output, table)


def scan_chunks(scan: Scan, pool: torch.Tensor, output: torch.Tensor, table: StepTable) -> None:
    """See ``delta_rule_chunks``: b holds the keys and c the queries."""
    weights = _weights(output)
    prepare.prepare_scan[(len(table.chunks), scan.x.shape[1])](
        scan.dt, scan.a, scan.dt_bias, *weights, table.chunks
    )
    states = _states(scan.b, scan.x, weights, pool, table)
    _outputs(scan.c, scan.b, scan.x, weights, states, output, table, scan.d)


def _weights(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[num_tokens, heads] each in fp32: the logarithm of the decay since the chunk began, and the factors of
    keys and of queries."""
    first, second, third = (output.new_empty(output.shape[:2], dtype=torch.float32) for _ in range(3))
    return first, second, third


def _states(
    k: torch.Tensor,
    values: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pool: torch.Tensor,
    table: StepTable,
    correcting: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """[num_chunks, heads, k_size, v_size] the states before chunks, in fp32. The final states go to the pool,
    where they are [v_size, k_size], or [k_size, v_size] with ``correcting`` (w, and the output for the
    corrections)."""
    (_, num_heads, v_size), k_size = values.shape, k.shape[2]
    states = pool.new_empty(len(table.chunks), num_heads, k_size, v_size)
    columns = min(padded(v_size), max(16, _STATE_NUMBERS // padded(k_size)))
    kernels.states_before_chunks[(len(table.chunked), num_heads, triton.cdiv(v_size, columns))](
        k,
        values,
        *(correcting or (None, None)),
        *weights[:2],
        pool,
        states,
        table.chunked,
        k.stride(0),
        values.stride(0),
        pool.stride(0),
        HEADS_EACH=num_heads // k.shape[1],
        K_SIZE=k_size,
        V_SIZE=v_size,
        K_STEP=v_size if correcting else 1,
        V_STEP=1 if correcting else k_size,
        PADDED_K=padded(k_size),
        COLUMNS=columns,
        CORRECTS=correcting is not None,
        num_warps=8,
        num_stages=2,
    )
    return states


def _outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    values: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    states: torch.Tensor,
    output: torch.Tensor,
    table: StepTable,
    skip: torch.Tensor | None = None,
) -> None:
    """Compute the outputs. skip [heads]: the share of its own value that a token adds to its output."""
    _, num_heads, k_size, v_size = states.shape
    columns = min(padded(v_size), _OUTPUT_COLUMNS)
    kernels.outputs_of_chunks[(len(table.chunks), num_heads, triton.cdiv(v_size, columns))](
        q,
        k,
        values,
        *weights,
        skip,
        states,
        output,
        table.chunks,
        q.stride(0),
        k.stride(0),
        values.stride(0),
        HEADS_EACH=num_heads // k.shape[1],
        K_SIZE=k_size,
        V_SIZE=v_size,
        PADDED_K=padded(k_size),
        COLUMNS=columns,
        HAS_SKIP=skip is not None,
        num_warps=8,
    )
