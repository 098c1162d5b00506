"""``LLM.beam_search``: transformers' sequences, and V1's way to end them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import RequestError
from engine.frontend.beam_search import BeamSearchParams
from engine.frontend.llm import LLM
from engine.tokenization.tokenizer import Tokenizer

PROMPTS = ["The quick brown fox", "def main(self):"]


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(model_folder, multiprocess=False, num_gpu_blocks_override=300) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


@pytest.mark.parametrize("width", [1, 4])
def test_sequences_are_those_of_transformers(llm: LLM, model: Any, tokenizer: Tokenizer, width: int) -> None:
    """All sequences of a prompt, in order, equal those of transformers where none ends early."""
    params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [sequence.tokens for sequence in output.sequences] == wanted.tolist()
        assert output.sequences[0].text.startswith(prompt)
        assert {sequence.finish_reason for sequence in output.sequences} == {"length"}


def test_a_sequence_ends_at_eos(llm: LLM, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that ends at EOS is ranked by its own length; its ``cum_logprob`` is the model's."""
    prompt, params = [1, 2, 3], BeamSearchParams(beam_width=3, max_tokens=5)
    [going_on] = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=1, ignore_eos=True))
    eos = going_on.sequences[1].tokens[-1]
    monkeypatch.setattr(llm.engine._inputs, "_eos_token_id", eos)
    [output] = llm.beam_search([prompt], params)
    ended = [sequence for sequence in output.sequences if sequence.finish_reason == "stop"]
    assert ended, "one of three beams begins with it"
    for sequence in output.sequences:
        assert (sequence.finish_reason == "stop") == (sequence.tokens[-1] == eos)
        assert eos not in sequence.tokens[len(prompt) : -1]
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        found = sum(logits[place - 1, sequence.tokens[place]] for place in range(3, len(sequence.tokens)))
        assert sequence.cum_logprob == pytest.approx(float(found), abs=1e-3)
    scores = [
        sequence.cum_logprob / (len(sequence.tokens) - (sequence.finish_reason == "stop"))
        for sequence in output.sequences
    ]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"beam_width": 0, "max_tokens": 4}, "beam_width must be in"),
        ({"beam_width": 11, "max_tokens": 4}, "beam_width must be in"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"beam_width": 2, "max_tokens": 1 << 20}, "max_tokens is 1048576, but"),
    ],
)
def test_wrong_parameters_are_refused(llm: LLM, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.beam_search("a", BeamSearchParams(**fields))
