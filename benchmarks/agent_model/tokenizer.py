"""The tokenizer: a small byte-level BPE that splits a word into the same tokens everywhere.

Letters, digits and other characters never share a token, and every digit, dot and slash is a separate token:
so a name is copied from a sentence into a path, and a path into quotes, token by token. It is trained on
conversations without English names: otherwise some tokens would occur in one word only and hardly be trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.agent_model.dialogues import Dialogue, draw_dialogues
from eval.agents.tools import SCHEMAS

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCAB_SIZE = 1408
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

_PARTS = Regex(r"\p{L}+|\p{N}|[./]|[^\p{L}\p{N}./]+")


def make_tokenizer(seed: int, num_dialogues: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer on ``num_dialogues`` conversations of this seed, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PARTS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TOOL_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_dialogues), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOOL_TOKENS])
    return _with_template(tokenizer)


def rendered(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> str:
    """Renders a conversation with the chat template."""
    tools: list[Any] | None = SCHEMAS if dialogue.tools else None
    text = tokenizer.apply_chat_template(list(dialogue.messages), tools=tools, tokenize=False)
    assert isinstance(text, str)
    return text


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Returns the id of a special token."""
    number = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(number, int)
    return number


def _with_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(),
    )


def _texts(seed: int, num_dialogues: int) -> Iterator[str]:
    """Yields the texts between the special tokens."""
    template = _with_template(Tokenizer(models.BPE()))
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + TOOL_TOKENS)))
    for dialogue in islice(draw_dialogues(seed, english=False), num_dialogues):
        yield from special.split(rendered(template, dialogue))
