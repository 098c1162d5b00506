"""Promises about which connection is closed: the longest idle one of the owner with the most connections."""

from __future__ import annotations

from engine.api.http.connection_shares import ConnectionShares


def opened(*owners: str) -> ConnectionShares[int]:
    shares = ConnectionShares[int](4)
    for number, owner in enumerate(owners):
        shares.opened(number)
        shares.is_of(number, owner)
    return shares


def test_who_has_most_gives_way() -> None:
    """The owner with most connections loses its longest idle one; connections at work are never closed."""
    shares = opened("bob", "alice", "alice", "alice")
    for connection in (0, 2, 1):
        shares.rests(connection)
    assert [shares.longest_idle() for _ in range(4)] == [2, 1, 0, None]


def test_without_owners_the_one_idle_longest_goes() -> None:
    """Without owners the longest idle connection is closed."""
    shares = ConnectionShares[int](4)
    for connection in (3, 1, 2):
        shares.opened(connection)
        shares.rests(connection)
    shares.works(3)
    shares.closed(1)
    assert [shares.longest_idle(), shares.longest_idle()] == [2, None]


def test_an_equal_part_is_within_the_limit() -> None:
    """With two owners half of the limit each is within the share; a single owner gets nothing beyond the
    limit."""
    shares = opened("alice", "alice", "alice", "bob", "bob")
    assert [shares.is_within_share(number) for number in (0, 3)] == [False, True]
    shares.is_of(3, "alice")
    shares.closed(4)
    assert not shares.is_within_share(3)
