"""The computed cost model matches published figures: models' sizes, floors of an H200, measured servers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from eval.errors import CostModelError, HardwareError
from eval.sim.cost_model import StepCost, StepWork
from eval.sim.hardware import GPUS, find_gpu
from eval.sim.model_folder import find_model
from eval.sim.models import MODELS
from eval.sim.roofline import Efficiency, RooflineCost, make_cost

IDEAL = Efficiency(
    weights=1,
    kv=1,
    linear=1,
    attention=1,
    peer_link=1,
    step_s=0,
    layer_s=0,
    all_reduce_s=0,
    copy_s=0,
    arrival_s=0,
    reply_s=0,
)
"""The hardware's limit, without losses."""


def _floor(gpu: str = "h200", **options: str) -> RooflineCost:
    return RooflineCost(find_model("llama-3.1-8b"), find_gpu(gpu), efficiency=IDEAL, **options)  # type: ignore[arg-type]


def _decode_s(cost: StepCost, batch: int, context: int) -> float:
    return cost.step_s(StepWork(num_decodes=batch, decode_context_tokens=batch * context))


@pytest.mark.parametrize(
    ("name", "total", "active", "kv_bytes"),
    [
        # Exact: the size of the checkpoint's tensors. KV: 128 and 320 KiB per token.
        ("llama-3.1-8b", 8_030_261_248, 8_030_261_248, 131_072),
        ("llama-3.1-70b", 70_553_706_496, 70_553_706_496, 327_680),
        # Model cards: 30.5B in total and 3.3B activated; 355B and 32B, with a prediction layer of 3.9B.
        ("qwen3-30b-a3b", 30.5e9, 3.3e9, 98_304),
        ("glm-4.5", 355e9 - 3.9e9, 32e9, 376_832),
        # Cards: 20.9B in total and 3.6B activated, where the embedding is left out; 27B of text, tied.
        ("gpt-oss-20b", 20.9e9, 3.6e9 + 0.58e9, 49_152),
        # Card: 109B, with a vision tower of 0.9B, and 17B activated.
        ("llama-4-scout", 109e9 - 0.9e9, 17e9, 196_608),
        ("gemma-3-27b", 27.0e9, 27.0e9 + 1.41e9, 507_904),
        # Exact, by transformers' own models of the configs; cards: 37B and 32B activated. KV: 576 numbers of
        # each of 61 layers.
        ("deepseek-v3", 671_026_404_352, 37e9, 70_272),
        ("kimi-k2", 1_026_408_209_408, 32e9, 70_272),
        # Exact, by transformers' own model of the config; 3.9B with embedding and head. KV of 12 layers only.
        ("qwen3-next-80b-a3b", 79_674_391_296, 3.9e9, 24_576),
    ],
)
def test_parameters_follow_from_the_dimensions(name: str, total: float, active: float, kv_bytes: int) -> None:
    """Parameters counted from a config equal the published checkpoint's size, or else the model card's."""
    shape = MODELS[name]
    assert shape.total_params == pytest.approx(total, rel=0 if isinstance(total, int) else 0.01)
    # Cards count what one token passes, including embedding and head.
    assert shape.body_params_per_token + 2 * shape.head_params == pytest.approx(active, rel=0.06)
    assert shape.kv_bytes_per_token(2) == kv_bytes


@pytest.mark.parametrize(
    ("batch", "context", "step_ms", "fp8_kv_ms", "fp8_both_ms"),
    [
        (1, 4096, 3.62, 3.55, 1.81),
        (1, 16384, 3.99, 3.74, 2.00),
        (32, 4096, 7.49, 5.49, 3.74),
        (32, 16384, 19.5, 11.5, 9.7),
        (128, 4096, 19.5, 11.5, 9.7),
        (128, 16384, 67.4, 35.5, 33.7),
        (256, 4096, 36.8, 20.9, 18.4),
        (256, 16384, 132.7, 68.8, 66.4),
    ],
)
def test_decode_floors_of_an_h200(
    batch: int, context: int, step_ms: float, fp8_kv_ms: float, fp8_both_ms: float
) -> None:
    """max(15.01 GB / W, 15.01 GFLOP x batch / R) + KV / W, to the printed digits. The fp8 rows were summed
    from rounded parts, and compute-bound ones assume twice the FLOP/s, where the presets have 1.5 times."""
    assert round(_decode_s(_floor(), batch, context) * 1e3, 2 if step_ms < 10 else 1) == step_ms
    fp8_kv = _floor(kv_dtype="fp8")
    assert _decode_s(fp8_kv, batch, context) * 1e3 == pytest.approx(fp8_kv_ms, abs=0.06)
    if batch < 256:
        fp8_both = _floor(dtype="fp8", kv_dtype="fp8")
        assert _decode_s(fp8_both, batch, context) * 1e3 == pytest.approx(fp8_both_ms, abs=0.06)


@pytest.mark.parametrize(
    ("new", "cached", "floor_ms", "digits"),
    [
        (2048, 0, 37.6, 1),
        (8192, 0, 167, 0),
        (16384, 0, 379, 0),
        (32768, 0, 935, 0),
        (2048, 8192, 49, 0),
        (2048, 32768, 82, 0),
        (2048, 131072, 216, 0),
    ],
)
def test_prefill_floors_of_an_h200(new: int, cached: int, floor_ms: float, digits: int) -> None:
    """[13.96 GFLOP x n + 524288 (n P + n²/2)] / R, to the printed digits, for any step size."""
    assert round(_floor().prefill_s(new, cached) * 1e3, digits) == floor_ms


@pytest.mark.parametrize("context", [4096, 20_000, 100_000])
def test_decoding_is_as_fast_as_a_measured_server(context: int) -> None:
    """vLLM 0.19, Llama-3.1-8B bf16 on an H100, one request: 6.44 ms + 43.7 ns per token of context."""
    cost = make_cost("llama-3.1-8b", "h100")
    assert _decode_s(cost, 1, context) == pytest.approx(6.44e-3 + 43.7e-9 * context, rel=0.01)


@pytest.mark.parametrize(("tokens", "tflops"), [(10_000, 630), (100_000, 590)])
def test_prefill_is_as_fast_as_a_measured_server(tokens: int, tflops: float) -> None:
    """vLLM, the same pair: about 630 TFLOP/s at 10k tokens and 590 at 100k, read from a plot of TTFT."""
    flop = 13.96e9 * tokens + 524288 * tokens**2 / 2
    assert flop / make_cost("llama-3.1-8b", "h100").prefill_s(tokens) / 1e12 == pytest.approx(
        tflops, rel=0.04
    )


@pytest.mark.parametrize(
    ("model", "gpu", "options", "share", "tokens", "tolerance"),
    [
        # The round number of the policy sketch.
        ("llama-3.1-8b", "h100", {}, 0.92, 400_000, 0.15),
        # 115 to 120 GB in addition to the weights.
        ("llama-3.1-8b", "h200", {}, 0.92, 900_000, 0.03),
        # A pod of Qwen3-Coder-30B-A3B-FP8, two H100, vLLM 0.28 with fp8 KV: 2.24 M tokens.
        (
            "qwen3-30b-a3b",
            "h100",
            {"tensor_parallel": 2, "dtype": "fp8", "kv_dtype": "fp8"},
            0.9,
            2_240_000,
            0.07,
        ),
    ],
)
def test_kv_pools_are_as_large_as_published(
    model: str, gpu: str, options: dict[str, object], share: float, tokens: int, tolerance: float
) -> None:
    """Memory x share - weights - reserve, over the bytes of a token."""
    cost = make_cost(model, gpu, **options)  # type: ignore[arg-type]
    assert cost.kv_tokens(share) == pytest.approx(tokens, rel=tolerance)


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "gpus"),
    [
        ("llama-3.1-8b", "a100-80", "bf16", 1),
        ("llama-3.1-70b", "h100", "bf16", 4),  # As the Continuum paper serves it.
        ("glm-4.5", "h200", "bf16", 8),  # The rest: GLM-4.5's model card.
        ("glm-4.5", "h200", "fp8", 4),
        ("glm-4.5", "h100", "fp8", 8),
    ],
)
def test_the_default_number_of_gpus_is_the_usual_one(model: str, gpu: str, dtype: str, gpus: int) -> None:
    """The default is the smallest number that holds the weights and a useful pool."""
    assert make_cost(model, gpu, dtype=dtype).tensor_parallel == gpus


@pytest.mark.parametrize(
    ("model", "gpu", "options", "sentence"),
    [
        # The model card requires sixteen.
        ("glm-4.5", "h100", {}, "glm-4.5 in bf16 (706 GB of weights) leaves no room for its KV on 8 x h100"),
        ("llama-3.1-70b", "h100", {"tensor_parallel": 1}, "leaves no room for its KV on 1 x h100 (85 GB)"),
        ("llama-3.1-8b", "h100", {"tensor_parallel": 3}, "tensor_parallel must be one of 1, 2, 4, 8, got 3."),
        ("llama-3.1-8b", "h100", {"dtype": "int4"}, "dtype must be one of bf16, fp8, got 'int4'."),
        (
            "llama-4",
            "h100",
            {},
            "Unknown model 'llama-4'; name a model folder, or one of llama-3.1-8b, llama-3.1-70b",
        ),
        ("llama-3.1-8b", "tpu", {}, "Unknown GPU 'tpu'; choose from a100-80, h100, h200, b200."),
    ],
)
def test_an_impossible_choice_is_one_sentence(
    model: str, gpu: str, options: dict[str, object], sentence: str
) -> None:
    """The error names the request and the possible values."""
    with pytest.raises(CostModelError) as caught:
        make_cost(model, gpu, **options)  # type: ignore[arg-type]
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_are_read_as_tokens_choose_them() -> None:
    """One token reads its 8 experts of 128, many tokens read all; in between it is E(1 - (1 -
    k/E)^tokens)."""
    shape = MODELS["qwen3-30b-a3b"]
    always = shape.shared_params + shape.head_params
    experts = shape.num_layers * shape.expert_params
    assert shape.params_read(1) == pytest.approx(always + 8 * experts)
    assert shape.params_read(2) == pytest.approx(always + (16 - 0.5) * experts)
    assert shape.params_read(4096) == pytest.approx(shape.total_params - shape.head_params)


TOO_LARGE = {
    *(("deepseek-v3", gpu) for gpu in ("a100-80", "h100")),
    *(("kimi-k2", gpu) for gpu in ("a100-80", "h100", "h200")),
}
"""Pairs of a model and a GPU where not even eight GPUs have enough memory."""


@pytest.mark.parametrize(("model", "gpu"), sorted(TOO_LARGE))
def test_what_does_not_fit_is_refused(model: str, gpu: str) -> None:
    """The error has both sizes."""
    with pytest.raises(HardwareError, match=rf"{model} in fp8 .* no room for its KV on 8 x {gpu}"):
        make_cost(model, gpu, dtype="fp8")


@pytest.mark.parametrize(("model", "gpu"), [pair for pair in product(MODELS, GPUS) if pair not in TOO_LARGE])
def test_more_work_takes_more_time(model: str, gpu: str) -> None:
    """For every pair that fits, more requests, context, prompt tokens or GPUs never take less time."""
    cost = make_cost(model, gpu, dtype="fp8")
    assert 0 < cost.step_overhead_s < _decode_s(cost, 1, 1000) < _decode_s(cost, 8, 1000)
    assert _decode_s(cost, 8, 1000) < _decode_s(cost, 8, 50_000)
    assert cost.prefill_s(1000) < cost.prefill_s(8000) < cost.prefill_s(8000, 50_000)
    assert 0 == cost.copy_s(0) < cost.copy_s(100) < cost.copy_s(100_000)
    if cost.tensor_parallel < 8:
        wider = make_cost(model, gpu, dtype="fp8", tensor_parallel=2 * cost.tensor_parallel)
        copies = wider.kv_bytes_per_token / cost.kv_bytes_per_token  # of KV heads, if there are fewer
        assert wider.kv_tokens() > 2 * cost.kv_tokens() / copies
        assert wider.prefill_s(8000) < cost.prefill_s(8000)


def test_a_prefill_is_the_sum_of_its_steps() -> None:
    """``prefill_s`` equals the sum of the simulator's steps."""
    cost = make_cost("qwen3-30b-a3b", "h100", step_tokens=1000)
    steps = [(1000, 500), (1000, 1500), (300, 2500)]
    apart_s = sum(cost.step_s(StepWork(prefills=[step])) for step in steps)
    assert cost.prefill_s(2300, 500) == pytest.approx(apart_s)


def test_reload_beats_recompute_by_the_published_factor() -> None:
    """Llama-3.1-8B, H200, 32k tokens over a link of 50 GB/s: 86 ms against 1.23 s at 600 TFLOP/s."""
    cost = make_cost("llama-3.1-8b", "h200")
    assert cost.copy_s(32_768) == pytest.approx(86e-3, rel=0.02)
    assert cost.prefill_s(32_768) == pytest.approx(1.23, rel=0.02)


def test_the_notes_tell_measured_from_assumed() -> None:
    """The notes of every report distinguish both, for its model and GPU."""
    notes = "\n".join(make_cost("glm-4.5", "h200").notes())
    assert "COMPUTED for glm-4.5 in bf16 on 8 x h200" in notes
    assert "h200: 4.30 TB/s, 790 TFLOP/s (bf16), measured" in notes
    assert "experts alike" in notes
    assert "NVLink" in notes
    assert "3.00 TB/s, 790 TFLOP/s (bf16), ASSUMED" in "\n".join(make_cost("llama-3.1-8b", "h100").notes())


def test_a_window_bounds_what_a_layer_reads() -> None:
    """Half of gpt-oss-20b's layers see 128 tokens: at 8 x 20,128 a step reads the KV of 81,024 in each."""
    model = MODELS["gpt-oss-20b"]
    cost = RooflineCost(model, find_gpu("h200"), efficiency=IDEAL)
    seen = 8 * (20_128 + 128) / 2
    assert seen == 81_024
    read_s = seen * model.kv_bytes_per_token(2) / find_gpu("h200").bandwidth
    attention_s = _decode_s(cost, 8, 20_128) - _decode_s(cost, 8, 0)
    assert attention_s == pytest.approx(read_s)
    assert _decode_s(cost, 8, 100) - _decode_s(cost, 8, 0) == pytest.approx(read_s * 800 / seen)


def test_a_state_is_read_and_written_in_each_step() -> None:
    """36 of 48 layers have one: 3 inputs of 8,192 channels in bf16, 32 matrices of 128 x 128 in fp32. A
    context costs as much as 12 layers with KV."""
    model = MODELS["qwen3-next-80b-a3b"]
    state_bytes = 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert model.state_bytes(2) == state_bytes
    assert MODELS["llama-3.1-8b"].state_bytes(2) == 0
    gpu = find_gpu("h200")
    cost = RooflineCost(model, gpu, tensor_parallel=2, efficiency=IDEAL)
    without = RooflineCost(replace(model, delta_net=None), gpu, tensor_parallel=2, efficiency=IDEAL)
    rows_s = [_decode_s(each, 8, 0) - _decode_s(each, 4, 0) for each in (cost, without)]
    assert rows_s[0] - rows_s[1] == pytest.approx(4 * 2 * state_bytes / (2 * gpu.bandwidth), rel=0.01)
    attention_s = _decode_s(cost, 8, 10_000) - _decode_s(cost, 8, 0)
    assert attention_s == pytest.approx(8 * 10_000 * 24_576 / (2 * gpu.bandwidth))


def test_a_chunk_bounds_what_a_layer_reads() -> None:
    """Three of four layers of Llama 4 Scout see a chunk of 8,192 tokens, half of it on average from the
    second chunk on: at 4 x 100,000 a step reads the KV of 112,288 tokens in each layer."""
    model = MODELS["llama-4-scout"]
    cost = RooflineCost(model, find_gpu("h200"), tensor_parallel=2, efficiency=IDEAL)
    seen = 4 * (100_000 + 3 * 4096) / 4
    assert seen == 112_288
    read_s = seen * model.kv_bytes_per_token(2) / find_gpu("h200").bandwidth / 2
    attention_s = _decode_s(cost, 4, 100_000) - _decode_s(cost, 4, 0)
    assert attention_s == pytest.approx(read_s)
    assert _decode_s(cost, 4, 8000) - _decode_s(cost, 4, 0) == pytest.approx(read_s * 32_000 / seen)
    assert "half of its chunk" in "\n".join(cost.notes())


def test_latents_are_read_for_all_heads_and_held_by_each_gpu() -> None:
    """DeepSeek-V3 in fp8 on eight H200: each GPU holds all tokens' latents; a pair of tokens costs each of
    128 heads 576 multiplications for its score and 512 for its value."""
    model = MODELS["deepseek-v3"]
    cost = RooflineCost(model, find_gpu("h200"), dtype="fp8", tensor_parallel=8, efficiency=IDEAL)
    assert cost.kv_bytes_per_token == 8 * 61 * 576 * 2
    assert model.attention_flop_per_pair == 61 * 128 * 2 * (576 + 512)
    short, long = (_decode_s(cost, 1, context) for context in (1, 100_001))
    read_s = 100_000 * cost.kv_bytes_per_token / 8 / find_gpu("h200").bandwidth
    assert long - short == pytest.approx(read_s, rel=0.01)
