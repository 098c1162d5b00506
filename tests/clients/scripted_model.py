"""A real model folder whose weights make it say given replies, so that agents can run whole jobs on it.

Each reply is cut into pieces that are separate tokens. A token's embedding is one axis, the layers add
nothing to it, and the output matrix leads from each piece to the next. Forward pass and sampler are the
ordinary ones; the most probable token leads by so much that any temperature gives it. A mark that the chat
template puts after ``<|im_start|>assistant`` selects the reply; the rest of the chat is rendered in full.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.worker.loading.tiny_models import make_model_folder

BASE_VOCAB_SIZE = 512
LEAD = 60.0
"""The amount by which the next piece's logit exceeds all others."""
PIECE_LENGTHS = (5, 6, 7, 4, 8, 3, 9, 10, 11, 12)
"""Lengths in characters, in order of preference; longer ones for similar replies."""
_TEMPLATE = Path(__file__).with_name("scripted_chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Script:
    """The model's replies in one kind of conversation.

    A conversation is of this kind if ``cue`` is in its tools or its first message. The n-th assistant message
    is the n-th reply; after the last reply, the last again.
    """

    cue: str
    replies: tuple[str, ...]


def tool_call(name: str, **arguments: object) -> str:
    """A call as the model writes it, which the chat template renders the same in the next turn."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def make_scripted_model(folder: Path, scripts: Sequence[Script], max_model_len: int = 16384) -> Path:
    """Writes the folder; replies must be ASCII, as added tokens are, and differ from each other."""
    pieces = _Pieces()
    cuts = {
        (script.cue, n): pieces.cut(reply) for script in scripts for n, reply in enumerate(script.replies)
    }
    marks = {key: f"<|reply_{number}|>" for number, key in enumerate(cuts)}
    make_model_folder(
        folder,
        "llama",
        hidden_size=16 * math.ceil((len(marks) + len(pieces) + 1) / 16),
        num_layers=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=32,
        vocab_size=BASE_VOCAB_SIZE,
        max_position_embeddings=max_model_len,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks.values()])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for cut in cuts.values() for piece in cut])
    tokenizer.chat_template = _template(scripts, marks)
    tokenizer.save_pretrained(folder)
    ids = tokenizer.get_vocab()
    chains = [[ids[text] for text in (marks[key], *cut, "<|im_end|>")] for key, cut in cuts.items()]
    _write_weights(folder, len(ids), chains)
    return folder


def _template(scripts: Sequence[Script], marks: dict[tuple[str, int], str]) -> str:
    known = [
        {"cue": script.cue, "marks": [marks[script.cue, n] for n in range(len(script.replies))]}
        for script in scripts
    ]
    head = "{%- set scripts = " + json.dumps(known) + " %}\n"
    return head + _TEMPLATE.read_text(encoding="utf-8")


def _write_weights(folder: Path, vocab_size: int, chains: list[list[int]]) -> None:
    """Makes each chain's tokens lead to one another; every other token, and the end, lead to the end."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    hidden_size = tensors["model.embed_tokens.weight"].shape[1]
    embedding = torch.zeros(vocab_size, hidden_size)
    output = torch.zeros(vocab_size, hidden_size)
    end = chains[0][-1]
    axis = 0
    embedding[:, axis] = 1.0
    output[end, axis] = 1.0
    for chain in chains:
        for token, following in pairwise(chain):
            axis += 1
            embedding[token] = 0.0
            embedding[token, axis] = 1.0
            output[following, axis] = 1.0
    tensors["model.embed_tokens.weight"] = embedding
    # The final norm scales an axis of length 1 to length sqrt(hidden_size).
    tensors["lm_head.weight"] = output * (LEAD / math.sqrt(hidden_size))
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    save_file(tensors, path, metadata={"format": "pt"})
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config_path.write_text(json.dumps(config | {"vocab_size": vocab_size}, indent=2), encoding="utf-8")


@dataclass(slots=True)
class _Pieces:
    """Distinct pieces such that the tokenizer cuts each reply exactly into them.

    The tokenizer takes the longest matching piece at each position. So where a piece of any reply starts, no
    longer piece may match than the one cut there.
    """

    _taken: list[str] = field(default_factory=list)
    _starts: list[tuple[str, int]] = field(default_factory=list)
    """The text after each position where a piece starts, and that piece's length."""

    def __len__(self) -> int:
        return len(self._taken)

    def cut(self, reply: str) -> list[str]:
        if not reply.isascii():
            raise ValueError(f"a scripted reply must be ASCII: {reply!r}")
        first = len(self._taken)
        if not self._cut_from(reply, 0, set()):
            raise ValueError(f"this reply is too like the others to be cut: {reply!r}")
        return self._taken[first:]

    def _cut_from(self, reply: str, start: int, hopeless: set[int]) -> bool:
        """Cuts the rest of the reply depth first, or leaves everything unchanged."""
        rest = reply[start:]
        if not rest:
            return True
        if start in hopeless:
            return False
        for length in _lengths(len(rest)):
            if self._fits(rest, length):
                self._taken.append(rest[:length])
                self._starts.append((rest, length))
                if self._cut_from(reply, start + length, hopeless):
                    return True
                self._taken.pop()
                self._starts.pop()
        hopeless.add(start)
        return False

    def _fits(self, rest: str, length: int) -> bool:
        piece = rest[:length]
        if any(other == piece or (len(other) > length and rest.startswith(other)) for other in self._taken):
            return False
        return not any(own < length and other.startswith(piece) for other, own in self._starts)


def _lengths(longest: int) -> Iterator[int]:
    yield from (length for length in PIECE_LENGTHS if length <= longest)
    yield from range(max(PIECE_LENGTHS) + 1, longest + 1)
    yield from (length for length in range(1, min(PIECE_LENGTHS)) if length == longest)
