"""A completions server in a separate process that only takes time: ``counting_server.py MODEL PORT``.

It returns as many words as the request wants; the model "stingy" returns one fewer, but at least one.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_S = 0.002


class Handler(BaseHTTPRequestHandler):
    """Speaks OpenAI's wire format and keeps connections open."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = max(1, body["max_tokens"] - (body["model"] == "stingy"))
        time.sleep(count * TOKEN_S)
        if body["stream"]:
            self._stream(count)
            return
        answer = {"choices": [{"text": " a" * count}], "usage": {"completion_tokens": count}}
        content = json.dumps(answer).encode()
        self._send("application/json", content, ("Content-Length", str(len(content))))

    def _stream(self, count: int) -> None:
        """Streams the answer in HTTP chunks; the first event has an empty ``choices``."""
        events = [{"choices": []}, *[{"choices": [{"text": " a"}]}] * count]
        written = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
        chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in [*written, b""]]
        self._send("text/event-stream", b"".join(chunks), ("Transfer-Encoding", "chunked"))

    def _send(self, kind: str, content: bytes, framing: tuple[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header(*framing)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
