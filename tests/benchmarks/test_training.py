"""Training of the bundled model on a small scale: the result is an ordinary model folder."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from benchmarks.agent_model.dialogues import draw_dialogues
from benchmarks.agent_model.examples import IGNORED, Encoder, batches, make_examples
from benchmarks.agent_model.initial_weights import initialize
from benchmarks.agent_model.network import PIECE, Network, NetworkShape
from benchmarks.agent_model.tokenizer import rendered
from benchmarks.agent_model.train import main
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder that the command makes from a few conversations."""
    out = tmp_path_factory.mktemp("model")
    assert main(["--out", str(out), "--dialogues", "30"]) == 0
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_the_folder_is_served_as_transformers_computes_it(folder: Path) -> None:
    prompt = "What is server.port in conf/app.toml?"
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with LLM(str(folder)) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    tokens = torch.tensor([output.prompt_token_ids])
    for _ in range(8):
        with torch.no_grad():
            following = theirs(tokens).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, following], dim=1)
    assert list(output.outputs[0].token_ids) == tokens[0, -8:].tolist()


def test_a_beginning_computed_once_changes_nothing() -> None:
    """With a precomputed prefix the network's outputs equal those of the whole sequence, and
    transformers'."""
    torch.manual_seed(0)
    shape = NetworkShape(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, head_dim=16, intermediate_size=64
    )
    network = Network(shape)
    initialize(network)
    prefix, tokens = torch.randint(64, (20,)), torch.randint(64, (2, PIECE + 30))
    whole = torch.cat([prefix.expand(2, -1), tokens], dim=1)
    theirs = AutoModelForCausalLM.from_config(_qwen3(shape)).eval()  # type: ignore[no-untyped-call]
    theirs.load_state_dict(network.state_dict(), strict=False)
    with torch.no_grad():
        ours = network.logits(network(tokens, prefix))
        torch.testing.assert_close(ours, network.logits(network(whole, None))[:, 20:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours, theirs(whole).logits[:, 20:], atol=1e-4, rtol=1e-4)


def _qwen3(shape: NetworkShape) -> PreTrainedConfig:
    return AutoConfig.for_model("qwen3", **shape.config(), tie_word_embeddings=True)


def test_copying_is_there_before_training() -> None:
    """When random tokens are repeated, most of the repetition is predicted."""
    torch.manual_seed(0)
    network = Network(NetworkShape(vocab_size=1000))
    initialize(network)
    once = torch.randint(1000, (2, 100))
    with torch.no_grad():
        said = network.logits(network(torch.cat([once, once], dim=1), None)).argmax(-1)
    assert (said[:, 100:-1] == once[:, 1:]).float().mean() > 0.8


def test_only_what_the_assistant_says_is_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    """The targets of each dialogue are the assistant's turns without its slips."""
    encoder = Encoder(tokenizer)
    dialogues = draw_dialogues(4)
    for _ in range(50):
        dialogue = next(dialogues)
        example = encoder.example(dialogue)
        assert example is not None
        learned = tokenizer.decode([int(token) for token in example.targets if token != IGNORED])
        spoken = rendered(tokenizer, dialogue).split("<|im_start|>assistant\n")[1:]
        said = (text[: text.index("<|im_end|>") + len("<|im_end|>")] for text in spoken)
        assert learned == "".join(t for t, keep in zip(said, dialogue.learned, strict=True) if keep)


def test_every_conversation_is_in_one_batch_and_few_places_are_empty(folder: Path) -> None:
    examples = make_examples(folder, 3, 60)
    made = list(batches(examples, 4096, random.Random(0)))
    assert sum(len(batch.tokens) for batch in made) == len(examples) == 60
    assert all(batch.tokens.numel() <= 4096 or len(batch.tokens) == 1 for batch in made)
    used = sum(len(example.tokens) for example in examples)
    assert used > 0.7 * sum(batch.tokens.numel() for batch in made)
