"""Checks that answers stay those of the loaded weights whatever operators do: ``python -m
tests.reliability.operators --setting shared --rounds 200 --seed 1``. Prints its actions, and exits with 1 at
the first wrong answer.

``shared``: a group of two engine cores that saves its KV in a folder, which a server of other weights shares.
``pair``: a server that computes prompts for a group of two engine cores; weights are loaded separately.

A round is a call of an operator or the kill of a core, with requests during it and after it. During a kill a
request may fail; an answer must be that of transformers for the loaded weights, and after the round every
request must be answered.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.processes.event_subscriber import free_ports
from tests.worker.generation import Reference
from tests.worker.lora.made_adapters import AdaptedReference, save_adapter

FLAGS = ("--num-gpu-blocks-override", "120", "--max-model-len", "480", "--device", "cpu")
SQLITE = "tests.reliability.sqlite_store"
LORA = ("--enable-lora", "--max-loras", "2")
GROUP = ("--data-parallel-size", "2")
ORDER = {"do_remote_decode": True, "do_remote_prefill": False}
NUM_TOKENS = 6
UP_WITHIN_S = 120.0
MOST_KILLS = 8
"""The limit of kills per minute: after ten a core is not restarted."""


class World:
    """Folders of weights and adapters, questions, and the right answers."""

    folders: list[Path]
    adapters: list[Path]
    num_questions: int

    def route(self, question: int) -> str:
        """Where it is asked."""
        return "/v1/completions"

    def body(self, question: int) -> dict[str, Any]:
        """Fields of the request's body."""
        raise NotImplementedError

    def check(self, weights: Path, adapter: Path | None, question: int, answer: dict[str, Any]) -> None:
        """Raises AssertionError if this is not the answer to the question alone."""
        raise NotImplementedError


class GreedyWorld(World):
    """Greedy answers of one small model, compared with those of transformers."""

    num_questions = 8

    def __init__(self, base: Path, random: Random) -> None:
        self.folders = [make_model_folder(base / name, seed=seed) for seed, name in enumerate(("old", "new"))]
        self.adapters = [save_adapter(self.folders[0], base / f"adapter{seed}", seed) for seed in (0, 1)]
        shared = [random.randrange(5, 250) for _ in range(96)]
        self.prompts = [
            [*shared[: random.choice((0, 48, 96))], *(random.randrange(5, 250) for _ in range(70))]
            for _ in range(self.num_questions)
        ]
        self._references: dict[tuple[Path, Path | None], Any] = {}
        self._answers: dict[tuple[Path, Path | None, int], list[int]] = {}

    def body(self, question: int) -> dict[str, Any]:
        return {
            "prompt": self.prompts[question],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }

    def check(self, weights: Path, adapter: Path | None, question: int, answer: dict[str, Any]) -> None:
        expected = self._answer(weights, adapter, question)
        got = answer["choices"][0]["token_ids"]
        assert got == expected, f"question {question}: {got} instead of {expected}, {weights.name}"

    def _answer(self, weights: Path, adapter: Path | None, prompt: int) -> list[int]:
        """The tokens that transformers generates for the prompt alone."""
        loaded = weights, adapter
        if (*loaded, prompt) not in self._answers:
            if loaded not in self._references:
                plain = adapter is None
                self._references[loaded] = Reference(weights) if plain else AdaptedReference(weights, adapter)
            told = self._references[loaded].greedy(self.prompts[prompt], NUM_TOKENS)
            self._answers[*loaded, prompt] = told
        return self._answers[*loaded, prompt]


class Rejected(Exception):
    """The server does not offer this call."""


class Operated:
    """A server, and the state that operators have put it in."""

    def __init__(self, start: Callable[[], Server], world: World, weights: Path, num_cores: int) -> None:
        """``start`` starts the server, with these weights; it is called again after each stop."""
        self._start = start
        self.world = world
        self.num_cores = num_cores
        self._first_weights = weights
        self.begin()

    def begin(self) -> None:
        """Starts the server, as operators have not changed it yet."""
        self.server = self._start()
        self.weights = self._first_weights
        self.adapter: Path | None = None
        self._killed: list[float] = []
        self.http = httpx.Client(base_url=self.server.url, timeout=120)

    def stop(self) -> None:
        """Stops the server as a supervisor does."""
        self.server.process.terminate()
        assert self.server.wait(60) == 0
        self.close()

    def close(self) -> None:
        self.http.close()

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def call(self, route: str, **body: Any) -> None:
        """Raises AssertionError unless the call succeeds, and Rejected if the server does not offer it."""
        answer = self.post(route, **body)
        if answer.status_code == 400:
            raise Rejected(answer.text)
        assert answer.status_code == 200, (route, answer.status_code, answer.text)

    def ask(self, question: int, adapter: Path | None, **more: Any) -> httpx.Response:
        model = "tiny" if adapter is None else "changing"
        body = {"model": model, "return_token_ids": True, **self.world.body(question), **more}
        return self.post(self.world.route(question), **body)

    def check(self, question: int, adapter: Path | None, answer: httpx.Response, *, must: bool) -> bool:
        """Whether it was answered; AssertionError for a wrong answer, or a missing one that ``must`` come."""
        if answer.status_code != 200:
            assert not must, (answer.status_code, answer.text)
            return False
        self.world.check(self.weights, adapter, question, answer.json())
        return True

    def kill_one(self, random: Random) -> None:
        """Kills a core of a group (a single core's server would end), but not so often that it stays down."""
        now = time.monotonic()
        self._killed = [when for when in self._killed if now - when < 65]
        if self.num_cores > 1 and len(self._killed) < MOST_KILLS:
            self._killed.append(now)
            os.kill(random.choice(self.server.core_pids()), signal.SIGKILL)

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + UP_WITHIN_S
        while not self._is_up():
            assert time.monotonic() < deadline, "a core did not come back"
            time.sleep(0.05)

    def _is_up(self) -> bool:
        if len(self.server.core_pids()) != self.num_cores:
            return False
        if self.num_cores == 1:
            return self.http.get("/health").status_code == 200
        return all(each["state"] == "up" for each in self.http.get("/engines").json()["data"])


class Rounds:
    """Draws actions, and checks answers."""

    def __init__(self, world: World, random: Random, pool: ThreadPoolExecutor) -> None:
        self.world = world
        self.random = random
        self.pool = pool
        self.counts: Counter[str] = Counter()

    def ask(self, to: Operated, *, must: bool, count: int = 4) -> None:
        """Sends some requests at once, a part of them with the adapter if there is one."""
        asked = [(self._question(), self.random.choice((None, to.adapter))) for _ in range(count)]
        answers = list(self.pool.map(lambda each: to.ask(*each), asked))
        for (prompt, adapter), answer in zip(asked, answers, strict=True):
            self.counts["answered"] += to.check(prompt, adapter, answer, must=must)

    def _question(self) -> int:
        return self.random.randrange(self.world.num_questions)

    def hand_over(self, first: Operated, second: Operated, *, must: bool) -> None:
        """Does what a proxy does; the second server uses its own weights, whatever the first one's."""
        prompt = self.random.choice([each for each in range(self.world.num_questions) if self._is_one(each)])
        answer = first.ask(prompt, None, kv_transfer_params=ORDER)
        if answer.status_code != 200:
            assert not must, answer.text
            return
        params = answer.json().get("kv_transfer_params")
        answer = second.ask(prompt, None, kv_transfer_params=params)
        self.counts["handed over"] += second.check(prompt, None, answer, must=must)

    def _is_one(self, question: int) -> bool:
        """Whether it asks for one answer: several cannot be handed over."""
        body = self.world.body(question)
        return bool(body.get("sampling_params", body).get("n", 1) == 1)

    def change(self, to: Operated) -> str:
        """Makes one call of an operator, or a kill, or both, with requests during it."""
        without = {"adapter"} if not self.world.adapters else set[str]()
        if to.num_cores == 1:
            without.add("drain")
        names = [name for name in CHANGES if name not in without]
        name = self.random.choice(names)
        try:
            CHANGES[name](self, to)
        except Rejected as error:
            return f"{name}, rejected: {error}"
        return name


def _update(rounds: Rounds, to: Operated) -> None:
    weights = rounds.random.choice(rounds.world.folders)
    to.call("/update_weights", path=str(weights))
    to.weights = weights


def _sleep(rounds: Rounds, to: Operated) -> None:
    """Requests that arrive during the sleep are answered after it; a core may be killed in the sleep."""
    to.call(f"/sleep?level={rounds.random.choice((1, 2))}")
    asked = [(prompt, rounds.pool.submit(to.ask, prompt, None)) for prompt in range(3)]
    killed = rounds.random.random() < 0.3
    if killed:
        to.kill_one(rounds.random)
        to.wait_until_up()
    to.call("/wake_up")
    for prompt, answer in asked:
        to.check(prompt, None, answer.result(), must=not killed)


def _pause(rounds: Rounds, to: Operated) -> None:
    to.call("/pause")
    asked = [(prompt, rounds.pool.submit(to.ask, prompt, None)) for prompt in range(3)]
    try:
        if rounds.random.random() < 0.3:
            _update(rounds, to)
    finally:
        to.call("/resume")
    for prompt, answer in asked:
        to.check(prompt, None, answer.result(), must=True)


def _kill(rounds: Rounds, to: Operated) -> None:
    """Running requests may fail; answers must be right."""
    asked = [(prompt, rounds.pool.submit(to.ask, prompt, None)) for prompt in range(4)]
    to.kill_one(rounds.random)
    for prompt, answer in asked:
        to.check(prompt, None, answer.result(), must=False)
    to.wait_until_up()


def _kill_and_update(rounds: Rounds, to: Operated) -> None:
    """Updates weights while a core restarts: the update is refused, or reaches all cores."""
    to.kill_one(rounds.random)
    wanted = rounds.random.choice(rounds.world.folders)
    answer = to.post("/update_weights", path=str(wanted))
    assert answer.status_code < 600
    if answer.status_code == 200:
        to.weights = wanted
    to.wait_until_up()


def _adapter(rounds: Rounds, to: Operated) -> None:
    """Loads the adapter, replaces it in place, or unloads it."""
    if to.adapter is not None and rounds.random.random() < 0.4:
        to.call("/v1/unload_lora_adapter", lora_name="changing")
        to.adapter = None
        return
    path = rounds.random.choice(rounds.world.adapters)
    in_place = {"load_inplace": True} if to.adapter is not None else {}
    to.call("/v1/load_lora_adapter", lora_name="changing", lora_path=str(path), **in_place)
    to.adapter = path


def _drain_server(rounds: Rounds, to: Operated) -> None:
    """Requests may be refused, also by a core that comes meanwhile; those that are answered are right."""
    asked = [(prompt, rounds.pool.submit(to.ask, prompt, None)) for prompt in range(3)]
    to.call(f"/drain?deadline_s={rounds.random.choice((0, 1))}&wait=true")
    for prompt, answer in asked:
        to.check(prompt, None, answer.result(), must=False)
    if rounds.random.random() < 0.3:
        to.kill_one(rounds.random)
        to.wait_until_up()
    assert to.ask(0, None).status_code == 503
    to.call("/drain?off=true")


def _drain(rounds: Rounds, to: Operated) -> None:
    """Drains a core of a group, which hands its jobs over, and uses it again; it may be killed meanwhile."""
    core = rounds.random.randrange(to.num_cores)
    asked = [(prompt, rounds.pool.submit(to.ask, prompt, None)) for prompt in range(3)]
    killed = rounds.random.random() < 0.3
    if killed:
        to.call(f"/drain?engine={core}")
        to.kill_one(rounds.random)
    else:
        to.call(f"/drain?engine={core}&deadline_s={rounds.random.choice((0, 1))}&wait=true")
    for prompt, answer in asked:
        to.check(prompt, None, answer.result(), must=not killed)
    rounds.ask(to, must=not killed)
    to.call(f"/drain?engine={core}&off=true")
    to.wait_until_up()


def _restart(rounds: Rounds, to: Operated) -> None:
    """Stops the server while it answers, and starts it again; it may find what its jobs have left."""
    asked = [(prompt, rounds.pool.submit(to.ask, prompt, None)) for prompt in range(3)]
    weights = to.weights
    to.stop()
    for prompt, answer in asked:
        with suppress(httpx.TransportError):  # its connection was not accepted any more
            got = answer.result()
            if got.status_code == 200:
                to.world.check(weights, None, prompt, got.json())
    to.begin()


def _reset(rounds: Rounds, to: Operated) -> None:
    to.post("/reset_prefix_cache")


CHANGES: dict[str, Callable[[Rounds, Operated], None]] = {
    "other weights": _update,
    "sleep": _sleep,
    "pause": _pause,
    "kill": _kill,
    "kill and other weights": _kill_and_update,
    "adapter": _adapter,
    "reset": _reset,
    "drain": _drain,
    "drain of the server": _drain_server,
    "restart": _restart,
}


def transfer(connector: str, role: str, **more: Any) -> tuple[str, str]:
    config = {"kv_connector": connector, "kv_role": role, **more}
    return "--kv-transfer-config", json.dumps(config)


def kept_in(connector: str, options: dict[str, Any]) -> tuple[str, str]:
    """Flags of a server that keeps KV in a folder, or in a store."""
    module = {} if connector == "SharedStorageConnector" else {"kv_connector_module_path": SQLITE}
    return transfer(connector, "kv_both", kv_connector_extra_config=options, **module)


def _started(running: ExitStack, weights: Path, flags: tuple[str, ...]) -> Server:
    return running.enter_context(running_server(weights, *flags))


@contextmanager
def operated(setting: str, world: World, base: Path) -> Iterator[list[Operated]]:
    """Starts the servers of a setting: another one, and the group."""
    old, new = world.folders
    if setting == "shared":
        kv = transfer(
            "SharedStorageConnector",
            "kv_both",
            kv_connector_extra_config={"shared_storage_path": str(base / "kv")},
        )
        starts = [(new, 1, (*FLAGS, *LORA, *kv)), (old, 2, (*FLAGS, *GROUP, *LORA, *kv))]
    else:
        extra = {"allowed_ports": ["1024-65535"]}
        first, second = (
            transfer("TCPConnector", role, kv_port=port, kv_connector_extra_config=extra)
            for role, port in zip(("kv_producer", "kv_consumer"), free_ports(2), strict=True)
        )
        starts = [(old, 1, (*FLAGS, *LORA, *first)), (old, 2, (*FLAGS, *GROUP, *LORA, *second))]
    with ExitStack() as running:
        servers = [
            Operated(
                partial(_started, running, weights, flags),
                world,
                weights,
                num_cores,
            )
            for weights, num_cores, flags in starts
        ]
        for server in servers:
            running.callback(server.close)
        yield servers


def play(setting: str, num_rounds: int, seed: int, say: Callable[[str], None] = print) -> Counter[str]:
    """Plays a number of rounds; AssertionError, which names the round, at the first wrong answer."""
    random = Random(seed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, ThreadPoolExecutor(8) as pool:
        world = GreedyWorld(Path(name), random)
        rounds = Rounds(world, random, pool)
        with operated(setting, world, Path(name)) as servers:
            for number in range(num_rounds):
                to = random.choice([*servers, servers[-1]])
                changed = rounds.change(to)
                rounds.counts[changed] += 1
                say(f"{number}: {changed}, {'the group' if to is servers[-1] else 'the other server'}")
                for each in servers:
                    rounds.ask(each, must=True)
                if setting == "pair":
                    rounds.hand_over(servers[0], servers[1], must=True)
    return rounds.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--setting", choices=("shared", "pair"), default="shared")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts = play(options.setting, options.rounds, options.seed)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
