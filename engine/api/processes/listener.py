"""The listening socket, bound once and inherited by all API server processes."""

from __future__ import annotations

import os
import socket
import stat

from engine.api.config import ServerConfig
from engine.errors import EngineError


def bound_socket(config: ServerConfig) -> socket.socket:
    """Binds the socket before the model is loaded, which may take minutes, so that a port in use is reported
    at once. It does not listen yet: probes are refused until the server is ready.

    No other process can bind the port in the meantime.
    """
    # asyncio sends at once only on sockets that report TCP: else a first token waits 40 ms for the
    # acknowledgement of the headers.
    protocol = 0 if config.uds is not None else socket.IPPROTO_TCP
    sock = socket.socket(_family(config), socket.SOCK_STREAM, protocol)
    try:
        if config.uds is not None:
            _remove_stale_socket(config.uds)
            sock.bind(config.uds)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((config.host or "", config.port))
            # Until one of them listens, all sockets with the option may have the same port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        sock.close()
        raise _cannot_listen(config, config.port, error) from error
    return sock


def begin_listening(config: ServerConfig, sock: socket.socket, backlog: int) -> None:
    """Lets up to ``backlog`` connections wait to be accepted. May be called again."""
    try:
        # Connections inherit this: while the last ones end, the next server can bind the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(backlog)
    except OSError as error:
        port = config.port if config.uds is not None else sock.getsockname()[1]
        raise _cannot_listen(config, port, error) from error


def inherited_socket(config: ServerConfig, fileno: int) -> socket.socket:
    """Returns the socket in a process that inherited it."""
    protocol = 0 if config.uds is not None else socket.IPPROTO_TCP
    return socket.socket(_family(config), socket.SOCK_STREAM, protocol, fileno)


def address_of(config: ServerConfig, sock: socket.socket) -> str:
    """The server's address, as clients use it."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = config.host or "0.0.0.0"
    port = sock.getsockname()[1]
    scheme = "http" if config.tls.certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _cannot_listen(config: ServerConfig, port: int, error: OSError) -> EngineError:
    where = config.uds or f"{config.host or '0.0.0.0'}:{port}"
    return EngineError(f"Cannot listen on {where}: {error.strerror or error}.")


def _family(config: ServerConfig) -> socket.AddressFamily:
    if config.uds is not None:
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in (config.host or "") else socket.AF_INET


def _remove_stale_socket(path: str) -> None:
    """Removes the socket of a killed server; anything else is kept, and bind fails."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        os.unlink(path)
