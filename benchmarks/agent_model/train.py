"""Trains the bundled model: ``python -m benchmarks.agent_model.train --out FOLDER`` (an hour).

First on conversations without the description of the tools, which every conversation shares and which costs
more than half of the work; then with it.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.agent_model.examples import Batch, Encoder, Example, batches, make_examples
from benchmarks.agent_model.initial_weights import initialize
from benchmarks.agent_model.network import Network, NetworkShape
from benchmarks.agent_model.tokenizer import make_tokenizer, token_id
from eval.say import say

TOKENIZER_DIALOGUES = 3000
WARMUP_STEPS = 100
LAST_RATE = 0.02
"""Share of the highest learning rate that is left at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of a training run, which takes under an hour on two cores; MODEL_CARD.md has the results."""

    seed: int = 0
    num_dialogues: int = 33_000
    epochs: int = 1
    """Epochs without the description of the tools."""
    epochs_with_tools: float = 0.12
    num_held_out: int = 400
    batch_tokens: int = 2048
    learning_rate: float = 3e-3


class Trainer:
    """Master weights in 32 bits; the forward and backward passes use their rounding to 16 bits.

    Matrices are trained by Muon, with steps of the size of AdamW's (arXiv 2502.16982); all else by AdamW.
    """

    def __init__(self, recipe: Recipe, shape: NetworkShape, prefix: Sequence[int]) -> None:
        torch.manual_seed(recipe.seed)
        self.master = Network(shape)
        initialize(self.master)
        self._worker = copy.deepcopy(self.master).to(torch.bfloat16)
        self._prefix = torch.tensor(prefix)
        self._learning_rate = recipe.learning_rate
        self._optimizers = _optimizers(self.master, recipe.learning_rate)

    def step(self, batch: Batch, with_tools: bool, rate: float) -> float:
        """Makes one update at this share of the learning rate; returns the loss before it."""
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = rate * self._learning_rate
        learned = batch.targets >= 0
        hidden = self._worker(batch.tokens, self._prefix if with_tools and batch.tools else None)
        loss = functional.cross_entropy(self._worker.logits(hidden[learned]).float(), batch.targets[learned])
        loss.backward()  # type: ignore[no-untyped-call]
        self._update()
        return loss.item()

    def right(self, batch: Batch) -> Tensor:
        """Returns which conversations of a batch, [batch], the model predicts word for word."""
        with torch.no_grad():
            hidden = self._worker(batch.tokens, self._prefix if batch.tools else None)
            said = self._worker.logits(hidden).argmax(-1)
        return ((said == batch.targets) | (batch.targets < 0)).all(dim=1)

    def _update(self) -> None:
        pairs = list(zip(self.master.parameters(), self._worker.parameters(), strict=True))
        for master, worker in pairs:
            assert worker.grad is not None
            master.grad = worker.grad.float()
            worker.grad = None
        nn.utils.clip_grad_norm_(self.master.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            for master, worker in pairs:
                worker.copy_(master)


def _optimizers(network: Network, learning_rate: float) -> tuple[torch.optim.Optimizer, ...]:
    matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in network.named_parameters() if p.ndim != 2 or "embed" in name]
    return (
        torch.optim.Muon(
            matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_steps=4
        ),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    )


def train(recipe: Recipe, folder: Path) -> None:
    """Writes the whole model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    say("Tokenizer ...")
    tokenizer = make_tokenizer(recipe.seed, min(recipe.num_dialogues, TOKENIZER_DIALOGUES))
    tokenizer.save_pretrained(folder)
    say(f"{recipe.num_dialogues:,} conversations ...")
    examples = make_examples(folder, recipe.seed, recipe.num_dialogues)
    held_out = make_examples(folder, recipe.seed, recipe.num_held_out, held_out=True)
    shape = NetworkShape(vocab_size=len(tokenizer))
    trainer = Trainer(recipe, shape, Encoder(tokenizer).prefix)
    say(f"Training {sum(p.numel() for p in trainer.master.parameters()):,} parameters ...")
    _train(trainer, recipe, examples, held_out)
    save_model(folder, trainer.master, tokenizer)


def _train(
    trainer: Trainer, recipe: Recipe, examples: Sequence[Example], held_out: Sequence[Example]
) -> None:
    plan = list(_plan(recipe, examples))
    loss = 0.0
    for step, (batch, with_tools) in enumerate(bar := tqdm(plan, unit="step", mininterval=10.0)):
        rate = min(1.0, (step + 1) / WARMUP_STEPS) * _decay(step / len(plan))
        loss += (trainer.step(batch, with_tools, rate) - loss) / min(step + 1, 50)
        if step % 500 == 499 or step == len(plan) - 1:
            bar.set_postfix_str(f"loss {loss:.4f}, held out {_score(trainer, held_out):.1%}")


def _plan(recipe: Recipe, examples: Sequence[Example]) -> Iterator[tuple[Batch, bool]]:
    """Yields the batches in order, and whether they include the description of the tools."""
    rng = random.Random(recipe.seed)
    for _ in range(recipe.epochs):
        yield from ((batch, False) for batch in batches(examples, recipe.batch_tokens, rng))
    some = rng.sample(list(examples), int(recipe.epochs_with_tools * len(examples)))
    yield from ((batch, True) for batch in batches(some, recipe.batch_tokens, rng))


def _decay(done: float) -> float:
    """Full for the first third, then falls linearly."""
    return max(LAST_RATE, min(1.0, 1.5 * (1.0 - done)))


def _score(trainer: Trainer, held_out: Sequence[Example]) -> float:
    """Share of held-out conversations predicted word for word, with the description of the tools."""
    right = [trainer.right(batch) for batch in batches(held_out, 8192, random.Random(0))]
    return torch.cat(right).float().mean().item()


def save_model(folder: Path, network: Network, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes a Hugging Face folder with 16-bit weights, for computation in 32 bits."""
    tokenizer.save_pretrained(folder)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    end = token_id(tokenizer, "<|im_end|>")
    padding = token_id(tokenizer, "<|endoftext|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": end,
        "pad_token_id": padding,
        **network.shape.config(),
    }
    _write(folder / "config.json", config)
    _write(
        folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": padding, "do_sample": False}
    )


def _write(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_model.train", description=__doc__)
    default = Recipe()
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the model goes")
    parser.add_argument("--seed", type=int, default=default.seed, metavar="K")
    parser.add_argument("--dialogues", type=int, default=default.num_dialogues, metavar="N")
    args = parser.parse_args(argv)
    started = time.monotonic()
    held_out = min(default.num_held_out, args.dialogues)
    train(Recipe(seed=args.seed, num_dialogues=args.dialogues, num_held_out=held_out), args.out)
    say(f"{args.out} is ready after {(time.monotonic() - started) / 60:.0f} minutes.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
