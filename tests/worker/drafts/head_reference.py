"""Drafts of heads, computed with layers of transformers over whole sequences, without any cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.worker.drafts.head_folders import Tensors, tensors_of

Head = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Embeddings of the next tokens and hidden states, [num_tokens, size] each -> the input of the LM head, and
the head's hidden states for its next draft."""


@dataclass
class Reference:
    """A model and its head."""

    model: Any
    head: Head
    say: Callable[[torch.Tensor], torch.Tensor]
    """The input of the LM head -> the likeliest token."""
    layers: tuple[int, ...] = ()
    fuse: torch.Tensor | None = None

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The head's drafts after these tokens."""
        output = self.model(torch.tensor([tokens]), output_hidden_states=True)
        states = output.hidden_states
        hidden = states[-1][0, :-1]
        if self.fuse is not None:
            hidden = torch.cat([states[layer][0, :-1] for layer in self.layers], dim=-1) @ self.fuse.T
        following, drafts = tokens[1:], list[int]()
        for _ in range(count):
            embedded = self.model.get_input_embeddings()(torch.tensor(following))
            to_say, goes_on = self.head(embedded, hidden)
            drafts.append(int(self.say(to_say[-1])))
            following = [*following, drafts[-1]]
            hidden = torch.cat((hidden, goes_on[-1:]))
        return drafts


def _model(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


def _llama_layer(folder: Path, tensors: Tensors, prefix: str, inputs: int) -> tuple[nn.Module, Any]:
    config = LlamaConfig.from_pretrained(folder)
    config._attn_implementation = "sdpa"
    layer: Any = LlamaDecoderLayer(config, 0)
    layer.train(False)
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = tensors[f"{prefix}self_attn.{name}.weight"]
        setattr(attention, name, nn.Linear(inputs, len(weight), bias=False))
    names = dict(layer.named_parameters())
    own = {name: tensors[prefix + name] for name in names if "input_layernorm" not in name}
    layer.load_state_dict(own, strict=False)
    return layer, LlamaRotaryEmbedding(config)


def _attended(layer: Any, rope: Any, x: torch.Tensor) -> torch.Tensor:
    angles = rope(x[None], torch.arange(len(x))[None])
    attended: torch.Tensor = layer.self_attn(x[None], position_embeddings=angles, attention_mask=None)[0][0]
    return attended


def eagle_reference(model_folder: Path, folder: Path) -> Reference:
    tensors, model = tensors_of(folder), _model(model_folder)
    layer, rope = _llama_layer(folder, tensors, "layers.0.", 64)

    def head(embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat((embedded, hidden), dim=-1) @ tensors["fc.weight"].T
        x = x + _attended(layer, rope, x)
        x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
        return x, x

    return Reference(model, head, lambda x: model.lm_head(x).argmax())


def eagle3_reference(model_folder: Path, folder: Path) -> Reference:
    tensors, model = tensors_of(folder), _model(model_folder)
    layer, rope = _llama_layer(folder, tensors, "midlayer.", 128)

    def head(embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = _norm(embedded, tensors["midlayer.input_layernorm.weight"])
        x = torch.cat((token, _norm(hidden, tensors["midlayer.hidden_norm.weight"])), dim=-1)
        x = hidden + _attended(layer, rope, x)
        x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
        return _norm(x, tensors["norm.weight"]), x

    def say(x: torch.Tensor) -> torch.Tensor:
        best = (tensors["lm_head.weight"] @ x).argmax()
        return best + tensors["d2t"][best]

    return Reference(model, head, say, (1, 2, 3), tensors["fc.weight"])


def prediction_reference(folder: Path) -> Reference:
    """A reference for a DeepSeek-V3 or a GLM-4.5 with a layer for multi-token prediction."""
    tensors, model = tensors_of(folder), _model(folder)
    config = model.config
    prefix, last = f"model.layers.{config.num_hidden_layers}.", config.num_hidden_layers - 1
    kind: Any = DeepseekV3DecoderLayer if config.model_type == "deepseek_v3" else Glm4MoeDecoderLayer
    layer = kind(config, last).train(False)
    own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    layer.load_state_dict(_fused(own), strict=False)

    def head(embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = _norm(embedded, own["enorm.weight"]), _norm(hidden, own["hnorm.weight"])
        x = (torch.cat(both, dim=-1) @ own["eh_proj.weight"].T)[None]
        positions = torch.arange(x.shape[1])[None]
        angles = model.model.rotary_emb(x, positions)
        x = layer(x, position_embeddings=angles, position_ids=positions, attention_mask=None)
        x = x[0] if x.dim() == 3 else x
        x = _norm(x, own["shared_head.norm.weight"])
        return x, x

    return Reference(model, head, lambda x: model.lm_head(x).argmax())


def _fused(own: Tensors) -> Tensors:
    """Experts in transformers' memory layout."""
    count = len({name.split(".")[2] for name in own if name.startswith("mlp.experts.")})
    fused = dict(own)
    of = [
        [own[f"mlp.experts.{i}.{name}_proj.weight"] for i in range(count)] for name in ("gate", "up", "down")
    ]
    if count:
        gate, up, down = (torch.stack(each) for each in of)
        fused["mlp.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        fused["mlp.experts.down_proj"] = down
    return fused
