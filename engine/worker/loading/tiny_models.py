"""Makes small model folders of real architectures, with random weights and a real tokenizer.

For the demo, benchmarks and tests if no checkpoint is available. Must not know how the engine loads them.
"""

from __future__ import annotations

import ast
import json
import math
import textwrap
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mistral4ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>")
MAX_TRAINED_TOKENS = 32_000
"""Maximum number of trained tokens; larger vocabularies add tokens that exist only to be sampled."""
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS) + len(TOOL_TOKENS)

_GEMMA = ("gemma2", "gemma3_text", "gemma4_text")
_DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3", "granite"),
    *("olmo3", "exaone4", "ernie4_5", "glm4", "phi3", "arcee", "ministral3", "apertus", "cohere2"),
)
_SPARSE = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "llama4_text"),
    *("dots1", "solar_open", "granitemoe", "granitemoeshared", "minimax_m2"),
    *("hy_v3", "exaone_moe", "mellum", "ernie4_5_moe", "mimo_v2_flash"),
)
_FUSED = ("gpt_oss", "llama4_text", "mistral4", "gemma4_text")
"""Families that are also published with the experts of a layer in one tensor."""
_LATENT = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "mistral4", "deepseek_v32", "glm_moe_dsa"),
    "minicpm3",
)
_WITH_STATES = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "nemotron_h"),
    *("lfm2", "lfm2_moe", "lfm3", "bamba", "olmo_hybrid", "falcon_h1", "jamba"),
)
_LATENT_WITH_STATES = ("kimi_linear",)
_OTHERS = ("gpt_neox", "phi", "olmo2")
FAMILIES = (
    *(*_DENSE, *_GEMMA, *_SPARSE, *_LATENT),
    *(*_WITH_STATES, *_LATENT_WITH_STATES, *_OTHERS),
)
_GROUPED_QUERY = frozenset({*_DENSE, "phi", "olmo2", *_GEMMA, *_SPARSE, *_WITH_STATES})
_HEADS_OF_HIDDEN = (
    *("qwen2", "qwen2_moe", "smollm3", "granite", "granitemoe", "granitemoeshared"),
    *("olmo3", "exaone4", "exaone_moe", "phi3", "lfm2", "lfm2_moe", "bamba"),
    *("olmo_hybrid", "falcon_h1", "jamba", "apertus", "cohere2"),
)
"""Families whose heads share the hidden size."""
_OWN_HEAD_DIM = frozenset({*_DENSE, *_GEMMA, *_SPARSE, *_WITH_STATES}.difference(_HEADS_OF_HIDDEN))
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Buffers that a checkpoint holds, always in fp32."""
_SCALARS = "layer_scalar"
"""Buffers that a checkpoint holds in the model's type."""
_CONSTANTS = {"act_fn.beta": 0.5, "act_fn.eps": -1e-6}
"""Buffers that a checkpoint holds although they never differ."""

_PUBLISHED = {
    "hy_v3": (
        ("mlp.gate.weight", "mlp.router.gate.weight"),
        ("mlp.e_score_correction_bias", "mlp.expert_bias"),
        ("mlp.shared_experts.", "mlp.shared_mlp."),
    ),
    "nemotron_h": (("model.", "backbone."),),
    "kimi_linear": (
        *((f"mlp.{part}", f"block_sparse_moe.{part}") for part in ("experts", "gate.", "shared_experts.")),
        ("forget_gate.", ""),
    ),
    "olmo_hybrid": (("input_layernorm", "attention_layer_norm"),),
    "mimo_v2_flash": (("self_attn.sinks", "self_attn.attention_sink_bias"),),
    "ernie4_5_moe": (("mlp.gate.moe_statics.", "mlp.moe_statics."),),
    "exaone_moe": (("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),),
}
"""Parts of names in checkpoints that differ from transformers'."""
_DECAYS = "A_log"
"""Parameters that are made small here, so that states remember tokens from far back."""

_CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_CORPUS_CHARACTERS_PER_TOKEN = 400


def make_model_folder(
    path: str | Path,
    family: str = "qwen3",
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int = 512,
    max_position_embeddings: int = 4096,
    dtype: str = "float32",
    seed: int = 0,
    tie: bool = False,
    shards: int = 1,
    extra_config: dict[str, Any] | None = None,
    weights: bool = True,
) -> Path:
    """Write a complete model folder and return its path; equal arguments give equal folders.

    ``extra_config`` holds additional fields of the family's config, such as ``sliding_window``. Without
    ``weights`` the folder works only with ``load_format="dummy"``.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(vocab_size)
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": intermediate_size or 4 * hidden_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie,
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    has_latents = family in (*_LATENT, *_LATENT_WITH_STATES)
    if family in _GROUPED_QUERY or has_latents:
        fields["num_key_value_heads"] = num_heads if has_latents else num_kv_heads
    if family in _OWN_HEAD_DIM:
        fields["head_dim"] = head_dim or hidden_size // num_heads
    if family == "mistral":
        fields["sliding_window"] = None
    config = AutoConfig.for_model(family, **(fields | (extra_config or {})))
    model = _without_memory(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if weights:
        _write_weights(folder, model, getattr(torch, dtype), seed, shards)
    _write_tokenizer(folder, tokenizer, max_position_embeddings)
    _write_generation_config(folder, config)
    return folder


def _without_memory(config: PreTrainedConfig) -> PreTrainedModel:
    """Build transformers' model on the meta device, for the names and shapes of its tensors."""
    if config.model_type == "mistral4":  # which transformers knows only as the decoder of Mistral 3 folders
        AutoModelForCausalLM.register(type(config), Mistral4ForCausalLM, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    return model


def _write_weights(folder: Path, model: PreTrainedModel, dtype: torch.dtype, seed: int, shards: int) -> None:
    """Write the safetensors, in ``shards`` files with an index if more than one."""
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = _random_tensor(name, parameter.shape, parameter is embedding, generator).to(dtype)
        tensors |= _as_published(name, tensor, str(model.config.model_type))
    for name, buffer in model.named_buffers():
        if name.endswith(_CORRECTIONS):
            tensor = _random_tensor(name, buffer.shape, False, generator)
            tensors |= _as_published(name, tensor, str(model.config.model_type))
        constant = next((value for end, value in _CONSTANTS.items() if name.endswith(end)), None)
        if constant is not None:
            tensors[name] = torch.tensor(constant, dtype=dtype)
        if name.endswith(_SCALARS):
            tensors[name] = _random_tensor(name, buffer.shape, False, generator).to(dtype)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file_name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")


def _as_published(name: str, tensor: torch.Tensor, model_type: str) -> dict[str, torch.Tensor]:
    """A tensor under its published names: transformers 5 joins the experts of a layer in one tensor, as only
    the families in ``_FUSED`` and Granite are published."""
    is_mixtral = model_type in ("mixtral", "minimax_m2")
    by_number = is_mixtral or model_type in ("lfm2_moe", "kimi_linear")
    gate, up, down = ("w1", "w3", "w2") if by_number else ("gate_proj", "up_proj", "down_proj")
    if is_mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    for own, published in _PUBLISHED.get(model_type, ()):
        name = name.replace(own, published)
    if model_type.startswith("granitemoe"):
        return {_as_granite_publishes(name): tensor}
    if model_type in ("kimi_linear", "olmo_hybrid") and name.endswith("conv1d.weight"):
        parts = zip("qkv", tensor.chunk(3), strict=True)  # of equal sizes here
        return {name.replace("conv1d", f"{each}_conv1d"): part.clone() for each, part in parts}
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts") or tensor.dim() != 3 or model_type in _FUSED:
        return {name: tensor}
    tensors: dict[str, torch.Tensor] = {}
    for index, expert in enumerate(tensor):
        names: tuple[str, ...] = (up if kind == "up_proj" else down,)
        rows: tuple[torch.Tensor, ...] = (expert,)
        if kind == "gate_up_proj":
            names = (gate, up)
            rows = expert.chunk(2)
        for each, part in zip(names, rows, strict=True):
            tensors[f"{prefix}.{index}.{each}.weight"] = part.contiguous().clone()
    return tensors


def _as_granite_publishes(name: str) -> str:
    moe = "block_sparse_moe."
    for own, published in (
        (f"{moe}experts.gate_up_proj", f"{moe}input_linear.weight"),
        (f"{moe}experts.down_proj", f"{moe}output_linear.weight"),
        (f"{moe}router.", f"{moe}router.layer."),
    ):
        name = name.replace(own, published)
    return name


def _random_tensor(
    name: str, shape: torch.Size, is_embedding: bool, generator: torch.Generator
) -> torch.Tensor:
    """Draw a tensor. Matrices preserve the scale of their input; norms and biases are not neutral, so that
    each has an effect."""
    noise = torch.randn(shape, generator=generator)
    if is_embedding:
        return noise * 0.3
    if len(shape) > 1:
        return noise / math.sqrt(shape[-1])
    if name.endswith(_DECAYS):
        return noise * 0.5 - 2.5
    return noise * 0.1 if name.endswith("bias") else 1.0 + noise * 0.1


def _write_generation_config(folder: Path, config: PreTrainedConfig) -> None:
    content = {"do_sample": False, "eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    fast.chat_template = _CHAT_TEMPLATE.read_text(encoding="utf-8")
    fast.save_pretrained(folder)


def _train_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of exactly ``vocab_size`` tokens; the added ones are last, as in Qwen.

    Each token has some text, so that every sampled token is readable.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    num_added = len(SPECIAL_TOKENS) + len(TOOL_TOKENS)
    num_trained = min(vocab_size - num_added, MAX_TRAINED_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=num_trained,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        _corpus(min(vocab_size, MAX_TRAINED_TOKENS) * _CORPUS_CHARACTERS_PER_TOKEN), trainer
    )
    _fill_vocabulary(tokenizer, vocab_size - num_added)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in TOOL_TOKENS])
    return tokenizer


def _fill_vocabulary(tokenizer: Tokenizer, size: int) -> None:
    """Add filler tokens up to ``size``. No text is encoded with them, because no merge leads to them."""
    num_tokens = tokenizer.get_vocab_size()
    if num_tokens == size:
        return
    model = json.loads(tokenizer.to_str())["model"]
    # Letters and digits are split before anything is merged: none of the trained tokens has both.
    filler = {f"x{token:06d}": token for token in range(num_tokens, size)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer.model = models.BPE(vocab=model["vocab"] | filler, merges=merges)


def _corpus(num_characters: int) -> list[str]:
    """The first characters of some standard-library sources: English and code, on every machine."""
    folder = Path(ast.__file__).parent
    pieces: list[str] = []
    for file in [Path(textwrap.__file__), *sorted(folder.glob("*.py"))]:
        text = file.read_text(encoding="utf-8", errors="ignore")
        pieces.append(text[:num_characters])
        num_characters -= len(text)
        if num_characters <= 0:
            break
    return pieces
