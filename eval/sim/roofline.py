"""A step's time computed from a model's sizes and a GPU's ceilings. Measures nothing; states its assumptions.

    step = overhead + max(weight bytes / W, linear FLOP / R) + attention + states + all-reduces
    attention = sum over decodes and prefills of max(KV bytes / W, attention FLOP / R)
    states = 2 state bytes / W for each sequence: read and written once

W and R are a GPU's ceilings times the shares of them that a serving engine reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from eval.errors import HardwareError
from eval.sim.cost_model import StepWork
from eval.sim.hardware import GIB, Gpu, find_gpu, parameter_bytes
from eval.sim.model_folder import find_model
from eval.sim.models import ModelShape

TENSOR_PARALLEL = (1, 2, 4, 8)
"""Numbers of GPUs of one machine that can share a model."""
RESERVE_BYTES = 3 * GIB
"""Memory per GPU for activations, graphs and the runtime."""
ENOUGH_KV_TOKENS = 131_072
"""Pool size, in tokens, that the default number of GPUs must leave: one context of 128 Ki."""
DEFAULT_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the ceilings that an engine reaches, and the fixed costs of a step.

    The defaults come from vLLM 0.19 with Llama-3.1-8B in bf16 on an H100: they meet its time per token of
    6.44 ms + 43.7 ns x context (vLLM blog on FP8 KV, 22 April 2026) exactly, and its prefill at about 630
    TFLOP/s for 10k tokens and 590 for 100k (vLLM blog on KV offloading, 8 January 2026) within 3 %. How the
    6.44 ms divide into reading weights and fixed costs is not published: here 5.6 and 0.9.
    """

    weights: float = 0.9
    """Share of the bandwidth when reading weights."""
    kv: float = 1.0
    """Share of the bandwidth when reading KV: 43.7 ns per token of 128 KiB is a large copy's rate."""
    linear: float = 0.8
    """Share of the peak FLOP/s that GEMMs reach."""
    attention: float = 0.72
    """Share of the peak FLOP/s in a prefill's attention."""
    host_link: float = 1.0
    """Share of the host link's rate; the presets are already rates measured for KV blocks."""
    peer_link: float = 0.7
    step_s: float = 0.25e-3
    """Scheduling, sampling and launch of a step."""
    layer_s: float = 20e-6
    """Time between the large kernels of a layer."""
    all_reduce_s: float = 10e-6
    """One all-reduce of few bytes."""
    copy_s: float = 1e-3
    """One copy between host and device of few bytes."""
    arrival_s: float = 2e-3
    reply_s: float = 1e-3


class RooflineCost:
    """StepCost of one replica: a model on ``tensor_parallel`` GPUs of one kind."""

    def __init__(
        self,
        model: ModelShape,
        gpu: Gpu,
        *,
        tensor_parallel: int = 1,
        dtype: str = "bf16",
        kv_dtype: str = "bf16",
        step_tokens: int = DEFAULT_STEP_TOKENS,
        efficiency: Efficiency | None = None,
    ) -> None:
        """``step_tokens``: longer prefills take several steps. HardwareError for an unknown option."""
        if tensor_parallel not in TENSOR_PARALLEL:
            known = ", ".join(str(degree) for degree in TENSOR_PARALLEL)
            raise HardwareError(f"tensor_parallel must be one of {known}, got {tensor_parallel}.")
        e = Efficiency() if efficiency is None else efficiency
        self.model = model
        self.gpu = gpu
        self.tensor_parallel = tensor_parallel
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.efficiency = e
        self.step_overhead_s = e.step_s + model.num_layers * e.layer_s
        self.arrival_overhead_s = e.arrival_s
        self.reply_overhead_s = e.reply_s
        self._step_tokens = step_tokens
        self._weight_bytes = parameter_bytes(dtype)
        kv_bytes = model.kv_bytes_per_token(parameter_bytes(kv_dtype, "kv_dtype"))
        # With more GPUs than KV heads each head is stored on several of them.
        self.kv_bytes_per_token = kv_bytes * max(1, tensor_parallel // model.num_kv_heads)
        self._windows = [window for window in model.layer_windows if window is not None]
        self._chunks = [chunk for chunk in model.layer_chunks if chunk is not None]
        self._set_rates(e)

    def _set_rates(self, e: Efficiency) -> None:
        """Sets seconds per unit of each kind of work, for all GPUs together."""
        gpus = self.tensor_parallel
        gpu = self.gpu
        model = self.model
        speedup = gpu.fp8_speedup if self.dtype == "fp8" else 1.0
        linear_flops = gpu.flops * speedup * e.linear * gpus
        self._s_per_param_read = self._weight_bytes / (gpu.bandwidth * e.weights * gpus)
        self._linear_s_per_token = 2 * model.body_params_per_token / linear_flops
        self._head_s_per_row = 2 * model.head_params / linear_flops
        self._kv_read_s_per_token = self.kv_bytes_per_token / (gpu.bandwidth * e.kv * gpus)
        self._attention_s_per_pair = model.attention_flop_per_pair / (gpu.flops * e.attention * gpus)
        self._dense_read_s = None if model.num_experts else self._s_per_param_read * model.params_read(0)
        # Two all-reduces per layer; a ring sends 2(g-1)/g of the bf16 activations over each GPU's link.
        num_reduces = 2 * model.num_layers if gpus > 1 else 0
        self._reduce_s = num_reduces * e.all_reduce_s
        sent_bytes = num_reduces * 2 * (gpus - 1) / gpus * 2 * model.hidden_size
        self._reduce_s_per_token = sent_bytes / (gpu.peer_link * e.peer_link)
        self._state_s = 2 * model.state_bytes(self._weight_bytes) / (gpu.bandwidth * e.kv * gpus)
        self._copy_s_per_token = self.kv_bytes_per_token / gpus / (gpu.host_link * e.host_link)

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step, including its overhead."""
        num_tokens = work.num_decodes
        attention_s = self._attention_s(work.decode_context_tokens, 1, work.num_decodes)
        for new_tokens, context_tokens in work.prefills:
            num_tokens += new_tokens
            attention_s += self._attention_s(context_tokens + new_tokens / 2, new_tokens)
        if not num_tokens:
            return self.step_overhead_s
        num_rows = work.num_decodes + len(work.prefills)
        compute_s = self._linear_s_per_token * num_tokens + self._head_s_per_row * num_rows
        reduce_s = self._reduce_s + self._reduce_s_per_token * num_tokens
        state_s = self._state_s * num_rows
        return (
            self.step_overhead_s + max(self._read_s(num_tokens), compute_s) + attention_s + state_s + reduce_s
        )

    def _attention_s(self, mean_context_tokens: float, num_queries: float, num_seqs: int = 1) -> float:
        """Time of queries that attend to ``mean_context_tokens`` on average and all read the same KV.

        With several sequences, context and tokens are totals, and each sequence has one query.
        """
        read_tokens = mean_context_tokens + (num_queries - 1) / 2
        pairs = mean_context_tokens * num_queries
        if self._windows or self._chunks:
            read_tokens = self._seen(read_tokens, num_queries - 1, num_seqs)
            pairs = self._seen(mean_context_tokens, 0, num_seqs) * num_queries
        return max(self._kv_read_s_per_token * read_tokens, self._attention_s_per_pair * pairs)

    def _seen(self, num_tokens: float, more_tokens: float, num_seqs: int) -> float:
        """Tokens that a layer sees on average; a layer with a window sees the window and ``more_tokens``.

        Layers with chunks see half a chunk once there is a second: tokens are anywhere in theirs.
        """
        halved = (chunk if num_tokens <= chunk * num_seqs else chunk / 2 for chunk in self._chunks)
        reaches = [*self._windows, *halved]
        seen = sum(min(num_tokens, reach * num_seqs + more_tokens) for reach in reaches)
        num_layers = self.model.num_attention_layers
        return (num_tokens * (num_layers - len(reaches)) + seen) / num_layers

    def _read_s(self, num_tokens: int) -> float:
        if self._dense_read_s is not None:
            return self._dense_read_s
        return self._s_per_param_read * self.model.params_read(num_tokens)

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """Seconds to compute ``num_tokens`` after ``context_tokens`` in steps of the usual size, alone."""
        total_s = 0.0
        work = StepWork()
        for start in range(0, num_tokens, self._step_tokens):
            work.prefills = [(min(self._step_tokens, num_tokens - start), context_tokens + start)]
            total_s += self.step_s(work)
        return total_s

    def copy_s(self, num_tokens: int) -> float:
        """Seconds to copy the KV of ``num_tokens`` one way; each GPU has a separate link."""
        return self.efficiency.copy_s + num_tokens * self._copy_s_per_token if num_tokens else 0.0

    def kv_tokens(self, gpu_memory_utilization: float = 0.92) -> int:
        """Tokens whose KV fits with the weights, all GPUs together; 0 or less if the weights do not fit."""
        memory = self.gpu.memory_bytes * gpu_memory_utilization - RESERVE_BYTES
        free_bytes = memory * self.tensor_parallel - self.model.total_params * self._weight_bytes
        return int(free_bytes // self.kv_bytes_per_token)

    def describe(self) -> str:
        """The replica in a few words."""
        number = "" if self.tensor_parallel == 1 else f"{self.tensor_parallel} x "
        return f"{self.model.name} in {self.dtype} on {number}{self.gpu.name}"

    def notes(self) -> list[str]:
        """What is measured and what is assumed, a sentence each, for the report."""
        gpu = self.gpu
        e = self.efficiency
        source = "measured" if gpu.measured else "ASSUMED: the published peak times the share an H200 reached"
        left_out = f", without {self.model.left_out}" if self.model.left_out else ""
        reached = (
            f"{e.weights:.0%} reading weights, {e.kv:.0%} reading KV, "
            f"{e.linear:.0%} in matrix products, {e.attention:.0%} in attention"
        )
        around_ms = (
            f"{self.arrival_overhead_s * 1e3:g} ms before and {self.reply_overhead_s * 1e3:g} ms after"
        )
        notes = [
            f"step times: COMPUTED for {self.describe()} (roofline), not measured{left_out}",
            f"{gpu.name}: {gpu.bandwidth / 1e12:.2f} TB/s, {gpu.flops / 1e12:.0f} TFLOP/s (bf16), {source}",
            f"of that {reached}: PUBLISHED for vLLM with Llama-3.1-8B on an H100, ASSUMED for other pairs",
            f"ASSUMED: {self.step_overhead_s * 1e3:.1f} ms fixed cost per step, {around_ms} a request",
            f"ASSUMED: host link {gpu.host_link / 1e9:.0f} GB/s per GPU and direction",
        ]
        if self._windows:
            notes.append("ASSUMED: contexts of a step are equally long, where a layer has a sliding window")
        if self._chunks:
            notes.append("ASSUMED: a token sees half of its chunk, where attention is local to chunks")
        if self.model.delta_net is not None:
            notes.append("ASSUMED: a layer with a state costs its GEMMs and, in each step, its state twice")
        if self.model.num_experts:
            notes.append("ASSUMED: tokens choose their experts alike and independently")
        if self.tensor_parallel > 1:
            notes.append(
                f"ASSUMED: {e.peer_link:.0%} of NVLink's published {gpu.peer_link / 1e9:.0f} GB/s and "
                f"{e.all_reduce_s * 1e6:.0f} us per all-reduce"
            )
        if self.dtype == "fp8" and gpu.fp8_speedup > 1:
            notes.append(f"ASSUMED: fp8 weights make matrix products {gpu.fp8_speedup:g} times as fast")
        return notes


def make_cost(
    model: str,
    gpu: str,
    *,
    tensor_parallel: int | None = None,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
    step_tokens: int = DEFAULT_STEP_TOKENS,
) -> RooflineCost:
    """Returns the cost model of a preset pair; HardwareError if a name is unknown or the weights do not fit.

    ``tensor_parallel`` defaults to the fewest GPUs that leave a pool of ENOUGH_KV_TOKENS. ``dtype`` is the
    type of the weights, ``kv_dtype`` that of the KV: bf16 or fp8.
    """
    shape = find_model(model)
    hardware = find_gpu(gpu)
    degrees = TENSOR_PARALLEL if tensor_parallel is None else (tensor_parallel,)
    costs = [
        RooflineCost(
            shape, hardware, tensor_parallel=degree, dtype=dtype, kv_dtype=kv_dtype, step_tokens=step_tokens
        )
        for degree in degrees
    ]
    enough = ENOUGH_KV_TOKENS if tensor_parallel is None else 1
    for cost in costs:
        if cost.kv_tokens() >= enough:
            return cost
    raise _does_not_fit(costs[-1])


def _does_not_fit(cost: RooflineCost) -> HardwareError:
    weights_gb = cost.model.total_params * parameter_bytes(cost.dtype) / 1e9
    memory_gb = cost.tensor_parallel * cost.gpu.memory_bytes / 1e9
    return HardwareError(
        f"{cost.model.name} in {cost.dtype} ({weights_gb:.0f} GB of weights) leaves no room for its KV on "
        f"{cost.tensor_parallel} x {cost.gpu.name} ({memory_gb:.0f} GB); "
        "try more GPUs, larger ones, or the other dtype."
    )
