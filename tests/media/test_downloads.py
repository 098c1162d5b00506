"""Pictures are fetched only from hosts that the operator named."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from engine.media import downloads
from engine.media.downloads import MediaDownloads
from engine.media.limits import MediaFault
from engine.records.media import MediaKind
from tests.media.picture_host import DATA, picture_host


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with picture_host() as found:
        yield found


HERE = MediaDownloads(["127.0.0.1"])


async def test_a_picture_of_a_named_host_is_fetched(site: str) -> None:
    assert await HERE.fetch(f"http://{site}/picture.png", MediaKind.IMAGE) == DATA
    assert await HERE.fetch(f"http://{site}/host", MediaKind.IMAGE) == site.encode()


async def test_redirects_within_named_hosts_are_followed(site: str) -> None:
    assert await HERE.fetch(f"http://{site}/to//picture.png", MediaKind.IMAGE) == DATA
    assert await HERE.fetch(f"http://{site}/to/http://{site}/picture.png", MediaKind.IMAGE) == DATA


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/to/http://169.254.169.254/latest", "at host '169.254.169.254', which --allowed-media-domains"),
        ("/to/http://localhost/secret", "at host 'localhost', which --allowed-media-domains"),
        ("/to/file:///etc/passwd", "must be a data: URL, or one of http or https"),
        ("/round", "more than 5 redirects"),
        ("/nothing", "its host answers 404"),
        ("/large", "the limit for one picture is 20 MiB"),
        ("/endless", "the limit for one picture is 20 MiB"),
    ],
)
async def test_what_may_not_be_fetched_is_a_fault(site: str, path: str, fault: str) -> None:
    with pytest.raises(MediaFault, match=fault):
        await HERE.fetch(f"http://{site}{path}", MediaKind.IMAGE)


async def test_a_silent_host_takes_limited_time(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "TIME_LIMIT_S", 0.05)
    with pytest.raises(MediaFault, match=r"could not be fetched within 0\.05 s"):
        await HERE.fetch(f"http://{site}/silent", MediaKind.IMAGE)


async def test_a_closed_port_is_a_fault() -> None:
    with pytest.raises(MediaFault, match="could not be fetched: ConnectError"):
        await HERE.fetch("http://127.0.0.1:1/picture.png", MediaKind.IMAGE)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://example.com/a.png", "at host 'example.com', which --allowed-media-domains does not name"),
        ("https://127.0.0.1.example.com/", "which --allowed-media-domains does not name"),
        ("http://user:word@127.0.0.1/", "must not have a user"),
        ("http://[::1", "has no valid URL"),
        ("gopher://127.0.0.1/", "must be a data: URL"),
        ("http:///picture.png", "which --allowed-media-domains does not name"),
    ],
)
async def test_other_urls_are_refused_before_anything_is_sent(url: str, fault: str) -> None:
    with pytest.raises(MediaFault, match=fault):
        await HERE.fetch(url, MediaKind.IMAGE)


async def test_a_name_that_leads_into_a_private_network_is_refused(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private address is refused unless it is named, too, or the name is localhost."""
    port = site.rpartition(":")[2]
    url = f"http://pictures.example:{port}/picture.png"
    by_name = MediaDownloads(["pictures.example"])

    async def resolved(self: object, host: str, *args: object, **kwargs: object) -> list[object]:
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr("asyncio.BaseEventLoop.getaddrinfo", resolved)
    with pytest.raises(MediaFault, match="with a private address, which is not listed in --allowed"):
        await by_name.fetch(url, MediaKind.IMAGE)
    assert await MediaDownloads(["Pictures.Example.", "127.0.0.1"]).fetch(url, MediaKind.IMAGE) == DATA
    assert (
        await MediaDownloads(["localhost"]).fetch(f"http://localhost:{port}/picture.png", MediaKind.IMAGE)
        == DATA
    )


@pytest.mark.parametrize(
    ("address", "may"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        *((each, False) for each in ("10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "224.0.0.1")),
        *((each, False) for each in ("::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1")),
    ],
)
def test_only_public_addresses_are_reached(address: str, may: bool) -> None:
    assert MediaDownloads(["a.example"])._may_reach(ip_address(address), "a.example") is may
    assert MediaDownloads([str(ip_address(address))])._may_reach(ip_address(address), "a.example")
