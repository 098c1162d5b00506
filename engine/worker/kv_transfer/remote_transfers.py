"""Runs a plan's transfers if KV moves between servers, or to a folder, with or without a host tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.config.engine_config import EngineConfig
from engine.config.kv_transfer import KVTransferConfig
from engine.core.outputs import SchedulerOutput
from engine.errors import ConfigError
from engine.kv_transfer.block_store import BlockStore, open_blocks
from engine.kv_transfer.saved_blocks import folder_of, make_folder
from engine.worker.kv_tiers.copy_streams import Event, copy_streams_of
from engine.worker.kv_tiers.disk_pool import TransferReports
from engine.worker.kv_tiers.host_pool import HostTransfers
from engine.worker.kv_transfer.block_saver import BlockSaver
from engine.worker.kv_transfer.lease_server import LeaseServer
from engine.worker.kv_transfer.load_threads import LoadThreads
from engine.worker.kv_transfer.memory_reader import MemoryReader
from engine.worker.kv_transfer.peer_memory import open_memory
from engine.worker.kv_transfer.remote_reader import RemoteReader
from engine.worker.kv_transfer.saved_reader import SavedReader
from engine.worker.parallel.group import TensorParallelGroup

PROTOCOL = 2


class RemoteTransfers:
    """HostTransfers that pass remote loads to threads, leases to a server, and saves to a saver."""

    def __init__(
        self,
        base: HostTransfers | None,
        device: torch.device,
        *,
        server: LeaseServer | None = None,
        reader: LoadThreads | None = None,
        saver: BlockSaver | None = None,
        saved: BlockStore | None = None,
        serves: Callable[[str], None] = lambda identity: None,
    ) -> None:
        """``base``: the host tier's transfers; the others depend on the connector and this engine's role.
        ``serves``: passes the others the identity of the loaded model."""
        self._base = base
        self.serve = serves
        """Call it with the identity of the loaded model: from now on KV is read and saved under it."""
        self._server = server
        self._reader = reader
        self._saver = saver
        self._saved = saved
        self._streams = copy_streams_of(device)

    def begin_step(self, plan: SchedulerOutput) -> None:
        if self._server is not None:
            if plan.ended_kv_leases:
                self._server.end(plan.ended_kv_leases)
            if plan.kv_leases:
                self._server.begin(plan.kv_leases)
        own = plan
        if self._reader is not None and any(load.remote is not None for load in plan.kv_loads):
            own = replace(plan, kv_loads=[load for load in plan.kv_loads if load.remote is None])
            for load in plan.kv_loads:
                if load.remote is not None:
                    after = self.before_overwriting(load.remote.block_ids)
                    self._reader.start(load.load_id, load.remote, after)
        if self._base is not None:
            self._base.begin_step(own)

    def rest(self) -> None:
        """End all leases and finish all saves, because the pool is about to change."""
        if self._server is not None:
            self._server.end_all()
        if self._saver is not None:
            self._saver.flush()

    def save_now(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Save blocks in the folder before returning; OSError if it cannot take one."""
        assert self._saver is not None, "nothing is saved here"
        self._saver.save_now(names, block_ids)

    def end_step(self, plan: SchedulerOutput) -> None:
        if self._base is not None:
            self._base.end_step(plan)
        if self._saver is not None and plan.kv_saves:
            self._saver.save(plan.kv_saves)

    def take_reports(self) -> TransferReports:
        reports = TransferReports() if self._base is None else self._base.take_reports()
        if self._reader is not None:
            fetched = self._reader.take_reports()
            reports.finished_loads += fetched.finished_loads
            reports.failed_loads += fetched.failed_loads
        if self._server is not None:
            said = self._server.take_reports()
            reports.released_leases += said.released_leases
            reports.renewed_leases += said.renewed_leases
        return reports

    def before_overwriting(self, block_ids: Sequence[int]) -> Sequence[Event]:
        if self._base is not None:
            return self._base.before_overwriting(block_ids)
        return [self._streams.steps.record_event()]

    def close(self) -> None:
        if self._base is not None:
            self._base.close()
        if self._server is not None:
            self._server.close()
        if self._reader is not None:
            self._reader.close()
        if self._saver is not None:
            self._saver.close()
        if self._saved is not None:
            self._saved.close()


def with_remote(
    base: HostTransfers | None,
    device_pool: torch.Tensor,
    config: EngineConfig,
    group: TensorParallelGroup,
    identity: str,
) -> HostTransfers | None:
    """Returns the transfers of an engine whose KV moves between servers, or to a folder; ``base`` for other
    engines. ``identity``: of the loaded model.

    ConfigError if the port of this rank is taken, or the folder cannot be written to.
    """
    transfer = config.kv_transfer
    if transfer is None or not transfer.is_used:
        return base
    fingerprint = fingerprint_of(identity, device_pool, group)
    server: LeaseServer | None = None
    saver: BlockSaver | None = None
    source: RemoteReader | MemoryReader | SavedReader | None = None
    memory = open_memory(transfer, device_pool)
    if transfer.leases_out:
        port = config.kv_transfer_port + group.rank
        server = LeaseServer(device_pool, transfer.kv_ip, port, fingerprint, memory)
    if transfer.fetches and memory is not None:
        source = MemoryReader(group.rank, fingerprint, memory)
    elif transfer.fetches:
        source = RemoteReader(group.rank, fingerprint)
    saved = _open_saved(transfer, identity, device_pool, group) if transfer.keeps else None
    if saved is not None:
        source = SavedReader(saved) if transfer.loads_saved else None
        max_bytes = transfer.kv_connector_extra_config.shared_storage_max_bytes
        max_bytes = None if max_bytes is None else max(1, max_bytes // group.size)
        saver = BlockSaver(device_pool, saved, max_bytes) if transfer.saves else None
    reader = None if source is None else LoadThreads(device_pool, source)

    def serve(identity: str) -> None:
        fingerprint = fingerprint_of(identity, device_pool, group)
        if server is not None:
            server.fingerprint = fingerprint
        if isinstance(source, RemoteReader | MemoryReader):
            source.fingerprint = fingerprint
        if saved is not None:
            now = saved.at(_place_of(transfer, identity, device_pool, group))
            if isinstance(source, SavedReader):
                source.saved = now
            if saver is not None:
                saver.use(now)

    return RemoteTransfers(
        base, device_pool.device, server=server, reader=reader, saver=saver, saved=saved, serves=serve
    )


def saved_place(
    config: EngineConfig, identity: str, device_pool: torch.Tensor, group: TensorParallelGroup
) -> Path | None:
    """Where a rank's KV is kept; None if this engine keeps none."""
    transfer = config.kv_transfer
    if transfer is None or not transfer.keeps:
        return None
    return folder_of(transfer.storage_path or "", layout_of(identity, device_pool), group.rank, group.size)


def _place_of(
    transfer: KVTransferConfig, identity: str, device_pool: torch.Tensor, group: TensorParallelGroup
) -> Path:
    """The same, made if it is a folder; ConfigError if it cannot be."""
    layout = layout_of(identity, device_pool)
    shared = transfer.storage_path
    if shared is None:
        return folder_of("", layout, group.rank, group.size)
    try:
        return make_folder(shared, layout, group.rank, group.size)
    except OSError as error:
        raise ConfigError(f"shared_storage_path: {shared} cannot be written to: {error}.") from error


def _open_saved(
    transfer: KVTransferConfig, identity: str, device_pool: torch.Tensor, group: TensorParallelGroup
) -> BlockStore:
    place = _place_of(transfer, identity, device_pool, group)
    return open_blocks(transfer, place, "worker", group.rank, device_pool[0].nbytes)


def fingerprint_of(identity: str, device_pool: torch.Tensor, group: TensorParallelGroup) -> str:
    """What two ranks must have in common for one to read the other's KV, as a short text."""
    return f"protocol {PROTOCOL}, {layout_of(identity, device_pool)}, rank {group.rank} of {group.size}"


def layout_of(identity: str, device_pool: torch.Tensor) -> str:
    """The identity of the loaded model and the layout of its KV, as a short text."""
    shape = "x".join(map(str, device_pool.shape[1:]))
    return f"model {identity}, KV {shape} {str(device_pool.dtype).removeprefix('torch.')}"
