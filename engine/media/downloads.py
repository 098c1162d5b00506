"""Fetches pictures and clips only from the hosts that the operator has named: neither a redirect nor a name
with a private address leads elsewhere."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpx

from engine.media.limits import MAX_FILE_BYTES, MediaFault, too_many_bytes
from engine.records.media import MediaKind

TIME_LIMIT_S = 10.0
"""Maximum time to fetch one file, redirects included."""
MAX_REDIRECTS = 5
MAX_AT_ONCE = 16
MAX_PER_OWNER = 4
"""Concurrent fetches of one owner; ``MAX_AT_ONCE`` of all owners. Each holds up to a whole file in memory."""
TURN_LIMIT_S = 30.0
"""Maximum time that a fetch waits for its turn."""

Address = IPv4Address | IPv6Address
_TRANSLATED = ip_network("64:ff9b::/96")
"""Addresses that a NAT64 gateway translates to any IPv4 address, private ones too."""


class MediaDownloads:
    """Opens a connection per fetch, since each fetch resolves its host anew."""

    def __init__(self, allowed_hosts: Sequence[str]) -> None:
        self._allowed = frozenset(_plain(host) for host in allowed_hosts)
        self._context: ssl.SSLContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, url: str) -> httpx.URL:
        """Returns the parsed URL; MediaFault if it may not be fetched."""
        try:
            found = httpx.URL(url)
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise MediaFault("has no valid URL") from error
        if found.scheme not in ("http", "https"):
            raise MediaFault("must be a data: URL, or one of http or https")
        if _plain(found.host) not in self._allowed:
            raise MediaFault(
                f"is at host {found.host[:100]!r}, which --allowed-media-domains does not name; send the "
                "file itself, as a data: URL"
            )
        if found.userinfo:
            raise MediaFault("must not have a user in its URL")
        return found

    async def fetch(self, url: str, kind: MediaKind, owner: str | None = None) -> bytes:
        """Fetches the file at a URL in its owner's turn; MediaFault if it cannot or may not be fetched."""
        try:
            async with self._turn(owner):
                async with asyncio.timeout(TIME_LIMIT_S):
                    return await self._follow(self.check(url), kind)
        except TimeoutError as error:
            raise MediaFault(f"could not be fetched within {TIME_LIMIT_S:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ssl.SSLError) as error:
            raise MediaFault(f"could not be fetched: {type(error).__name__}") from error

    @asynccontextmanager
    async def _turn(self, owner: str | None) -> AsyncIterator[None]:
        """Waits for one of the concurrent fetches, of all and of the owner; MediaFault if too long."""
        self._use_loop()
        own, count = self._by_owner.get(owner, (asyncio.Semaphore(MAX_PER_OWNER), 0))
        self._by_owner[owner] = own, count + 1
        try:
            async with AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(TURN_LIMIT_S):
                        await held.enter_async_context(own)
                        await held.enter_async_context(self._at_once)
                except TimeoutError as error:
                    raise MediaFault("could not be fetched: too many files are being fetched") from error
                yield
        finally:
            own, count = self._by_owner.pop(owner)
            if count > 1:
                self._by_owner[owner] = own, count - 1

    def _use_loop(self) -> None:
        """Creates the semaphores and locks for the running event loop; they work in one loop only."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
            self._making_context = asyncio.Lock()
            self._by_owner: dict[str | None, tuple[asyncio.Semaphore, int]] = {}
            """A semaphore and the number of running and waiting fetches, by owner."""

    async def _tls(self) -> ssl.SSLContext:
        """Returns the TLS context; a thread makes it once, as reading certificates takes tens of
        milliseconds."""
        async with self._making_context:
            if self._context is None:
                self._context = await asyncio.to_thread(ssl.create_default_context)
            return self._context

    async def _follow(self, url: httpx.URL, kind: MediaKind) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(url, kind)
            if isinstance(found, bytes):
                return found
            url = self.check(str(url.join(found)))
        raise MediaFault(f"could not be fetched: more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: httpx.URL, kind: MediaKind) -> bytes | str:
        """Returns the file, or the URL to which the host redirects."""
        address = await self._address(url)
        host = url.netloc.decode("ascii")
        headers = {"Host": host, "Accept": f"{kind}/*", "Accept-Encoding": "identity"}
        # Connects to the address that was checked, but checks the certificate for the host's name.
        direct = url.copy_with(host=str(address))
        names = {"sni_hostname": url.host}
        context = await self._tls()
        async with (
            httpx.AsyncClient(
                verify=context, follow_redirects=False, trust_env=False, timeout=None
            ) as client,
            client.stream("GET", direct, headers=headers, extensions=names) as answer,
        ):
            if answer.is_redirect:
                return answer.headers["location"]
            if answer.status_code != 200:
                raise MediaFault(f"could not be fetched: its host answers {answer.status_code}")
            return await _body(answer, kind)

    async def _address(self, url: httpx.URL) -> Address:
        """Returns an address of the host; MediaFault if any is private and not allowed by the operator."""
        loop = asyncio.get_running_loop()
        port = url.port or (443 if url.scheme == "https" else 80)
        found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        addresses = [ip_address(str(each[4][0]).partition("%")[0]) for each in found]
        for address in addresses:
            if not self._may_reach(address, url.host):
                raise MediaFault(
                    f"is at host {url.host[:100]!r} with a private address, which is not listed in "
                    "--allowed-media-domains"
                )
        return addresses[0]

    def _may_reach(self, address: Address, host: str) -> bool:
        if str(address) in self._allowed or (host == "localhost" and address.is_loopback):
            return True
        inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        reached = inner or address
        return reached.is_global and not reached.is_multicast and reached not in _TRANSLATED


async def _body(answer: httpx.Response, kind: MediaKind) -> bytes:
    limit = MAX_FILE_BYTES[kind]
    told = answer.headers.get("content-length", "")
    if told.isdecimal() and len(told) < 16 and int(told) > limit:
        raise too_many_bytes(int(told), kind)
    data = bytearray()
    async for some in answer.aiter_raw():
        data += some
        if len(data) > limit:
            raise too_many_bytes(len(data), kind)
    return bytes(data)


def _plain(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()
