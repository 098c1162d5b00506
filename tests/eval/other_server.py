"""Another server over real HTTP: vLLM's formats, and none of our fields.

It refuses fields that vLLM does not document, counts words as tokens, and on request is busy, holds requests
or breaks off. Its answers do not follow recordings.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

STANDARD = {"model", "messages", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
VLLM = STANDARD | {"ignore_eos", "min_tokens", "return_token_ids", "session_id"}
BOS, ROLE, END = 1, 2, 3
FIRST_WORD = 10
MAX_MODEL_LEN = 4000
OWN_WORDS = ("indeed", "perhaps", "therefore")


@dataclass(kw_only=True)
class Behaviour:
    """The behavior to imitate."""

    owned_by: str = "vllm"
    fields: set[str] = field(default_factory=lambda: VLLM)
    """Any other field in a body gets HTTP 400."""
    tokenizes: bool = True
    adds_bos: bool = False
    """Whether it adds a BOS token to every text, whatever the request says."""
    api_key: str | None = None
    busy_times: int = 0
    """The number of turns refused with HTTP 503 at first."""
    hold_after: int | None = None
    """Turns after this number are never answered."""
    break_after: int | None = None
    """The number of turns after which the server stops."""
    stream: bytes | None = None
    """The bytes of every answer, instead of a generated one."""
    metrics: bytes | None = None
    """The content of ``/metrics``; None: not found."""


class OtherServer:
    """Listens inside the ``with`` block; records the turns it receives."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.turns: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.holding = threading.Event()
        """Set once a turn is held."""
        self.closed = threading.Event()
        self.lock = threading.Lock()
        self.num_refused = 0
        self._words: dict[str, int] = {}
        self._http = _Http(self)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._thread.join()

    def close(self) -> None:
        """Stops listening, then breaks off held requests."""
        self._http.shutdown()
        self._http.server_close()
        self.closed.set()

    def tokens(self, text: str) -> list[int]:
        with self.lock:
            ids = [self._words.setdefault(word, FIRST_WORD + len(self._words)) for word in text.split()]
        return [BOS, *ids] if self.behaviour.adds_bos else ids

    def text(self, tokens: list[int]) -> str:
        with self.lock:
            words = {token: word for word, token in self._words.items()}
        return " ".join(words.get(token, "?") for token in tokens)

    def chat_tokens(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        ids = [token for m in messages for token in (ROLE, *self.tokens(m["content"]), END)]
        return [*ids, ROLE] if add_generation_prompt else ids


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, other: OtherServer) -> None:
        self.other = other
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    @property
    def other(self) -> OtherServer:
        return self.server.other

    def parse_request(self) -> bool:
        """Closes connections that were opened before the server stopped."""
        if self.other.closed.is_set():
            self.close_connection = True
            return False
        return super().parse_request()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        card = {
            "id": "other",
            "owned_by": self.other.behaviour.owned_by,
            "max_model_len": MAX_MODEL_LEN,
            "object": "model",
        }
        if self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [card]})
        elif self.path == "/metrics" and self.other.behaviour.metrics is not None:
            self._send(200, "text/plain", self.other.behaviour.metrics)
        elif self.path == "/health":
            self._json(200, {})
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path in ("/v1/chat/completions", "/v1/completions"):
            self._turn(body)
        elif self.path == "/tokenize" and self.other.behaviour.tokenizes:
            if "messages" in body:
                tokens = self.other.chat_tokens(body["messages"], body["add_generation_prompt"])
            else:
                tokens = self.other.tokens(body["prompt"])
            self._json(200, {"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens})
        elif self.path == "/detokenize" and self.other.behaviour.tokenizes:
            self._json(200, {"prompt": self.other.text(body["tokens"])})
        else:
            self._json(404, {"detail": "Not Found"})

    def _turn(self, body: dict[str, Any]) -> None:
        other, behaviour = self.other, self.other.behaviour
        if refusal := self._refusal(body):
            status, message = refusal
            self._json(status, {"error": {"message": message}}, ("Retry-After", "0"))
            return
        with other.lock:
            other.turns.append(body)
            other.headers.append(dict(self.headers.items()))
            number = len(other.turns)
        if behaviour.break_after is not None and number > behaviour.break_after:
            threading.Thread(target=other.close).start()
        elif behaviour.hold_after is not None and number > behaviour.hold_after:
            other.holding.set()
        else:
            self._answer(body)
            return
        other.closed.wait()
        self.close_connection = True

    def _refusal(self, body: dict[str, Any]) -> tuple[int, str] | None:
        behaviour = self.other.behaviour
        key = behaviour.api_key
        if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            return 401, "Unauthorized"
        if unknown := sorted(body.keys() - behaviour.fields):
            return 400, f"unknown fields: {', '.join(unknown)}"
        with self.other.lock:
            self.other.num_refused += 1
            return (503, "too many requests") if self.other.num_refused <= behaviour.busy_times else None

    def _answer(self, body: dict[str, Any]) -> None:
        """Sends the requested number of words if the length is fixed, else a few fewer."""
        if self.other.behaviour.stream is not None:
            self._send(200, "text/event-stream", self.other.behaviour.stream)
            return
        chat = "messages" in body
        prompt = self.other.chat_tokens(body["messages"], True) if chat else body["prompt"]
        num_output = body["max_tokens"] if body.get("ignore_eos") else max(1, body["max_tokens"] - 2)
        words = [OWN_WORDS[index % len(OWN_WORDS)] for index in range(num_output)]
        chunks: list[dict[str, Any]] = []
        for word in words:
            choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
            text = f" {word}"
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = self.other.tokens(word)[-1:]
            chunks.append({"id": "x", "object": "chunk", "choices": [choice]})
        chunks[-1]["choices"][0]["finish_reason"] = "length"
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_output,
            "total_tokens": len(prompt) + num_output,
            "prompt_tokens_details": None,
        }
        chunks.append({"id": "x", "object": "chunk", "choices": [], "usage": usage})
        lines = [json.dumps(chunk) for chunk in chunks]
        content = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()
        self._send(200, "text/event-stream; charset=utf-8", content)

    def _json(self, status: int, content: object, *headers: tuple[str, str]) -> None:
        self._send(status, "application/json", json.dumps(content).encode(), *headers)

    def _send(self, status: int, kind: str, content: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(content))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
