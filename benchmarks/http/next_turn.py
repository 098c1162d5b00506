"""``make bench-turn``: measures CPU time of the next turn of a long job in the API server and the core.

A job of /v1/responses goes on by ``previous_response_id``, once appended to the turn before and once
rendered, sent and hashed as a whole. The web application and the scheduler are real; between them are the
bytes that a socket would carry, and the model's tokens are made up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
from fastapi import FastAPI

from benchmarks.http.frontend_bench import CHARACTERS_PER_TOKEN, VOCAB_SIZE, Chat
from benchmarks.scheduler.step_bench import BLOCK_SIZE, POLICIES
from engine.api.app import create_app
from engine.api.config import ServerConfig
from engine.api.openai_responses.known_turns import KnownTurns
from engine.api.service.server import Server
from engine.config.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from engine.core.outputs import ModelRunnerOutput
from engine.core.policy import PolicyContext, PolicyFactory
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core_process.client_protocols import Delivery, EngineState
from engine.core_process.continued_prompts import ContinuedPrompts
from engine.core_process.core_parts import check_request
from engine.core_process.kept_turns import KeptTurns
from engine.frontend.async_llm import AsyncLLM
from engine.process.trim import finish_startup
from engine.records.handed_over import HandedOver
from engine.records.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady, Signal, TurnReceipt
from engine.worker.loading.tiny_models import make_model_folder

MAX_MODEL_LEN = 2**20
NUM_BLOCKS = 40_000
STEP_S = 0.02
Samples = defaultdict[str, list[float]]


class Times:
    """CPU seconds of each part, turn by turn."""

    def __init__(self) -> None:
        self.of: Samples = defaultdict(list)

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        began = process_time()
        yield
        self.of[part].append(process_time() - began)


class Core:
    """A core without a process: takes a request's bytes, and runs the request to its end."""

    def __init__(self, policy: PolicyFactory, ready: EngineReady) -> None:
        self.times = Times()
        self._ready = ready
        self._kept = KeptTurns(NUM_BLOCKS * BLOCK_SIZE, BLOCK_SIZE)
        self._decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._encode = msgspec.msgpack.Encoder().encode
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=8192),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            policy=policy(PolicyContext(BLOCK_SIZE, NUM_BLOCKS - 1)),
            on_request_ended=self._kept.request_ended,
        )
        self.now = 0.0

    def run(self, payload: bytes, reply: list[int]) -> EngineCoreOutputs:
        """Returns the outputs of one request, all in one message."""
        scheduler = self._scheduler
        outputs = EngineCoreOutputs()
        with self.times.measured("the request is read and queued"):
            message = self._decoder.decode(payload)
            check_request(message, self._ready)
            before = None if message.continues is None else self._kept.take(message.continues)
            assert message.continues is None or before is not None, "the core has forgotten the turn"
            request = Request.from_core_request(message, scheduler.request_block_hasher, before)
            scheduler.add_request(request, self.now)
        said = iter(reply)
        part = "its first step is planned, and its output taken"
        while scheduler.has_unfinished_requests():
            self.now += STEP_S
            with self.times.measured(part):
                plan = scheduler.schedule(self.now)
            is_known = request.num_computed_tokens >= request.num_tokens
            tokens = [next(said)] if is_known else []
            result = ModelRunnerOutput(req_ids=[request.request_id], sampled_token_ids=[tokens])
            began = process_time()
            outputs.outputs += scheduler.update_from_output(plan, result, self.now)
            took_s = process_time() - began
            if not scheduler.has_unfinished_requests():
                self.times.of["its last output is taken, and its KV kept"].append(took_s)
            part = "each step between"
        return outputs

    def signal(self, signal: Signal) -> TurnReceipt | None:
        return self._scheduler.signal(signal, self.now)


class CoreClient:
    """An ``AsyncCoreClient`` of such a core: encodes the messages; the event loop runs the answers."""

    pid = 0
    dead = False

    def __init__(self, core: Core, ready: EngineReady) -> None:
        self.ready = ready
        self.reply = list[int]()
        self.num_bytes = 0
        self.sent_s = 0.0
        self._core = core
        self._continued = ContinuedPrompts()
        self._deliver: Callable[[Delivery], None] = lambda delivery: None

    def await_ready(self) -> EngineReady:
        return self.ready

    def attach(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None]) -> None:
        self._loop = loop
        self._deliver = deliver

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            payload = msgspec.msgpack.encode(self._continued.to_send(request))
            self.num_bytes = len(payload)
            self.sent_s = process_time()
            self._loop.call_soon(self._run, payload)

    def _run(self, payload: bytes) -> None:
        with self._core.times.measured("all of the core"):
            outputs = self._core.run(payload, self.reply)
        self._continued.answered(outputs.outputs)
        self._deliver(outputs)

    def abort_requests(self, request_ids: list[str], *, stopped: bool = False) -> None:
        raise AssertionError("no request is aborted")

    async def call_utility(self, method: str, *args: object) -> Any:
        raise AssertionError("no utility is called")

    def operating(self) -> AbstractAsyncContextManager[None]:
        raise AssertionError("nobody operates")

    async def signal(self, signal: Signal) -> TurnReceipt | None:
        with self._core.times.measured("all of the core"):
            return self._core.signal(signal)

    def tell(self, signal: Signal) -> None:
        self._core.signal(signal)

    async def engine_states(self) -> list[EngineState]:
        return []

    def drain(self, engine: int, deadline_s: float) -> asyncio.Task[HandedOver | None]:
        raise NotImplementedError

    async def end_drain(self, engine: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Bench:
    """One server, and a job from its first turn to its last."""

    def __init__(self, model: Path, policy: PolicyFactory) -> None:
        config = EngineConfig(model=ModelConfig(model=str(model)))
        ready = EngineReady(NUM_BLOCKS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE, "float32", wants_signals=True)
        self.core = Core(policy, ready)
        self._client = CoreClient(self.core, ready)
        self._engine = AsyncLLM(config, self._client)
        self._app = create_app(Server(self._engine, ServerConfig(served_model_names=("made-up",))))
        self._turns = _known_turns(self._app)
        self.front: Samples = defaultdict(list)
        self.num_bytes: list[int] = []
        self.num_tokens = 0
        self._last: dict[str, Any] | None = None

    async def turn(self, chat: Chat, *, whole: bool) -> None:
        """Runs one more turn. ``whole``: as if the tokens of the turn before were not known."""
        if whole:
            self._turns.forget_all()
        chat.go_on()
        said, result = chat.messages[-2:]
        call = said["tool_calls"][0]["function"]
        text = f"{said['content']}\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
        self._client.reply = self._engine.tokenizer.encode(text, add_special_tokens=False)
        body: dict[str, Any] = {"model": "made-up", "tools": TOOLS, "temperature": 0.0, "job_id": "job"}
        if self._last is None:
            body["input"] = [{"role": "user", "content": chat.messages[1]["content"]}]
        else:
            body["previous_response_id"] = self._last["id"]
            calls = [item for item in self._last["output"] if item["type"] == "function_call"]
            body["input"] = [
                {"type": "function_call_output", "call_id": each["call_id"], "output": result["content"]}
                for each in calls
            ]
        core_before = sum(self.core.times.of["all of the core"])
        began = process_time()
        self._last = await self._post(json.dumps(body).encode())
        ended = process_time()
        core_s = sum(self.core.times.of["all of the core"]) - core_before
        self.front["the API server, until it sends the request"].append(self._client.sent_s - began)
        self.front["the API server, from the reply's tokens on"].append(ended - self._client.sent_s - core_s)
        self.num_bytes.append(self._client.num_bytes)
        self.core.now += 1.0
        self.num_tokens = self._last["usage"]["input_tokens"]

    async def _post(self, body: bytes) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/responses",
            "raw_path": b"/v1/responses",
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }
        sent: list[dict[str, Any]] = []
        incoming = iter([{"type": "http.request", "body": body, "more_body": False}])
        done = asyncio.Event()

        async def receive() -> dict[str, Any]:
            message = next(incoming, None)
            if message is None:
                await done.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        done.set()
        assert sent[0]["status"] == 200, sent
        answer: dict[str, Any] = json.loads(b"".join(message.get("body", b"") for message in sent[1:]))
        return answer


TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": f"Runs {name} in the working directory and gives back what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout_s": {"type": "integer"}},
        },
        "strict": False,
    }
    for name in ("bash", "edit", "search", "fetch")
]


def _known_turns(app: Any) -> KnownTurns:
    """Returns the known turns of an application, which is wrapped in middleware."""
    while not isinstance(app, FastAPI):
        app = getattr(app, "app", None) or app._app
    turns: KnownTurns = app.state.response_keeper.turns
    return turns


async def measure(
    model: Path, policy: str, num_tokens: int, num_messages: int, num_turns: int
) -> Iterator[str]:
    """Yields the report for one policy."""
    bench = Bench(model, POLICIES[policy])
    chat = Chat(2, int(num_tokens * CHARACTERS_PER_TOKEN) // num_messages)
    num_tokens_per_turn = 2 * num_tokens // num_messages
    while bench.num_tokens < num_tokens - num_turns * num_tokens_per_turn:
        await bench.turn(chat, whole=False)
    finish_startup()
    medians: dict[str, list[float]] = {}
    sizes: list[float] = []
    for whole in (True, False):
        bench.core.times.of.clear()
        bench.front.clear()
        bench.num_bytes.clear()
        for _ in range(num_turns):
            await bench.turn(chat, whole=whole)
        times = {**bench.front, **bench.core.times.of}
        times["the core, but for the steps between"] = _core_s(bench.core.times.of)
        del times["all of the core"]
        for part, samples in times.items():
            medians.setdefault(part, []).append(statistics.median(samples) * 1e3)
        sizes.append(statistics.median(bench.num_bytes))
    lines = [f"{part:<52} {whole:>10.2f} {appended:>10.2f}" for part, (whole, appended) in medians.items()]
    head = f"{policy}, {bench.num_tokens:,} tokens; milliseconds"
    lines.append(f"{'bytes sent to the core':<52} {sizes[0]:>10,.0f} {sizes[1]:>10,.0f}")
    return iter([f"{head:<52} {'whole':>10} {'appended':>10}", *lines, ""])


def _core_s(of: Samples) -> list[float]:
    parts = [samples for part, samples in of.items() if part not in ("all of the core", "each step between")]
    return [sum(each) for each in zip(*parts, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-turn", description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=100_000, help="of the job where it is measured (100000)"
    )
    parser.add_argument("--messages", type=int, default=400, help="of it there, about (400)")
    parser.add_argument("--turns", type=int, default=15, help="that are measured of each kind (15)")
    args = parser.parse_args(argv)
    if args.turns < 3 or args.messages < 4 or args.tokens < 100 * args.messages:
        parser.error("--turns must be at least 3, --messages at least 4, --tokens 100 for each message")
    with tempfile.TemporaryDirectory(prefix="next-turn-") as name:
        model = make_model_folder(Path(name), vocab_size=VOCAB_SIZE)
        for policy in POLICIES:
            report = measure(model, policy, args.tokens, args.messages, args.turns)
            print("\n".join(asyncio.run(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
