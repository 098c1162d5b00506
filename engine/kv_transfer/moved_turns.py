"""Records of paused turns in the folder of saved KV: what the core that gets the next turn should know.

``SHARED/DIGEST/paused/3f9a….07bc…``: the first name is that of the last block that the next prompt must share
with the turn's prompt, the second that of the turn's last saved block. A record is written after all blocks
of the turn, on all ranks, so that where it is, they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.kv_transfer.saved_blocks import MAX_AGE_S, TMP_SUFFIX
from engine.records.block_chain import BlockChain
from tracing.events import MovedTurn

FOLDER = "paused"
MAX_ALIKE = 8
"""Turns with equal prompts, such as samples, that are compared with a prompt."""
UNSETTLED_NS = 100_000_000
"""Time after a change of the folder within which another one may have the same time stamp."""


class SavedTurn(msgspec.Struct, array_like=True, frozen=True):
    """The content of a file."""

    written_s: float
    """Unix time."""
    heads: bytes
    """The turn's full blocks, as ``BlockChain.heads``."""
    num_saved_blocks: int
    """How many of them, from the first on, have their KV in the folder."""
    turn: MovedTurn | None
    """None: the policy knows no jobs."""


_DECODER = msgspec.msgpack.Decoder(SavedTurn)


@dataclass(frozen=True, slots=True)
class FoundTurn:
    """A paused turn that a prompt begins like, as of now."""

    num_blocks: int
    """How many blocks they begin with alike."""
    num_saved_blocks: int
    """How many of the turn's blocks are saved."""
    turn: MovedTurn | None


class MovedTurns:
    """The records of one model. Thread-safe; several processes may use one folder."""

    def __init__(self, model_folder: Path) -> None:
        self._folder = model_folder / FOLDER
        self._files: dict[bytes, list[str]] = {}
        """Files by their first name."""
        self._seen_at = -1
        """When the folder was last changed, in ns, as of ``_files``."""

    def find(self, block_hashes: Sequence[bytes]) -> FoundTurn | None:
        """The turn that shares most with a prompt of these blocks; None if there is none."""
        files = self._known_files()
        if not files:
            return None
        for index in range(len(block_hashes) - 1, -1, -1):
            alike = files.get(block_hashes[index])
            if alike is not None:
                alike = _likely(alike, block_hashes[index:]) or alike
                saved = [turn for file in alike[:MAX_ALIKE] if (turn := self._read(file)) is not None]
                found = [_found(turn, block_hashes) for turn in saved]
                return max(found, key=lambda turn: turn.num_blocks, default=None)
        return None

    def _known_files(self) -> dict[bytes, list[str]]:
        """All files. A folder that has not changed is not read again."""
        try:
            changed_at = os.stat(self._folder).st_mtime_ns
            if changed_at != self._seen_at:
                self._files = _by_first_name(os.listdir(self._folder))
                self._seen_at = changed_at if time.time_ns() - changed_at > UNSETTLED_NS else -1
        except OSError:
            return {}
        return self._files

    def _read(self, file: str) -> SavedTurn | None:
        """The content of a file; None if it is gone, or not one of ours."""
        try:
            return _DECODER.decode((self._folder / file).read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def write(
        self, block_hashes: Sequence[bytes], num_saved_blocks: int, num_shared: int, turn: MovedTurn | None
    ) -> None:
        """Keep a record, in place of an earlier one of the turn; OSError if it cannot be.

        ``num_shared``: how many of its saved blocks the next prompt must share.
        """
        self._folder.mkdir(exist_ok=True)
        names = block_hashes[num_shared - 1].hex(), block_hashes[num_saved_blocks - 1].hex()
        begun = self._folder / f"{names[1]}-{os.getpid()}{TMP_SUFFIX}"
        content = SavedTurn(time.time(), BlockChain(block_hashes).heads(), num_saved_blocks, turn)
        begun.write_bytes(msgspec.msgpack.encode(content))
        os.replace(begun, self._folder / ".".join(names))

    def delete_old(self) -> None:
        """Delete the records that nobody came for in a day."""
        oldest = time.time() - MAX_AGE_S
        with suppress(OSError):
            for file in os.scandir(self._folder):
                if file.stat().st_mtime < oldest:
                    os.unlink(file)


def _likely(files: Iterable[str], block_hashes: Sequence[bytes]) -> list[str]:
    """The files of turns whose last saved block is among these."""
    names = {block_hash.hex() for block_hash in block_hashes}
    return [file for file in files if file.partition(".")[2] in names]


def _found(saved: SavedTurn, block_hashes: Sequence[bytes]) -> FoundTurn:
    chain = BlockChain(()).followed_by(saved.heads)
    num_blocks = chain.num_shared(block_hashes)
    turn = saved.turn
    if turn is not None:
        passed_s = max(0.0, time.time() - saved.written_s)
        turn = msgspec.structs.replace(
            turn,
            num_blocks=num_blocks,
            more_blocks=chain.heads(num_blocks),
            elapsed_s=turn.elapsed_s + passed_s,
            age_s=turn.age_s + passed_s,
        )
    return FoundTurn(num_blocks, saved.num_saved_blocks, turn)


def _by_first_name(files: Iterable[str]) -> dict[bytes, list[str]]:
    by_name: dict[bytes, list[str]] = {}
    for file in files:
        with suppress(ValueError):  # one that is being written
            by_name.setdefault(bytes.fromhex(file.partition(".")[0]), []).append(file)
    return by_name
