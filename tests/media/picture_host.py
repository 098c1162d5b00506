"""A local web site with a picture."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from engine.media.limits import MAX_FILE_BYTES
from engine.records.media import MediaKind
from tests.media.pictures import png

DATA = png()


class PictureSiteHandler(BaseHTTPRequestHandler):
    """Serves a picture, redirects, and bodies that do not end."""

    protocol_version = "HTTP/1.1"
    hung = threading.Event()
    num_requests: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        path = self.path
        self.num_requests[path] += 1
        if path == "/picture.png":
            self._answer(200, DATA)
        elif path == "/host":
            self._answer(200, self.headers["Host"].encode())
        elif path.startswith("/to/"):
            self._answer(302, b"", Location=path.removeprefix("/to/"))
        elif path == "/round":
            self._answer(302, b"", Location="/round")
        elif path == "/large":
            self.send_response(200)
            self.send_header("Content-Length", str(MAX_FILE_BYTES[MediaKind.IMAGE] + 1))
            self.end_headers()
        elif path == "/endless":
            self.send_response(200)
            self.end_headers()
            while self._write(bytes(2**20)):
                pass
        elif path == "/silent":
            self.hung.wait(20)
        else:
            self._answer(404, b"")
        self.close_connection = True

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self._write(body)

    def _write(self, data: bytes) -> bool:
        try:
            self.wfile.write(data)
        except OSError:
            return False
        return True

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def picture_host() -> Iterator[str]:
    """Yields the site's host and port."""
    PictureSiteHandler.hung.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), PictureSiteHandler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    PictureSiteHandler.hung.set()
    server.shutdown()
    server.server_close()
    thread.join()
