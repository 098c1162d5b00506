"""Checks that features work together.

``python -m tests.reliability.combinations --draws 20 --seed 1`` starts servers of random model families with
random features: quantization, drafts, adapters, tiers, saved KV, several cores, ranks or stages, pictures and
clips, a second server that computes prompts for the first. Operators change them at random (``operators.py``)
while they answer greedy, sampled, constrained and repeated requests with shared prefixes in too few blocks;
some clients disconnect early. Each answer must equal that of an engine without these features for the request
alone, with the currently loaded weights and adapter.

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import httpx

from continuum.cli.serve_args import engine_config
from continuum.cli.serve_flags import add_serve_arguments
from engine.errors import ConfigError
from tests.api.server import Server, ServerEnded, running_server
from tests.processes.event_subscriber import free_ports
from tests.reliability.operators import Operated, Rounds, kept_in, transfer
from tests.reliability.questions import MAX_MODEL_LEN, MEDIA_FAMILIES, AloneWorld

FAMILIES = (
    *("llama", "qwen3", "mistral-window", "gemma3", "qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss"),
    *("llama4", "qwen3-next", "granite4", "minimax-m2", "olmo3", "glm4-moe-lite", "nemotron-h", "lfm2"),
    *("deepseek-v3.2", "ministral3", "olmo-hybrid", "falcon-h1", "jamba"),
    *MEDIA_FAMILIES,
)
WITH_ADAPTERS = ("llama", "qwen3", "mistral-window", "gemma3")
"""Families whose layers peft can all adapt."""
COMMON = ("--max-model-len", str(MAX_MODEL_LEN), "--device", "cpu")
SPREADS = ("--data-parallel-size", "--tensor-parallel-size", "--pipeline-parallel-size")


@dataclass(frozen=True, slots=True)
class Setting:
    """A randomly drawn server."""

    family: str
    quantization: str | None
    has_adapters: bool
    num_cores: int
    flags: tuple[str, ...]
    computes_for: tuple[str, ...] = ()
    """Flags of a second server that computes prompts for this one; empty without it."""

    @property
    def serve_flags(self) -> tuple[str, ...]:
        return (*COMMON, *self.flags)

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
    engine_config(parser.parse_args(["model", *COMMON, *setting.computes_for]))


def _draw(random: Random, folder: Path) -> Setting:
    def some(chance: float, *flags: str) -> tuple[str, ...]:
        return flags if random.random() < chance else ()

    family = random.choice(FAMILIES)
    quantization = random.choice((None, None, None, "int8", "int4"))
    has_adapters = family in WITH_ADAPTERS and random.random() < 0.5
    drafts = random.choice((None, None, "ngram", "suffix", "grammar"))
    spread = random.choice((None, None, *SPREADS))
    drafting = json.dumps({"method": drafts, "weigh_costs": False})
    kept = random.choice(
        (
            ("SharedStorageConnector", {"shared_storage_path": str(folder / "kv")}),
            ("SqliteStore", {"file": str(folder / "kv.sqlite")}),
        )
    )
    features = (
        () if quantization is None else ("--quantization", quantization),
        ("--enable-lora", "--max-loras", "2") if has_adapters else (),
        () if drafts is None else ("--speculative-config", drafting),
        () if spread is None else (spread, "2"),
        some(0.4, "--kv-offloading-size", "0.01"),
        some(0.3, *kept_in(*kept)),
        some(0.4, "--kv-handover-path", str(folder / "paused")),
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
    setting = Setting(
        family=family,
        quantization=quantization,
        has_adapters=has_adapters,
        num_cores=2 if spread == SPREADS[0] else 1,
        flags=sum(features, ()),
    )
    return _in_pair(setting) if random.random() < 0.2 else setting


def _in_pair(setting: Setting) -> Setting:
    """The same, and a second server that computes prompts for it."""
    if "--kv-transfer-config" in setting.flags:
        return setting
    allowed = {"kv_connector_extra_config": {"allowed_ports": ["1024-65535"]}}
    producer, consumer = (
        transfer("TCPConnector", role, kv_port=port, **allowed)
        for role, port in zip(("kv_producer", "kv_consumer"), free_ports(2), strict=True)
    )
    alike = () if setting.quantization is None else ("--quantization", setting.quantization)
    blocks = ("--num-gpu-blocks-override", "120")
    return replace(setting, flags=(*setting.flags, *consumer), computes_for=(*alike, *blocks, *producer))


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
    with to.http.stream("POST", to.world.route(question), json=body) as answer:
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
        world = AloneWorld(
            base,
            random,
            setting.family,
            setting.quantization,
            has_adapters=setting.has_adapters,
            closing=closing,
        )
        pool = closing.enter_context(ThreadPoolExecutor(10))
        flags = [(setting.serve_flags, setting.num_cores)]
        if setting.computes_for:
            flags.append(((*COMMON, *setting.computes_for), 1))
        servers = []
        for number, (each, num_cores) in enumerate(flags):
            log = base / ("log" if number == 0 else "log of the other")
            start = partial(_started, closing, world.folders[0], each, log)
            servers.append(Operated(start, world, world.folders[0], num_cores))
            closing.callback(servers[-1].close)
        to, *others = servers
        rounds = CombinedRounds(world, random, pool)
        for _ in range(num_rounds):
            rounds.ask(to, must=True)
            for other in others:
                rounds.hand_over(other, to, must=True)
            changed = rounds.change(to)
            rounds.counts[changed] += 1
            say(f"  {changed}")
        rounds.ask(to, must=True)
        return rounds.counts


def _started(closing: ExitStack, folder: Path, flags: tuple[str, ...], log: Path) -> Server:
    return closing.enter_context(running_server(folder, *flags, log=log))


def play_draw(seed: int, num_rounds: int, say: Callable[[str], None] = print) -> Counter[str]:
    """Plays a setting of this seed. AssertionError for a wrong answer or an unexplained rejection."""
    random = Random(seed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
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
