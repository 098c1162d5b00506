"""A decoder's small steps in compiled code: their results, and the fallback where they cannot be compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine.config.engine_config import ModelConfig
from engine.frontend.llm import LLM
from engine.records.kv_cache_groups import one_group
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.backend import AttentionBackend, AttentionBatch
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.cpu import compiled_decoder
from engine.worker.cpu.attention_kernel import CpuKernel
from engine.worker.cpu.compiled_decoder import CompiledDecoder, with_compiled_steps
from engine.worker.cpu.paged_attention import CpuPagedAttention
from engine.worker.cpu.thread_team import ThreadTeam
from engine.worker.loading.loader import load_model
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from tests.worker.cpu.compiled_steps import has_compiled_steps
from tests.worker.cpu.quantizing import round_weights
from tests.worker.cpu.test_paged_attention import use_compiler
from tests.worker.generation import random_tokens

BLOCK_SIZE = 8
BLOCKS_EACH = 10
NUM_BLOCKS = 100
VARIANTS: dict[str, dict[str, Any]] = {
    "norms of queries and keys, a tied head": {"family": "qwen3", "head_dim": 64, "tie": True},
    "biases": {"family": "qwen2", "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 500},
    "biases everywhere and scaled angles": {
        "family": "llama",
        "hidden_size": 256,
        "num_heads": 8,
        "num_kv_heads": 2,
        "extra_config": {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        },
    },
    "a window": {
        "family": "mistral",
        "hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "extra_config": {"sliding_window": 12},
    },
    "8 bits, a tied head": {"family": "qwen3", "head_dim": 64, "tie": True, "quantization": "int8"},
    "4 bits and biases": {
        "family": "qwen2",
        "hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 500,
        "quantization": "int4",
    },
}
VARIANTS |= {
    "all experts of a softmax": {
        "family": "qwen3_moe",
        "head_dim": 64,
        "extra_config": {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    },
    "all experts in 4 bits": {
        "family": "mixtral",
        "head_dim": 64,
        "extra_config": {"num_local_experts": 3, "num_experts_per_tok": 3},
        "quantization": "int4",
    },
    "all experts of a sigmoid, a shared one, halves of heads rotated": {
        "family": "glm4_moe",
        "head_dim": 64,
        "extra_config": {
            "n_routed_experts": 5,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
    },
}
VARIANTS |= {
    "a layer without rope, a window": {
        "family": "smollm3",
        "hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "tie": True,
        "extra_config": {
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    },
    "queries, keys and values in one tensor, a bias nowhere": {
        "family": "phi3",
        "hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "extra_config": {"sliding_window": None},
    },
    "all experts of another sigmoid, a shared one": {
        "family": "hy_v3",
        "head_dim": 64,
        "extra_config": {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    },
}
VARIANTS |= {
    "Gemma 2: soft caps, norms of outputs, GELU": {
        "family": "gemma2",
        "hidden_size": 128,
        "head_dim": 32,
        "extra_config": {
            "sliding_window": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    },
    "Gemma 3: two ropes, centered norms of heads, a tied head in 8 bits": {
        "family": "gemma3_text",
        "hidden_size": 128,
        "head_dim": 64,
        "tie": True,
        "extra_config": {"sliding_window": 12, "sliding_window_pattern": 2},
        "quantization": "int8",
    },
    "sinks, windows, all experts with biases and clamped gates": {
        "family": "gpt_oss",
        "head_dim": 64,
        "num_kv_heads": 2,
        "intermediate_size": 96,
        "extra_config": {
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "sliding_window": 12,
            "swiglu_limit": 0.5,
        },
    },
}
"""Every token uses all experts here: rounding could change a choice, and with it all later results."""
CHOOSING: dict[str, dict[str, Any]] = {
    "softmax, not normalized": {
        "family": "qwen3_moe",
        "head_dim": 64,
        "extra_config": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    },
    "softmax, normalized, in every layer": {
        "family": "mixtral",
        "head_dim": 64,
        "extra_config": {"num_local_experts": 6, "num_experts_per_tok": 2},
    },
    "softmax of the chosen, with a bias": {
        "family": "gpt_oss",
        "head_dim": 64,
        "intermediate_size": 64,
        "extra_config": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 12},
    },
    "groups": {
        "family": "glm4_moe",
        "head_dim": 64,
        "extra_config": {
            "n_routed_experts": 40,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
    },
}


pytestmark = pytest.mark.skipif(not has_compiled_steps(), reason="this CPU does not multiply pairs of bf16")


@dataclass(frozen=True, slots=True)
class Models:
    """One folder's model in bf16, and transformers' own in fp32, its weights rounded as ours are."""

    decoder: Decoder
    reference: torch.nn.Module

    def attend_over(self, backend: Callable[[torch.Tensor], AttentionBackend] | None) -> Conversations:
        """Conversations over a new pool; ``None``: with compiled steps."""
        spec = KvCacheSpec(
            one_group(self.decoder.num_layers),
            self.decoder.num_kv_heads,
            self.decoder.head_dim,
            torch.bfloat16,
            BLOCK_SIZE,
        )
        pool = spec.allocate(NUM_BLOCKS, torch.device("cpu"))
        if backend is not None:
            return Conversations(self.decoder, backend(pool))
        attention = CpuPagedAttention(pool, CpuKernel.load(self.decoder.head_dim, torch.bfloat16))
        model = with_compiled_steps(self.decoder, attention)
        assert isinstance(model, CompiledDecoder)
        return Conversations(model, attention)


class Conversations:
    """Sequences that grow step by step, computed as by the model runner."""

    def __init__(self, model: CausalModel, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention
        self._lengths: dict[int, int] = {}
        self._tables: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    @torch.inference_mode()
    def step(
        self, tokens: dict[int, list[int]], sampled: Collection[int] | None = None
    ) -> dict[int, torch.Tensor]:
        """New tokens by sequence -> logits [vocab_size] after each one's last, or of those in ``sampled``."""
        for seq in tokens:
            first = 1 + BLOCKS_EACH * len(self._tables)
            self._tables.setdefault(seq, np.arange(first, first + BLOCKS_EACH))
        names = sorted(tokens, key=lambda seq: (len(tokens[seq]) != 1, self._lengths.get(seq, 0)))
        starts = np.array([self._lengths.get(seq, 0) for seq in names], dtype=np.int64)
        counts = np.array([len(tokens[seq]) for seq in names], dtype=np.int64)
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        tables = np.stack([self._tables[seq] for seq in names])
        owner = np.repeat(np.arange(len(names)), counts)
        self._attention.begin_step(
            AttentionBatch(
                num_decodes=int((counts == 1).sum()),
                query_lens=counts,
                seq_lens=starts + counts,
                block_tables=tables,
                slot_blocks=tables[owner, positions // BLOCK_SIZE],
                slot_offsets=positions % BLOCK_SIZE,
            )
        )
        logits = self._model.forward(
            torch.tensor([token for seq in names for token in tokens[seq]]),
            torch.from_numpy(positions),
            torch.from_numpy((counts.cumsum() - 1)[[sampled is None or seq in sampled for seq in names]]),
            self._attention,
        )
        self._lengths.update(zip(names, (starts + counts).tolist(), strict=True))
        asked = [seq for seq in names if sampled is None or seq in sampled]
        return dict(zip(asked, logits.float(), strict=True))


@pytest.fixture(scope="module", params=VARIANTS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("model")
    options = dict(VARIANTS[request.param])
    quantization = options.pop("quantization", None)
    make_model_folder(folder, dtype="bfloat16", num_layers=3, **options)
    decoder = load_model(ModelConfig(model=str(folder), quantization=quantization)).model
    assert isinstance(decoder, Decoder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if quantization is not None:
        round_weights(reference, quantization, torch.bfloat16)
    return Models(decoder, reference)


def scripts(seed: int, lengths: Sequence[int]) -> dict[int, list[int]]:
    return {seq: random_tokens(length, seed=seed + seq) for seq, length in enumerate(lengths)}


cuts = st.lists(st.sampled_from((1, 1, 1, 2, 5, 8)), min_size=1, max_size=9)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(plans=st.lists(cuts, min_size=1, max_size=7), seed=st.integers(0, 1000))
def test_off_from_transformers_by_no_more_than_torch(
    models: Models, plans: list[list[int]], seed: int
) -> None:
    """For sequences that begin and grow by one or several tokens, in any batch, logits err from transformers
    in fp32 no more than torch's in bf16."""
    assert_as_right_as_torch(models, plans, seed)


@settings(max_examples=8, deadline=None)
@given(prompts=st.lists(st.integers(33, 78), min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_steps_of_many_tokens_are_as_right(models: Models, prompts: list[int], seed: int) -> None:
    """The same holds for results that are too many to be used at once, and in the small steps after them."""
    assert_as_right_as_torch(models, [[length, 1] for length in prompts], seed)


@settings(max_examples=3, deadline=None)
@given(prompts=st.lists(st.integers(65, 78), min_size=8, max_size=8), seed=st.integers(0, 1000))
def test_large_steps_are_as_right(models: Models, prompts: list[int], seed: int) -> None:
    """The same holds for more tokens than pass through a layer at once, with decodes and a cut prompt."""
    assert_as_right_as_torch(models, [[4, 1, 1], *([1, length, 1] for length in prompts)], seed)


def assert_as_right_as_torch(models: Models, plans: list[list[int]], seed: int) -> None:
    """``plans``: the number of tokens of each sequence, step by step."""
    tokens = scripts(seed, [sum(plan) for plan in plans])
    compiled, plain = models.attend_over(None), models.attend_over(TorchPagedAttention)
    errors: list[list[float]] = [[], []]
    at = dict.fromkeys(tokens, 0)
    for index in range(max(map(len, plans))):
        new = {seq: plan[index] for seq, plan in enumerate(plans) if index < len(plan)}
        step = {seq: tokens[seq][at[seq] : at[seq] + count] for seq, count in new.items()}
        at |= {seq: at[seq] + count for seq, count in new.items()}
        results = (compiled.step(step), plain.step(step))
        for seq in new:
            with torch.inference_mode():
                output = models.reference(torch.tensor([tokens[seq][: at[seq]]]))
            wanted = output.logits[0, -1]
            for kept, result in zip(errors, results, strict=True):
                kept.append(float((result[seq] - wanted).norm() / wanted.norm()))
    # Compared over all sequences: which single one is worst is chance.
    assert quadratic_mean(errors[0]) < 1.5 * quadratic_mean(errors[1]) + 1e-3
    assert max(errors[0]) < 0.05


def quadratic_mean(numbers: list[float]) -> float:
    return sqrt(fmean(number**2 for number in numbers))


@pytest.mark.parametrize("variant", CHOOSING)
def test_experts_are_chosen_as_torch_chooses_them(variant: str, tmp_path: Path) -> None:
    """In batches of many tokens, nearly all go to the experts of transformers in fp32, no fewer than with
    torch in bf16, and logits are as near."""
    make_model_folder(tmp_path, dtype="bfloat16", num_layers=3, **CHOOSING[variant])
    decoder = load_model(ModelConfig(model=str(tmp_path))).model
    assert isinstance(decoder, Decoder)
    models = Models(decoder, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    errors: list[list[float]] = [[], []]
    for seed in range(0, 80, 10):
        tokens = scripts(seed, [1 + 3 * seq for seq in range(9)])
        conversations = models.attend_over(None), models.attend_over(TorchPagedAttention)
        for kept, conversation in zip(errors, conversations, strict=True):
            for seq, found in conversation.step(tokens).items():
                with torch.inference_mode():
                    wanted = models.reference(torch.tensor([tokens[seq]])).logits[0, -1]
                kept.append(float((found - wanted).norm() / wanted.norm()))
    assert median(errors[0]) < 1.2 * median(errors[1])
    others = [sum(error > 0.05 for error in kept) for kept in errors]
    assert others[0] < others[1] + len(errors[0]) / 20


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    num_threads=st.integers(1, 3),
)
def test_alone_as_in_company(models: Models, lengths: list[int], seed: int, num_threads: int) -> None:
    """A sequence gets the same bits whatever else is in the step, and with any number of threads."""
    tokens = scripts(seed, [length + 1 for length in lengths])
    first = {seq: row[:-1] for seq, row in tokens.items()}
    last = {seq: row[-1:] for seq, row in tokens.items()}
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        company = models.attend_over(None)
        together = (company.step(first), company.step(last))
        for seq in tokens:
            alone = models.attend_over(None)
            assert torch.equal(alone.step({seq: first[seq]})[seq], together[0][seq])
            assert torch.equal(alone.step({seq: last[seq]})[seq], together[1][seq])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.sampled_from((1, 5, 70, 78)), min_size=1, max_size=9),
    sampled=st.sets(st.integers(0, 8)),
    seed=st.integers(0, 1000),
)
def test_what_is_not_sampled_is_kept_all_the_same(
    models: Models, lengths: list[int], sampled: set[int], seed: int
) -> None:
    """If logits of only some sequences are computed, as for unfinished prompts, these logits and the next
    step of all have the same bits as if all were computed."""
    tokens = scripts(seed, [length + 1 for length in lengths])
    first = {seq: row[:-1] for seq, row in tokens.items()}
    last = {seq: row[-1:] for seq, row in tokens.items()}
    some, all_of_them = models.attend_over(None), models.attend_over(None)
    found, wanted = some.step(first, sampled), all_of_them.step(first)
    assert set(found) == sampled & set(tokens)
    assert all(torch.equal(found[seq], wanted[seq]) for seq in found)
    found, wanted = some.step(last), all_of_them.step(last)
    assert all(torch.equal(found[seq], wanted[seq]) for seq in tokens)


SERVED: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {"sliding_window": 48, "sliding_window_pattern": 2},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 48},
}


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("qwen3", None), ("qwen3", "int8"), ("qwen3", "int4"), ("gemma3_text", None), ("gpt_oss", None)],
)
def test_served_tokens_are_the_best_ones(
    family: str, quantization: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For prompts shorter and longer than a small step, in one batch, each token is, within bf16, the best of
    transformers in fp32 with equally rounded weights. So many inputs make products sums of several."""
    make_model_folder(
        tmp_path / "model",
        family,
        dtype="bfloat16",
        head_dim=64,
        hidden_size=320,
        intermediate_size=704,
        extra_config=SERVED[family],
    )
    prompts = [random_tokens(length, seed=length) for length in (1, 5, 40, 64, 65, 150, 700)]
    with caplog.at_level(logging.INFO):
        outputs = greedy(tmp_path / "model", prompts, quantization=quantization)
    assert "Using the compiled CPU backend for whole steps." in caplog.text
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    if quantization is not None:
        round_weights(reference, quantization, torch.bfloat16)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (logits.max(dim=-1).values - chosen < 0.03 * logits.std()).all()


def test_a_step_without_one_of_its_threads_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without a thread give the same tokens: here, other work seems to occupy a core."""
    make_model_folder(tmp_path / "model", "qwen3", dtype="bfloat16", head_dim=64)
    prompts = [random_tokens(length, seed=length) for length in (5, 40, 300)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        by_all = greedy(tmp_path / "model", prompts)
        now, sizes = 0.0, list[int]()
        compute = ThreadTeam.compute

        def noted(team: ThreadTeam, num_tokens: int, step: Callable[[int], None]) -> None:
            def timed(threads: int) -> None:
                nonlocal now
                step(threads)
                now += 0.01 * threads
                sizes.append(threads)

            compute(team, num_tokens, timed)

        monkeypatch.setattr(ThreadTeam, "compute", noted)
        monkeypatch.setattr(
            compiled_decoder, "ThreadTeam", partial(ThreadTeam, clock=lambda: now, busy_clock=lambda: 0.0)
        )
        assert greedy(tmp_path / "model", prompts) == by_all
    finally:
        torch.set_num_threads(before)
    assert {1, 2} == set(sizes)


@pytest.mark.parametrize(
    "options",
    [{"attention_backend": "torch"}, {"dtype": "float32"}, {"dtype": "float32", "quantization": "int8"}],
    ids=" ".join,
)
def test_others_run_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """Torch's attention and other types are served without compiled steps."""
    make_model_folder(tmp_path / "model", "qwen3", dtype="bfloat16", head_dim=64)
    with caplog.at_level(logging.INFO):
        [output] = greedy(tmp_path / "model", [random_tokens(9, seed=0)], **options)
    assert len(output) == 12
    assert "compiled CPU backend" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_torch_for_attention_means_that_no_compiler_runs(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option also makes torch multiply the weights, so that no compiler is needed."""
    make_model_folder(tmp_path / "model", "qwen3", dtype="bfloat16", head_dim=64)
    prompts = [random_tokens(9, seed=0)]
    use_compiler(tmp_path, monkeypatch, 'exec c++ "$@" -O0')  # the cache is empty
    greedy(tmp_path / "model", prompts, quantization=quantization, attention_backend="torch")
    assert not (tmp_path / "cache").exists()
    greedy(tmp_path / "model", prompts, quantization=quantization)
    assert len(list((tmp_path / "cache" / "continuum").glob("*.so"))) == 1


def test_sizes_that_fill_no_unit_run_by_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Torch computes a width that is not a multiple of the compiled code's unit."""
    make_model_folder(
        tmp_path / "model", "llama", dtype="bfloat16", hidden_size=96, num_heads=3, num_kv_heads=1
    )
    with caplog.at_level(logging.INFO):
        [output] = greedy(tmp_path / "model", [random_tokens(9, seed=0)])
    assert len(output) == 12
    assert "compiled CPU backend" not in caplog.text


def greedy(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    llm = LLM(str(folder), multiprocess=False, num_gpu_blocks_override=256, max_model_len=1024, **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
