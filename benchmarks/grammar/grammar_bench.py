"""``make bench-grammar``: compares tokens per second of a batch without grammars and with them, in turns.

Runs a model of random weights in this process, and compares the time of the same number of steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.worker.loading.tiny_models import make_model_folder

VOCAB_SIZES = (512, 8192)
HIDDEN_SIZE = 256
NUM_LAYERS = 6
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["read", "write", "list"]},
            "lines": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}},
            "by": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 12}]},
        },
        "required": ["path", "kind"],
        "additionalProperties": False,
    },
}
"""No output is ever complete, so that all have the same number of tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """A name, and how many requests of the batch follow the schema."""

    name: str
    num_constrained: int


class Bench:
    """One model and the requests of a round."""

    def __init__(self, llm: LLM, batch: int, num_tokens: int) -> None:
        self._llm = llm
        self._batch = batch
        self._num_tokens = num_tokens

    def tokens_per_s(self, case: Case, seed: int) -> float:
        wanted = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        params = [
            SamplingParams(
                max_tokens=self._num_tokens,
                ignore_eos=True,
                detokenize=False,
                seed=seed * self._batch + number,
                structured_outputs=wanted if number < case.num_constrained else None,
            )
            for number in range(self._batch)
        ]
        prompts = [[number + 1] * 8 for number in range(self._batch)]
        started = perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        took_s = perf_counter() - started
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert num_tokens == self._batch * self._num_tokens, "an output ended early"
        return num_tokens / took_s


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-grammar", description=__doc__)
    parser.add_argument("--batch", type=int, default=8, help="requests at once (8)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each output (100)")
    parser.add_argument("--rounds", type=int, default=5, help="times each case is run (5)")
    args = parser.parse_args(argv)
    for name, low, high in (("batch", 2, 64), ("tokens", 2, 1000), ("rounds", 1, 100)):
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name} must be in [{low}, {high}]")
    cases = [Case("no grammar", 0), Case("one of the batch", 1), Case("all of the batch", args.batch)]
    print(f"{'vocabulary':>10}  {'a schema for':<18} {'tokens/s':>10} {'of no grammar':>14}")
    for vocab_size in VOCAB_SIZES:
        with tempfile.TemporaryDirectory() as folder:
            make_model_folder(folder, vocab_size=vocab_size, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS)
            with LLM(folder, multiprocess=False, num_gpu_blocks_override=2000) as llm:
                _report(vocab_size, Bench(llm, args.batch, args.tokens), cases, args.rounds)
    return 0


def _report(vocab_size: int, bench: Bench, cases: list[Case], num_rounds: int) -> None:
    for case in cases:
        bench.tokens_per_s(case, 0)
    speeds: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(num_rounds):
        for case in cases:
            speeds[case.name].append(bench.tokens_per_s(case, number + 1))
    # The fastest round is the one that other work on the machine disturbed least.
    base = max(speeds[cases[0].name])
    for case in cases:
        best = max(speeds[case.name])
        print(f"{vocab_size:>10}  {case.name:<18} {best:>10.0f} {best / base:>13.2f}x", flush=True)


if __name__ == "__main__":
    sys.exit(main())
