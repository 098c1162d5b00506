"""Checks that features work together.

``python -m tests.reliability.combinations --draws 20 --seed 1`` starts servers of random model families with
random features: quantization, drafts, adapters, tiers, saved KV, several cores, ranks or stages. Operators
change them at random (``operators.py``) while they answer greedy, sampled, constrained and repeated requests
with shared prefixes in too few blocks; some clients disconnect early. Each answer must equal that of an
engine without these features for the request alone, with the currently loaded weights and adapter.

Features that the command line rejects are drawn again. A server that rejects its features later, when it
has seen the model, must name the reason; the draw then counts as rejected. Exits with 1 at the first wrong
answer, and prints the seed that repeats the draw.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from continuum.cli.serve_args import engine_config
from continuum.cli.serve_flags import add_serve_arguments
from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.frontend.request_output import CompletionOutput
from engine.records.adapters import LoRARequest
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import ServerEnded, running_server
from tests.reliability.operators import Operated, Rounds, World, transfer
from tests.worker.conftest import VARIANTS
from tests.worker.lora.made_adapters import save_adapter

FAMILIES = (
    *(
        "llama",
        "qwen3",
        "mistral-window",
        "gemma3",
        "qwen3-moe",
        "mixtral",
        "deepseek-v3",
        "gpt-oss",
        "llama4",
    ),
    *("qwen3-next", "granite4"),
)
WITH_ADAPTERS = ("llama", "qwen3", "mistral-window", "gemma3")
"""Families whose layers peft can all adapt."""
SPREADS = ("--data-parallel-size", "--tensor-parallel-size", "--pipeline-parallel-size")
MAX_MODEL_LEN = 480
NUM_CHAINS = 3
TURNS_OF_A_CHAIN = 4
CLOSE = 2e-2
"""How much log-probabilities may differ: a batch sums in another order."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["one", "another"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 3, "n": 2, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 1, "structured_outputs": {"json": SCHEMA}},
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A randomly drawn server."""

    family: str
    quantization: str | None
    has_adapters: bool
    num_cores: int
    flags: tuple[str, ...]

    @property
    def serve_flags(self) -> tuple[str, ...]:
        return ("--max-model-len", str(MAX_MODEL_LEN), "--device", "cpu", *self.flags)

    def __str__(self) -> str:
        return f"{self.family}: {' '.join(self.flags)}"


def draw(random: Random, folder: Path) -> Setting:
    """Draws a setting that the command line accepts. ``folder``: for data of tiers and connectors."""
    while True:
        setting = _draw(random, folder)
        try:
            _check(setting)
        except ConfigError:
            continue
        return setting


def _check(setting: Setting) -> None:
    """ConfigError if these flags cannot be combined."""
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    engine_config(parser.parse_args(["model", *setting.serve_flags]))


def _draw(random: Random, folder: Path) -> Setting:
    def some(chance: float, *flags: str) -> tuple[str, ...]:
        return flags if random.random() < chance else ()

    family = random.choice(FAMILIES)
    quantization = random.choice((None, None, None, "int8", "int4"))
    has_adapters = family in WITH_ADAPTERS and random.random() < 0.5
    drafts = random.choice((None, None, "ngram", "suffix", "grammar"))
    spread = random.choice((None, None, *SPREADS))
    drafting = json.dumps({"method": drafts, "weigh_costs": False})
    kv = {"kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")}}
    features = (
        () if quantization is None else ("--quantization", quantization),
        ("--enable-lora", "--max-loras", "2") if has_adapters else (),
        () if drafts is None else ("--speculative-config", drafting),
        () if spread is None else (spread, "2"),
        some(0.4, "--kv-offloading-size", "0.01"),
        some(0.2, *transfer("SharedStorageConnector", "kv_both", **kv)),
        some(0.5, "--async-scheduling"),
        some(0.3, "--max-num-batched-tokens", "48"),
        some(0.2, "--no-enable-prefix-caching"),
        some(0.2, "--disable-hybrid-kv-cache-manager"),
        some(0.2, "--api-server-count", "2"),
        some(0.3, "--scheduling-policy", random.choice(("fcfs", "priority"))),
        some(0.2, "--no-enable-chunked-prefill"),
        some(0.2, "--trace", str(folder / "trace.jsonl")),
        ("--num-gpu-blocks-override", str(random.choice((70, 120, 300)))),
    )
    return Setting(
        family=family,
        quantization=quantization,
        has_adapters=has_adapters,
        num_cores=2 if spread == SPREADS[0] else 1,
        flags=sum(features, ()),
    )


class AloneWorld(World):
    """Chains of questions, each with the previous one as prefix, and a plain engine's answer to each."""

    num_questions = NUM_CHAINS * TURNS_OF_A_CHAIN

    def __init__(self, base: Path, random: Random, setting: Setting, closing: ExitStack) -> None:
        self._setting = setting
        self._closing = closing
        variant = {**VARIANTS[setting.family], "max_position_embeddings": 2048}
        self.folders = [
            make_model_folder(base / name, seed=seed, **variant) for seed, name in enumerate(("old", "new"))
        ]
        self.adapters: list[Path] = []
        if setting.has_adapters:
            self.adapters = [save_adapter(self.folders[0], base / f"adapter{seed}", seed) for seed in (0, 1)]
        self._bodies = [body for chain in range(NUM_CHAINS) for body in _chain(random, chain)]
        self._engines: dict[Path, LLM] = {}
        self._expected: dict[tuple[Path, Path | None, int], list[CompletionOutput]] = {}

    def body(self, question: int) -> dict[str, Any]:
        return self._bodies[question]

    def check(self, weights: Path, adapter: Path | None, question: int, answer: dict[str, Any]) -> None:
        expected = self._alone(weights, adapter, question)
        choices = answer["choices"]
        what = f"question {question} {self._bodies[question]}, weights {weights.name}, adapter {adapter}"
        got = [choice["token_ids"] for choice in choices]
        assert got == [list(each.token_ids) for each in expected], what
        assert [choice["text"] for choice in choices] == [each.text for each in expected], what
        for choice, each in zip(choices, expected, strict=True):
            if each.logprobs is not None:
                alone = [position.chosen.logprob for position in each.logprobs]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(alone, abs=CLOSE), what

    def _alone(self, weights: Path, adapter: Path | None, question: int) -> list[CompletionOutput]:
        key = weights, adapter, question
        if key not in self._expected:
            request = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))
            body = self._bodies[question]
            (output,) = self._engine(weights).generate(
                [body["prompt"]], _sampling(body), use_tqdm=False, lora_request=request
            )
            self._expected[key] = output.outputs
        return self._expected[key]

    def _engine(self, weights: Path) -> LLM:
        if weights not in self._engines:
            options: dict[str, Any] = {"enable_lora": True} if self._setting.has_adapters else {}
            engine = LLM(
                str(weights),
                multiprocess=False,
                num_gpu_blocks_override=100,
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=False,
                quantization=self._setting.quantization,
                **options,
            )
            self._engines[weights] = self._closing.enter_context(engine)
        return self._engines[weights]


def _chain(random: Random, number: int) -> list[dict[str, Any]]:
    """The turns of a job: each prompt continues the previous one."""
    prompt = [random.randrange(5, 250) for _ in range(random.choice((20, 70, 130)))]
    turns: list[dict[str, Any]] = []
    for _ in range(TURNS_OF_A_CHAIN):
        prompt = [*prompt, *(random.randrange(5, 250) for _ in range(random.randrange(5, 60)))]
        way = random.choice(WAYS)
        length = {"max_tokens": 40} if "structured_outputs" in way else {"max_tokens": 8, "ignore_eos": True}
        turns.append({"prompt": prompt, "job_id": f"job{number}", **length, **way})
    return turns


def _sampling(body: dict[str, Any]) -> SamplingParams:
    fields = {name: value for name, value in body.items() if name not in ("prompt", "job_id")}
    constraint = fields.pop("structured_outputs", None)
    if constraint is not None:
        fields["structured_outputs"] = StructuredOutputsParams(**constraint)
    return SamplingParams(**fields)


class CombinedRounds(Rounds):
    """Rounds in which some clients disconnect, and some need their answers soon."""

    def ask(self, to: Operated, *, must: bool, count: int = 6) -> None:
        left = [self.pool.submit(_leave, to, self._question()) for _ in range(2)]
        question = self._question()
        late = self.pool.submit(_late, to, question)
        super().ask(to, must=must, count=count)
        for each in left:
            each.result()
        if late.result().status_code != 504:  # it was in time
            to.check(question, None, late.result(), must=must)


def _leave(to: Operated, question: int) -> None:
    """A client that disconnects after the first bytes of its answer."""
    body = {**to.world.body(question), "model": "tiny", "stream": True}
    with to.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw(), None)


def _late(to: Operated, question: int) -> httpx.Response:
    """A client that needs its answer sooner than most arrive."""
    return to.ask(question, None, deadline_s=0.05)


def play(
    setting: Setting, base: Path, num_rounds: int, random: Random, say: Callable[[str], None] = print
) -> Counter[str]:
    """Plays this many rounds on one server. Raises AssertionError at the first wrong answer, and ServerEnded
    if the server rejects the setting."""
    with ExitStack() as closing:
        world = AloneWorld(base, random, setting, closing)
        pool = closing.enter_context(ThreadPoolExecutor(10))
        server = closing.enter_context(
            running_server(world.folders[0], *setting.serve_flags, log=base / "log")
        )
        to = Operated(server, world, world.folders[0], setting.num_cores)
        closing.callback(to.close)
        rounds = CombinedRounds(world, random, pool)
        for _ in range(num_rounds):
            rounds.ask(to, must=True)
            changed = rounds.change(to)
            rounds.counts[changed] += 1
            say(f"  {changed}")
        rounds.ask(to, must=True)
        return rounds.counts


def play_draw(seed: int, num_rounds: int, say: Callable[[str], None] = print) -> Counter[str]:
    """Plays a setting of this seed. AssertionError for a wrong answer or an unexplained rejection."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        setting = draw(random, base)
        say(f"seed {seed}, {setting}")
        try:
            return play(setting, base, num_rounds, random, say)
        except ServerEnded as error:
            reason = _reason(error.code, (base / "log").read_text())
            say(f"  rejected: {reason}")
            return Counter({"rejected": 1})
        except BaseException:
            log = (base / "log").read_text() if (base / "log").exists() else ""
            print(f"seed {seed}, {setting}\n{log[-3000:]}", file=sys.stderr)
            raise


def _reason(code: int, log: str) -> str:
    """Returns why a server has rejected its flags."""
    reason = log.strip().rpartition("\n")[2]
    assert code == 2, log
    assert reason.startswith("continuum: "), log
    return reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="servers to start (default: 20)")
    parser.add_argument("--rounds", type=int, default=6, help="operators' calls for each (default: 6)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first draw; +1 for each (default: 1)"
    )
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.draws):
        counts += play_draw(seed, options.rounds)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
