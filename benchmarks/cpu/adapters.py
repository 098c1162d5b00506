"""Measures the cost of LoRA adapters in decode: one interleaved run with and without them.

    python -m benchmarks.cpu.adapters [--model small] [--batch 32] [--adapters 16] [--rank 16] [--rounds 3]

Every request of a batch uses an adapter on all linears; each adapter serves equally many requests. Prints
decoded tokens per second with and without adapters, and their ratio in each round.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from benchmarks.cpu.models import MODELS
from engine.frontend.llm import LLM
from engine.records.adapters import CONFIG_FILE, WEIGHTS_FILE, LoRARequest
from engine.records.sampling_params import SamplingParams
from eval.say import say

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder of the models")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder = MODELS[arguments.model].folder(arguments.models)
    adapters = [
        _made(arguments.models / f"adapter-{arguments.model}-{number}", folder, arguments.rank, number)
        for number in range(arguments.adapters)
    ]
    given = [adapters[index % len(adapters)] for index in range(arguments.batch)]
    options = {"max_loras": arguments.adapters, "max_lora_rank": arguments.rank}
    with LLM(folder, multiprocess=False, enable_lora=True, max_model_len=512, **options) as llm:
        _rate(llm, given)  # loads the adapters
        rounds = [(_rate(llm, [None] * arguments.batch), _rate(llm, given)) for _ in range(arguments.rounds)]
    for base, adapted in rounds:
        say(f"base {base:.1f}, with adapters {adapted:.1f} decoded tokens/s: {adapted / base:.3f}x")
    say(f"median {median(adapted / base for base, adapted in rounds):.3f}x of the base")


def _rate(llm: LLM, adapters: list[LoRARequest] | list[None]) -> float:
    """Returns decoded tokens per second of a batch, without its prefill."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 1000, PROMPT_TOKENS).tolist() for _ in adapters]
    seconds = []
    llm.reset_prefix_cache()
    for num_tokens in (1, OUTPUT_TOKENS):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        llm.reset_prefix_cache()
    return len(adapters) * (OUTPUT_TOKENS - 1) / (seconds[1] - seconds[0])


def _made(folder: Path, model: Path, rank: int, seed: int) -> LoRARequest:
    """Makes an adapter of random weights for all linears of a Llama-like or Qwen-like model."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head
    kv = config["num_key_value_heads"] * head
    linears = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    random = np.random.default_rng(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in linears.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                weights[f"{prefix}.lora_{part}.weight"] = random.normal(0, 0.01, shape).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return LoRARequest(f"adapter-{seed}", seed, str(folder))


if __name__ == "__main__":
    main()
