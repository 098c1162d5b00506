"""Pictures that a request holds stay; others are evicted when space is needed; each file is decoded once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.media.limits import MediaFailure, MediaFault
from engine.media.store import MediaLease, MediaStore, StoredMedia
from engine.records.media import MediaKind, MediaModels, PictureModel, PictureSize
from tests.media.pictures import SMALL, png

MODELS = MediaModels(SMALL)
SIZE = 24 * 32 * 3
"""Bytes of the pixels of ``png()``."""


@pytest.fixture
def store() -> Iterator[MediaStore]:
    made = MediaStore(MODELS, max_idle_bytes=2 * SIZE)
    yield made
    made.close()


def get(store: MediaStore, data: bytes, lease: MediaLease | None, owner: str | None = None) -> StoredMedia:
    name = store.hash_of(data, MediaKind.IMAGE, owner)
    return store.get(name, data, MediaKind.IMAGE, lease).result(10)


def folder_of(picture: StoredMedia) -> Path:
    assert picture.path is not None
    return Path(picture.path).parent


def test_the_next_turn_decodes_only_what_is_new(store: MediaStore) -> None:
    with store.lease() as lease:
        first = [get(store, png(seed=seed), lease) for seed in range(2)]
    with store.lease() as lease:
        second = [get(store, png(seed=seed), lease) for seed in range(3)]
    assert second[:2] == first
    assert store.statistics().num_decoded == 3
    assert second[2].size == PictureSize(24, 32)
    assert second[2].path is not None


def test_pixels_are_in_a_private_file_that_the_end_removes() -> None:
    store = MediaStore(MODELS, max_idle_bytes=SIZE, max_held_bytes=SIZE)  # it fits into any /dev/shm
    picture = get(store, png(), store.lease())
    folder = folder_of(picture)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert str(folder).startswith("/dev/shm/")
    assert np.fromfile(str(picture.path), np.uint8).size == SIZE
    store.close()
    assert not folder.exists()
    store.close()


def test_without_room_in_memory_files_go_where_temporary_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = MediaStore(MODELS, max_idle_bytes=2**60)
    try:
        assert folder_of(get(store, png(), store.lease())).parent == tmp_path
    finally:
        store.close()


def test_nothing_starts_before_the_first_picture(store: MediaStore) -> None:
    assert store._folder is None
    assert store._decoders[MediaKind.IMAGE].pid is None


def test_owners_and_limits_are_part_of_the_name(store: MediaStore) -> None:
    """A picture's name depends on owner and limits: separated owners share neither pixels nor blocks."""
    data = png()
    names = {store.hash_of(data, MediaKind.IMAGE, owner) for owner in ("ann", "bob", None)}
    other = MediaStore(MediaModels(PictureModel(5, 4, 2, 64, 2048, 8)), SIZE)
    assert len(names | {other.hash_of(data, MediaKind.IMAGE, None)}) == 4


def test_a_fault_is_remembered(store: MediaStore) -> None:
    """A bad picture in a history, sent again with every turn, is not decoded again."""
    data, pid = png()[:60], None
    for _ in range(3):
        with pytest.raises(MediaFault, match="is broken"):
            get(store, data, store.lease())
    with pytest.raises(MediaFault, match="is broken"):
        store.find(store.hash_of(data, MediaKind.IMAGE, None), None)
    assert store.statistics().num_decoded == 0
    assert pid is None


def test_sizes_are_known_longer_than_pixels(store: MediaStore) -> None:
    with store.lease() as lease:
        name = get(store, png(), lease).content_hash
    assert store.clear()
    found = store.find(name, None)
    assert found is not None
    assert (found.size, found.path) == (PictureSize(24, 32), None)
    with store.lease() as lease:
        assert store.find(name, lease) is None, "its pixels are gone"


def test_many_wait_for_one_decoding(store: MediaStore) -> None:
    data = png()
    name, leases = store.hash_of(data, MediaKind.IMAGE, None), [store.lease() for _ in range(5)]
    found = {id(store.get(name, data, MediaKind.IMAGE, lease).result(10)) for lease in leases}
    assert len(found) == 1
    assert store.statistics().num_decoded == 1
    for lease in leases:
        assert store.statistics().num_held == 1
        lease.release()
        lease.release()
    assert store.statistics().num_held == 0


def test_a_request_that_ended_meanwhile_holds_nothing(store: MediaStore) -> None:
    """A released lease gets nothing, and nothing is decoded for it unless another lease waits."""
    lease = store.lease()
    data = png()
    lease.release()
    with pytest.raises(MediaFailure, match="left"):
        get(store, data, lease)
    assert (store.statistics().num_idle, store.statistics().num_decoded) == (0, 0)
    assert get(store, data, store.lease()).num_holders == 1


def test_requests_cannot_hold_more_than_there_is_memory_for() -> None:
    store = MediaStore(MODELS, max_idle_bytes=0, max_held_bytes=2 * SIZE)
    try:
        lease, other = store.lease(), store.lease()
        get(store, png(seed=0), lease)
        get(store, png(seed=1), lease)
        with pytest.raises(MediaFailure, match="Pictures and clips of running requests take"):
            get(store, png(seed=2), other)
        get(store, png(seed=1), other)  # already held: it takes no more memory
        lease.release()
        get(store, png(seed=2), other)
        other.release()
        assert store.statistics().held_bytes == store.statistics().idle_bytes == 0
    finally:
        store.close()


def test_a_full_disk_takes_pictures_again_when_idle_ones_are_gone(store: MediaStore) -> None:
    with store.lease() as lease:
        kept = get(store, png(seed=0), lease)
    attempts: list[str] = []

    def write(path: str) -> PictureSize:
        attempts.append(path)
        if len(attempts) == 1:
            raise OSError(28, "No space left on device")
        Path(path).write_bytes(bytes(SIZE))
        return PictureSize(24, 32)

    with store.lease() as lease:
        store.put("name", write, lease)
        assert len(attempts) == 2
        assert kept.path is not None
        assert not os.path.exists(kept.path)


class StoreMachine(RuleBasedStateMachine):
    """Under random requests, held pictures exist, and idle ones fit the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MediaStore(MODELS, max_idle_bytes=3 * SIZE, max_held_bytes=5 * SIZE)
        self.open: list[MediaLease] = []

    @rule()
    def begins(self) -> None:
        self.open.append(self.store.lease())

    @precondition(lambda self: self.open)
    @rule(seed=st.integers(0, 7), which=st.integers(0, 99), own=st.booleans())
    def takes(self, seed: int, which: int, own: bool) -> None:
        lease = self.open[which % len(self.open)]

        def write(path: str) -> PictureSize:
            Path(path).write_bytes(bytes(SIZE))
            return PictureSize(24, 32)

        try:
            if own:
                self.store.put(f"{seed}", write, lease)
            else:
                get(self.store, png(seed=seed), lease)
        except MediaFailure:
            held = self.store.statistics().held_bytes
            assert held + SIZE > 5 * SIZE

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def ends(self, which: int) -> None:
        self.open.pop(which % len(self.open)).release()

    @rule()
    def clears(self) -> None:
        self.store.clear()
        assert self.store.statistics().idle_bytes == 0

    @invariant()
    def adds_up(self) -> None:
        held = {picture.content_hash: picture for lease in self.open for picture in lease.held}
        counts = self.store.statistics()
        assert counts.num_held == len(held)
        assert counts.held_bytes == SIZE * len(held)
        assert counts.idle_bytes == SIZE * counts.num_idle <= 3 * SIZE
        for picture in held.values():
            assert picture.num_holders == sum(lease.held.count(picture) for lease in self.open)
            assert os.path.getsize(str(picture.path)) == SIZE
        folder = self.store._folder
        if folder is not None:
            files = [name for name in os.listdir(folder) if not name.startswith(".")]
            assert len(files) == counts.num_held + counts.num_idle

    def teardown(self) -> None:
        self.store.close()


StoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase
