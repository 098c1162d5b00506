"""Folders of heads, made for a small model: with random weights, or always right for a model whose layers add
nothing, so that its next token depends on the last one alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

HIDDEN, INNER, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 64, 96, 16, 4, 2


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def silence(folder: Path) -> Path:
    """Makes the layers of a model add nothing to the residual stream."""
    tensors = tensors_of(folder)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sharpen(folder: Path, factor: float = 64.0) -> Path:
    """Makes a model sure of its likeliest token, which stays; to a random one all are nearly as likely."""
    tensors = tensors_of(folder)
    tensors["lm_head.weight" if "lm_head.weight" in tensors else "model.norm.weight"] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_numbers(seed: int) -> Callable[..., torch.Tensor]:
    """Draws tensors by shape: matrices keep the scale of their inputs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return noise / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.1 * noise

    return draw


def eagle_folder(folder: Path, tensors: Tensors, **fields: object) -> Path:
    """Writes the folder of an EAGLE head with these tensors."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "vocab_size": 512,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def layer_tensors(draw: Callable[..., torch.Tensor], prefix: str, inputs: int = HIDDEN) -> Tensors:
    """A layer of a head: attention over ``inputs`` numbers of a token, and an MLP."""
    kv = NUM_KV_HEADS * HEAD_DIM
    return {
        f"{prefix}self_attn.q_proj.weight": draw(HIDDEN, inputs),
        f"{prefix}self_attn.k_proj.weight": draw(kv, inputs),
        f"{prefix}self_attn.v_proj.weight": draw(kv, inputs),
        f"{prefix}self_attn.o_proj.weight": draw(HIDDEN, HIDDEN),
        f"{prefix}mlp.gate_proj.weight": draw(INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": draw(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": draw(HIDDEN, INNER),
        f"{prefix}post_attention_layernorm.weight": draw(HIDDEN),
    }


def random_eagle(folder: Path) -> Path:
    draw = random_numbers(3)
    return eagle_folder(folder, {"fc.weight": draw(HIDDEN, 2 * HIDDEN), **layer_tensors(draw, "layers.0.")})


def right_eagle(folder: Path, model: Path) -> Path:
    """Writes the head that predicts a silent model's next token."""
    draw, norm = random_numbers(4), tensors_of(model)["model.norm.weight"]
    fuse = torch.cat((torch.diag(norm), torch.zeros(HIDDEN, HIDDEN)), dim=1)
    layer = layer_tensors(draw, "layers.0.")
    for name in layer:
        if "o_proj" in name or "down_proj" in name:
            layer[name].zero_()
    return eagle_folder(folder, {"fc.weight": fuse.contiguous(), **layer})


def random_eagle3(folder: Path, num_tokens: int = 300) -> Path:
    """Writes a head whose vocabulary is the first ``num_tokens`` tokens that 3 does not divide."""
    draw = random_numbers(5)
    kept = torch.tensor([token for token in range(512) if token % 3][:num_tokens])
    tensors = {
        "fc.weight": draw(HIDDEN, 3 * HIDDEN),
        **layer_tensors(draw, "midlayer.", 2 * HIDDEN),
        "midlayer.input_layernorm.weight": draw(HIDDEN),
        "midlayer.hidden_norm.weight": draw(HIDDEN),
        "norm.weight": draw(HIDDEN),
        "lm_head.weight": 64 * draw(num_tokens, HIDDEN),
        "d2t": kept - torch.arange(num_tokens),
        "t2d": torch.isin(torch.arange(512), kept),
    }
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    return eagle_folder(folder, tensors, draft_vocab_size=num_tokens, **layers)


def add_prediction_layer(model: Path, *, right: bool) -> Path:
    """Adds a layer for multi-token prediction, like the model's last one; ``right``: right if silent."""
    tensors, draw = tensors_of(model), random_numbers(6)
    num_layers = json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    last, new = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    layer = {new + name.removeprefix(last): t for name, t in tensors.items() if name.startswith(last)}
    layer = {
        name: draw(*t.shape) if not right and t.dim() == 2 and "mlp.gate." not in name else t.clone()
        for name, t in layer.items()
    }
    ones = torch.ones(HIDDEN)
    straight = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), dim=1).contiguous()
    layer |= {
        f"{new}enorm.weight": ones.clone() if right else draw(HIDDEN),
        f"{new}hnorm.weight": ones.clone() if right else draw(HIDDEN),
        f"{new}eh_proj.weight": straight if right else draw(HIDDEN, 2 * HIDDEN),
        f"{new}shared_head.norm.weight": tensors["model.norm.weight"].clone() if right else draw(HIDDEN),
        f"{new}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{new}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors | layer, model / "model.safetensors", metadata={"format": "pt"})
    return model
