"""``make bench-front``: measures API server time for a turn of a long chat before it calls the core, by part.

One thread, no sockets, no core. The chat grows from turn to turn, as an agent's does.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from engine.api.endpoints import parse_body
from engine.api.openai.protocol import ChatCompletionRequest
from engine.api.prompt.chat_messages import normalize
from engine.config.engine_config import ModelConfig
from engine.core_process.continued_prompts import as_written
from engine.frontend.input_processor import GenerationDefaults, InputProcessor
from engine.process.trim import finish_startup
from engine.records.messages import EngineReady
from engine.tokenization.tokenizer import Tokenizer
from engine.worker.loading.tiny_models import make_model_folder

VOCAB_SIZE = 2048
CHARACTERS_PER_TOKEN = 3.46
"""Characters per token of the tokenizer made here on these texts; usual ones, with more words, have about
4."""
READ_MESSAGE = "the body is read and checked"
PLAIN = "its messages are made plain"
TEMPLATE = "the chat template writes the text"
TOKENS = "the text is tokenized"
REQUEST = "the request is checked and completed"
WRITE = "it is written down for the core"
TOTAL = "all of it"
AT_ONCE = "template and tokens by transformers"


@dataclass(slots=True)
class Times:
    """Seconds of each part, turn by turn."""

    of: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self.of.setdefault(part, []).append(perf_counter() - began)

    def lines(self) -> Iterator[str]:
        yield f"{'milliseconds':<40} {'first turn':>10}   {'median':>8} {'min':>8} {'max':>8}"
        for part, (first, *others) in self.of.items():
            low = min(others)
            middle = statistics.median(others)
            high = max(others)
            yield f"{part:<40} {first * 1e3:>10.2f}   " + " ".join(
                f"{seconds * 1e3:>8.2f}" for seconds in (middle, low, high)
            )


class Chat:
    """An agent's chat: calls of a tool and their output, which is Python's own source."""

    def __init__(self, num_messages: int, characters_per_message: int) -> None:
        self._source = Path(subprocess.__file__).read_text() + Path(argparse.__file__).read_text()
        self._position = 0
        self._characters_per_message = characters_per_message
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._text(characters_per_message)},
            {"role": "user", "content": self._text(characters_per_message)},
        ]
        while len(self.messages) < num_messages:
            self.go_on()

    def go_on(self) -> None:
        """Adds one call and its result."""
        call_id = f"call-{len(self.messages)}"
        arguments = json.dumps({"command": self._text(100), "timeout_s": 30})
        call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
        result = self._text(2 * self._characters_per_message - 400)  # the rest is the call, and its markup
        self.messages += [
            {"role": "assistant", "content": self._text(200), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]

    def body(self) -> bytes:
        """Returns the request for the next reply."""
        tools = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": f"Runs {name} in the working directory and gives back what it prints.",
                    "parameters": {
                        "type": "object",
                        "properties": {"command": {"type": "string"}, "timeout_s": {"type": "integer"}},
                    },
                },
            }
            for name in ("bash", "edit", "search", "fetch")
        ]
        return json.dumps({"messages": self.messages, "tools": tools, "stream": True}).encode()

    def _text(self, num_characters: int) -> str:
        """Returns as many characters of the source, from where the last text ended."""
        self._position = (self._position + num_characters) % (len(self._source) - num_characters)
        return self._source[self._position : self._position + num_characters]


class APIServer:
    """The work between a body and the bytes for the core, in the order in which a server does it."""

    def __init__(self, model: Path) -> None:
        config = ModelConfig(model=str(model))
        self.tokenizer = Tokenizer.load(config)
        ready = EngineReady(
            num_gpu_blocks=1, max_model_len=2**22, block_size=16, vocab_size=VOCAB_SIZE, dtype="float32"
        )
        self._defaults = GenerationDefaults.load(config)
        self._inputs = InputProcessor(self.tokenizer, ready, self._defaults)
        self._encode = msgspec.msgpack.Encoder().encode

    def prepare(self, body: bytes, times: Times) -> list[int]:
        """Returns the prompt and times its parts."""
        with times.measured(TOTAL):
            with times.measured(READ_MESSAGE):
                request = parse_body(ChatCompletionRequest, body)
                params = request.sampling_params(self._defaults.sampling_params(), request.num_logprobs())
            with times.measured(PLAIN):
                messages = normalize(request.messages)
            with times.measured(TEMPLATE):
                text = self.tokenizer.chat_text(messages, request.tools)
            with times.measured(TOKENS):
                prompt = self.tokenizer.encode(text, add_special_tokens=False)
            with times.measured(REQUEST):
                core_request = self._inputs.process("chat", prompt, params, arrival_time=0.0)
            with times.measured(WRITE):
                self._encode(as_written(core_request))
        return prompt

    def by_transformers(self, body: bytes, times: Times) -> list[int]:
        """Returns the same prompt, rendered and tokenized by the library alone."""
        request = json.loads(body)
        messages = normalize(request["messages"])
        hf = self.tokenizer.hf
        with times.measured(AT_ONCE):
            text = hf.apply_chat_template(
                messages, tools=request["tools"], add_generation_prompt=True, tokenize=False
            )
            prompt: list[int] = hf.encode(text, add_special_tokens=False, verbose=False)
        return prompt


def measure(chat: Chat, api_server: APIServer, num_turns: int) -> Iterator[str]:
    """Yields the report; AssertionError if a prompt differs from the library's."""
    times = Times()
    for number in range(num_turns + 1):
        body = chat.body()
        prompt = api_server.prepare(body, times)
        if number in (0, num_turns // 2, num_turns):
            assert prompt == api_server.by_transformers(body, times)
        if number == num_turns // 2:
            yield (
                f"{len(chat.messages)} messages, {len(body):,} bytes, {len(prompt):,} tokens "
                f"at turn {number} of {num_turns}, each of which adds 2 messages"
            )
            yield ""
        chat.go_on()
    yield from times.lines()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-front", description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of the chat half-way, about (100000)")
    parser.add_argument("--messages", type=int, default=200, help="of it, half-way (200)")
    parser.add_argument("--turns", type=int, default=30, help="that are measured (30)")
    args = parser.parse_args(argv)
    if args.turns < 4 or args.messages < args.turns + 2 or args.tokens < 100 * args.messages:
        parser.error(
            "--turns must be at least 4, --messages at least 2 more, --tokens at least 100 for each message"
        )
    with tempfile.TemporaryDirectory(prefix="api-server-") as name:
        api_server = APIServer(make_model_folder(Path(name), vocab_size=VOCAB_SIZE))
        chat = Chat(args.messages - args.turns, int(args.tokens * CHARACTERS_PER_TOKEN) // args.messages)
        finish_startup()  # as the server does when it has started
        for line in measure(chat, api_server, args.turns):
            print(line)
        gc.unfreeze()  # some libraries mistake frozen objects for leaks, and say so
    return 0


if __name__ == "__main__":
    sys.exit(main())
