"""The connection of the benchmarks, which is kept as long as the server keeps it."""

from __future__ import annotations

import asyncio

import pytest

from eval.load.plain_http import Connection

NUM_REQUESTS = 3


@pytest.mark.parametrize(
    ("header", "num_opened"),
    [("", 1), ("Connection: keep-alive\r\n", 1), ("Connection: close\r\n", NUM_REQUESTS)],
)
def test_a_connection_is_opened_again_only_if_the_server_closes_it(header: str, num_opened: int) -> None:
    assert asyncio.run(count_connections(header)) == num_opened


async def count_connections(header: str) -> int:
    """The number of connections used for ``num_requests`` sequential requests to a server with this
    header."""
    served: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = asyncio.Event()
        served.append(ended)
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n{header}\r\n".encode() + b"{}")
            if "close" in header:
                break
        writer.close()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        connection = Connection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(NUM_REQUESTS):
            answer = await connection.ask(connection.request("GET", "/"))
            assert answer.body == b"{}"
        connection.close()
        for ended in served:
            await ended.wait()
        return len(served)
