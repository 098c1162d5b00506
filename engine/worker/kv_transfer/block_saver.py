"""Writes blocks to a folder that servers share, or to a store, on a thread parallel to the steps."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch

from engine.core.outputs import KVSaves
from engine.kv_transfer.block_store import BlockStore
from engine.kv_transfer.wire import chunks
from engine.worker.kv_tiers.copy_streams import Event, copy_streams_of

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 512 * 2**20
"""Limit of bytes waiting to be written. More blocks are skipped: a slow folder must not delay the steps."""
MAX_KNOWN = 1_000_000
"""Names known to be in the folder: 16 million tokens in blocks of 16."""
SCANS_PER_LIMIT = 16
"""The folder is measured again after 1 / SCANS_PER_LIMIT of its limit has been written."""


class BlockSaver:
    """Copies blocks after a step has computed them, and writes each to the folder once."""

    def __init__(self, device_pool: torch.Tensor, saved: BlockStore, max_bytes: int | None) -> None:
        """``device_pool``: [num_blocks, ...], block-major. ``max_bytes``: limit of all files, or None."""
        self._rows = device_pool.view(len(device_pool), -1).view(torch.uint8)
        self._block_bytes = self._rows.shape[1]
        self._streams = copy_streams_of(device_pool.device)
        self._saved = saved
        self._max_bytes = max_bytes
        self._num_unmeasured = max_bytes or 0
        """Bytes written since the folder was last measured. Initially the limit, so the first write
        measures."""
        self._lock = threading.Lock()
        self._num_pending = 0
        self._has_saved_at_once = False
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._has_logged: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "kv-saves")

    def save(self, saves: KVSaves) -> None:
        """Save blocks of the step that was queued last. Does not wait for the folder."""
        if saves.useless:
            self._thread.submit(self._delete, saves.useless)
        names, block_ids = self._take(saves)
        if names:
            content = self._copy(block_ids)
            self._thread.submit(self._write, names, content, self._streams.steps.record_event())

    def save_now(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Save blocks before returning, however many; OSError if the folder cannot take one."""
        self._has_saved_at_once = True
        left = iter(names)
        for some in chunks(block_ids, self._block_bytes):
            content = self._copy(some).cpu()
            self._thread.submit(self._put, list(islice(left, len(some))), content).result()

    def flush(self) -> None:
        """Wait until all pending blocks are written."""
        self._thread.submit(lambda: None).result()

    def use(self, saved: BlockStore) -> None:
        """Save blocks in another folder from now on. Call ``flush`` first."""
        self._saved = saved
        with self._lock:
            self._known.clear()

    def close(self) -> None:
        """Write all pending blocks, and stop; what nobody came for is deleted. Repeatable."""
        if self._has_saved_at_once:
            self._has_saved_at_once = False
            self._thread.submit(self._saved.delete_unused)
        self._thread.shutdown(wait=True)

    def _take(self, saves: KVSaves) -> tuple[list[bytes], list[int]]:
        """Names and ids of the blocks that are not known to be in the folder, up to MAX_PENDING_BYTES."""
        names = list[bytes]()
        block_ids = list[int]()
        with self._lock:
            num_left = (MAX_PENDING_BYTES - self._num_pending) // self._block_bytes
            is_full = False
            for name, block_id in zip(saves.names, saves.block_ids, strict=True):
                if name in self._known:
                    self._known.move_to_end(name)
                elif len(names) == num_left:
                    is_full = True
                    break
                else:
                    self._known[name] = None
                    names.append(name)
                    block_ids.append(block_id)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
            self._num_pending += len(names) * self._block_bytes
        if is_full:
            self._log("it is slower than blocks are computed, so some are left out")
        return names, block_ids

    def _copy(self, block_ids: Sequence[int]) -> torch.Tensor:
        """[len(block_ids), block_bytes]: the content of these blocks after the step."""
        if self._rows.device.type == "cpu":
            # Not by torch, as the model uses its threads.
            return torch.from_numpy(np.take(self._rows.numpy(), block_ids, axis=0))
        return self._rows[torch.tensor(block_ids, device=self._rows.device)]

    # ---- the thread ----

    def _write(self, names: Sequence[bytes], content: torch.Tensor, computed: Event) -> None:
        try:
            computed.synchronize()
            host = content.cpu()
            for some in chunks(range(len(names)), self._block_bytes):
                self._put(names[some[0] : some[-1] + 1], host[some[0] : some[-1] + 1])
            left = list[bytes]()
        except Exception as error:
            self._log(error)
            left = list(names)
        with self._lock:
            self._num_pending -= len(names) * self._block_bytes
            for name in left:
                self._known.pop(name, None)

    def _put(self, names: Sequence[bytes], content: torch.Tensor) -> None:
        self._num_unmeasured += self._saved.write(names, content.numpy().reshape(-1).data)
        self._shrink()

    def _shrink(self) -> None:
        """Delete files beyond the limit. Deleted blocks may be saved again."""
        if self._max_bytes is None or self._num_unmeasured < self._max_bytes // SCANS_PER_LIMIT:
            return
        self._saved.shrink(self._max_bytes)
        self._num_unmeasured = 0
        with self._lock:
            self._known.clear()

    def _delete(self, names: Sequence[bytes]) -> None:
        with self._lock:
            for name in names:
                self._known.pop(name, None)
        try:
            self._saved.delete(names)
        except Exception as error:
            self._log(error)

    def _log(self, error: Exception | str) -> None:
        """Log the first failure of each kind; a failure only costs recomputing."""
        reason = str(error) if isinstance(error, OSError | str) else repr(error)
        if reason not in self._has_logged and len(self._has_logged) < 100:
            self._has_logged.add(reason)
            logger.warning("KV could not be saved in %s: %s.", self._saved.place, reason)
