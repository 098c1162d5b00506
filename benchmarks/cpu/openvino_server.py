"""Serves OpenVINO GenAI over HTTP, as a peer of ``make bench-cpu``: the library has no completions server.

    python openvino_server.py IR_FOLDER --port PORT

Run it with an interpreter that has openvino-genai (written for 2026.4); it imports none of our modules. POST
/v1/completions takes one prompt of token ids, max_tokens, ignore_eos and stream, and is greedy.

One thread does all. ``ContinuousBatchingPipeline.step`` holds the GIL, so a second thread could only read and
write between the steps, where the event loop already does.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
from http import HTTPStatus
from typing import Any, cast

import numpy as np
import openvino as ov
import openvino_genai as genai

HEAD_END = b"\r\n\r\n"
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
RUNNING = genai.GenerationStatus.RUNNING
REASONS = {
    genai.GenerationFinishReason.LENGTH: "length",
    genai.GenerationFinishReason.STOP: "stop",
}
UNDECODED = "\N{REPLACEMENT CHARACTER}"


class Refused(Exception):
    """A request that cannot be answered; the message says why."""


class Engine:
    """The pipeline; the event loop steps it for as long as it has work."""

    def __init__(self, folder: str, num_threads: int, cache_gb: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        # For equal precision: by default it keeps its KV in 8 bits.
        properties = {
            "INFERENCE_NUM_THREADS": num_threads,
            "KV_CACHE_PRECISION": ov.Type.bf16,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._request_ids = itertools.count()
        self._running: list[Answer] = []

    def add(self, body: Any, connection: Connection) -> Answer:
        """Begins to answer. Raises Refused, TypeError or OverflowError if a field is invalid."""
        if not isinstance(body, dict):
            raise Refused("the body must be an object")
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not all(type(each) is int for each in prompt):
            raise Refused("prompt must be a list of token ids")
        if body.get("temperature", 0) != 0:
            raise Refused("temperature must be 0")
        config = genai.GenerationConfig()
        config.max_new_tokens = body.get("max_tokens", 16)
        config.ignore_eos = body.get("ignore_eos", False)
        config.do_sample = False
        tokens = ov.Tensor(np.array([prompt], dtype=np.int64))
        try:
            handle = self._pipeline.add_request(next(self._request_ids), tokens, config)
        except RuntimeError as error:
            raise Refused(str(error).strip()) from error
        answer = Answer(handle, connection, len(prompt), bool(body.get("stream")))
        self._running.append(answer)
        if len(self._running) == 1:
            self._step_soon()
        return answer

    def _step_soon(self) -> None:
        # A timer is due after the event loop has read the sockets, so those requests join the step.
        asyncio.get_running_loop().call_later(0, self._step)

    def _step(self) -> None:
        try:
            self._pipeline.step()
        except RuntimeError as error:
            sys.exit(f"the pipeline failed: {error}")
        told = [answer for answer in self._running if answer.read()]
        # Decoding all in one call takes hardly longer than decoding one.
        texts = self._tokenizer.decode([answer.tokens for answer in told]) if told else []
        for answer, text in zip(told, texts, strict=True):
            answer.tell(text)
        self._running = [answer for answer in self._running if answer.is_running]
        if self._running:
            self._step_soon()


class Answer:
    """What one request generates: sent when it is complete, or after each step."""

    def __init__(self, handle: Any, connection: Connection, num_prompt_tokens: int, streamed: bool) -> None:
        self._handle = handle
        self._connection = connection
        self._num_prompt_tokens = num_prompt_tokens
        self._streamed = streamed
        self._told = ""
        self._reason: str | None = None
        self.tokens: list[int] = []
        self.is_running = True
        if streamed:
            connection.begin_stream()

    def read(self) -> bool:
        """Reads new tokens after a step; returns whether there is something to send."""
        self.is_running = self._handle.get_status() == RUNNING
        if self.is_running and not self._streamed:
            return False
        num_before = len(self.tokens)
        while self._handle.can_read():
            output = self._handle.read()[0]
            self.tokens += output.generated_ids
            self._reason = REASONS.get(output.finish_reason)
        # A step that computed a part of a long prompt generated no token.
        return len(self.tokens) > num_before or not self.is_running

    def tell(self, text: str) -> None:
        """Sends what is new; ``text`` is the text of all tokens so far."""
        if not self._streamed:
            self._connection.reply(HTTPStatus.OK, {**self._choices(text), "usage": self._usage()})
            return
        # The bytes of a character may span several tokens.
        until = len(self._told) if self.is_running and text.endswith(UNDECODED) else len(text)
        self._connection.send_event(self._choices(text[len(self._told) : until]))
        self._told = text[:until]
        if not self.is_running:
            self._connection.send_event({"choices": [], "usage": self._usage()})
            self._connection.end_stream()

    def cancel(self) -> None:
        self._handle.cancel()

    def _choices(self, text: str) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": self._reason}
        return {"object": "text_completion", "choices": [choice]}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": len(self.tokens),
            "total_tokens": self._num_prompt_tokens + len(self.tokens),
        }


class Connection(asyncio.Protocol):
    """A client's connection, kept alive. A request is read only after the one before it has been answered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = bytearray()
        self._answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._answer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._take_requests()

    def reply(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._end_answer()

    def begin_stream(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def send_event(self, content: dict[str, Any]) -> None:
        self._send_chunk(f"data: {json.dumps(content)}\n\n".encode())

    def end_stream(self) -> None:
        self._send_chunk(b"data: [DONE]\n\n")
        self._send_chunk(b"")
        self._end_answer()

    def _send_chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _end_answer(self) -> None:
        self._answer = None
        if self._received:
            asyncio.get_running_loop().call_soon(self._take_requests)

    def _take_requests(self) -> None:
        while self._answer is None and (request := self._next_request()):
            self._begin(*request)

    def _next_request(self) -> tuple[bytes, bytes] | None:
        """Returns the first line and the body of the next request; None until both have arrived."""
        head_end = self._received.find(HEAD_END)
        if head_end < 0:
            return None
        length = CONTENT_LENGTH.search(self._received, 0, head_end + len(HEAD_END))
        body_begin = head_end + len(HEAD_END)
        body_end = body_begin + (int(length[1]) if length else 0)
        if len(self._received) < body_end:
            return None
        line, _, _ = self._received.partition(b"\r\n")
        body = bytes(self._received[body_begin:body_end])
        del self._received[:body_end]
        return bytes(line), body

    def _begin(self, line: bytes, body: bytes) -> None:
        if line.startswith(b"GET /health "):
            self.reply(HTTPStatus.OK, {})
        elif line.startswith(b"POST /v1/completions "):
            try:
                self._answer = self._engine.add(json.loads(body), self)
            except (Refused, TypeError, ValueError, OverflowError) as error:
                self.reply(HTTPStatus.BAD_REQUEST, {"error": {"message": str(error)}})
        else:
            self.reply(HTTPStatus.NOT_FOUND, {"error": {"message": "there is /v1/completions and /health"}})


async def serve(engine: Engine, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="as `optimum-cli export openvino` writes it")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2, help="that compute (2)")
    parser.add_argument("--cache-gb", type=int, default=4, help="KV cache, in GB (4)")
    given = parser.parse_args()
    asyncio.run(serve(Engine(given.folder, given.threads, given.cache_gb), given.port))


if __name__ == "__main__":
    main()
