"""Tracks the content of KV blocks on all tiers as plans change it: a worker that stores hashes for KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from engine.core.kv_cache.block_hash import BlockHash, BlockHasher
from engine.core.outputs import BlockCopies, KVLoad, SchedulerOutput
from engine.core.request import Request
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup, attention_groups, blocks_per_state

LoadFate = Callable[[], tuple[int, bool]]
"""Returns the steps until a load ends (0: within its step), and whether it succeeds."""


def at_once() -> tuple[int, bool]:
    return 0, True


@dataclass(slots=True)
class _Copying:
    """A load in flight."""

    load: KVLoad
    contents: list[BlockHash]
    on_disk: list[BlockHash]
    steps_left: int
    succeeds: bool


@dataclass(slots=True)
class _Writing:
    """A write to disk in flight."""

    content: BlockHash
    steps_left: int
    succeeds: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The mapping of pool blocks to contents."""

    block_size: int
    groups: tuple[KVCacheGroup, ...]
    first_state: int = 0
    """The block at which the first state slot begins."""
    state_blocks: int = 0
    """Blocks of a state slot; 0: no layer has states."""

    def state_part(self, block: int) -> tuple[int, int]:
        """The state slot of this block, and the block's index in it."""
        return divmod(block - self.first_state, self.state_blocks)

    def is_of_state(self, block: int) -> bool:
        return bool(self.state_blocks) and block >= self.first_state

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def first_seen(self, group: int, position: int) -> int:
        """The first block that a token at this position sees."""
        window, chunk = self.groups[group].sliding_window, self.groups[group].attention_chunk
        if chunk is not None:
            return position // chunk * chunk // self.block_size
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def content(self, block_hash: BlockHash, group: int) -> BlockHash:
        """The content of a full block of this group."""
        is_unitary = self.num_groups == 1 and self.groups[0].is_full
        return block_hash if is_unitary else block_hash + group.to_bytes(2, "big")


NONE_ACCEPTED: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class _Span:
    """The tokens that a step computes of one request."""

    request: Request
    table: list[int]
    """Block ids, ordered by block of tokens, then by group."""
    start: int
    end: int
    """End, in tokens."""
    hashes: list[BlockHash]
    """Hashes of all full blocks, including those of its drafts."""

    def written(self, layout: Layout) -> list[int]:
        """Blocks of all groups that the step computes into."""
        first, end = self.start // layout.block_size, -(-self.end // layout.block_size)
        return self.table[first * layout.num_groups : end * layout.num_groups]

    def read(self, layout: Layout) -> Iterator[tuple[int, int, int]]:
        """Earlier full blocks that its first token sees, with their index and group."""
        for group in range(layout.num_groups):
            first, end = layout.first_seen(group, self.start), self.start // layout.block_size
            for index in range(first, end):
                yield self.table[index * layout.num_groups + group], index, group


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A plan as the worker takes it, with the block tables of that time."""

    plan: SchedulerOutput
    spans: list[_Span]

    def blocks_of_others(self, request: Request, layout: Layout) -> set[int]:
        """Blocks that it reads or writes for other requests."""
        return self.blocks([span for span in self.spans if span.request is not request], layout)

    def blocks(self, spans: Iterable[_Span], layout: Layout) -> set[int]:
        """Blocks read or written for these spans."""
        return {block for span in spans for block in span.written(layout)} | {
            block for span in spans for block, _, _ in span.read(layout)
        }


@dataclass(frozen=True, slots=True)
class Reports:
    """Ended transfers: ids of loads, and slots of the disk."""

    finished_loads: list[int]
    failed_loads: list[int]
    finished_disk_writes: list[int]
    failed_disk_writes: list[int]


class KvMemory:
    """Executes the plans' reads, writes and copies; fails if one would find a wrong content."""

    def __init__(
        self,
        block_size: int,
        load_fate: LoadFate = at_once,
        write_fate: LoadFate = at_once,
        kv_cache_groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP,
        num_blocks: int = 0,
    ) -> None:
        state_blocks = blocks_per_state(kv_cache_groups)
        self._layout = Layout(block_size, attention_groups(kv_cache_groups), num_blocks, state_blocks)
        self._has_states = state_blocks > 0
        self.states: dict[int, tuple[Request, int]] = {}
        """The request that wrote each state slot, and the number of tokens that its state covers."""
        self._stored_states: dict[BlockHash, tuple[Request, int]] = {}
        """The same for all states ever stored, by the hash of their last block."""
        self._load_fate = load_fate
        self._write_fate = write_fate
        self.device: dict[int, BlockHash | None] = {}
        """Block id to the hash of its content; None: not a full block."""
        self.host: dict[int, BlockHash] = {}
        self.disk: dict[int, BlockHash] = {}
        self._writing: dict[int, _Writing] = {}
        """Writes in flight, by disk slot."""
        self._tables: dict[str, list[int]] = {}
        self._copying: list[_Copying] = []

    def take(
        self, plan: SchedulerOutput, requests: Mapping[str, Request], under_way: Sequence[Work] = ()
    ) -> Work:
        """Takes the next plan; checks that it does not change what plans still under way use."""
        self._take_in(plan)
        cached = plan.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        spans = [
            _Span(
                requests[i],
                list(self._tables[i]),
                starts[i],
                starts[i] + num_tokens,
                self._hashes(requests[i], plan.scheduled_spec_decode_tokens.get(i)),
            )
            for i, num_tokens in plan.num_scheduled_tokens.items()
        ]
        for before in under_way:
            for span in spans:
                in_use = before.blocks_of_others(span.request, self._layout)
                written = set(span.written(self._layout))
                assert not in_use & written, "a step would write what the one before it uses"
            loaded = {b for load in plan.kv_loads for b in (*load.copies.block_ids, *load.reads.block_ids)}
            in_use = before.blocks(before.spans, self._layout)
            assert not in_use & loaded, "a load would write what a step under way uses"
        return Work(plan, spans)

    def _hashes(self, request: Request, drafts: Sequence[int] | None) -> list[BlockHash]:
        """The request's own list, which grows with its tokens, or a copy extended by drafts."""
        if drafts is None or not request.block_hashes:
            return request.block_hashes
        hashes = list(request.block_hashes)
        hasher = BlockHasher(self._layout.block_size)
        hasher.extend(hashes, [*request.all_token_ids, *drafts], request.hash_context)
        return hashes

    def execute(self, work: Work, num_accepted: Mapping[str, int] = NONE_ACCEPTED) -> Reports:
        """Runs one plan: loads and writes start, tokens are computed, blocks are stored, transfers end.

        ``num_accepted``: accepted drafts of each request; a state is written after them.
        """
        self._begin_writes(work.plan)
        self._store(work.plan.state_stores)
        for load in work.plan.kv_loads:
            self._begin(load)
        for span in work.spans:
            self._write(span)
        for span in work.spans:
            self._read(span)
        if self._has_states:
            self._compute_states(work, num_accepted)
        self._store(work.plan.kv_stores)
        return Reports(*self._end(), *self._end_writes())

    def after(self, under_way: Sequence[Work]) -> KvMemory:
        """The memory after these plans have run, with all transfers still in flight."""
        later = copy(self)
        later._load_fate = later._write_fate = lambda: (1000, True)
        later.device, later.host, later.disk = dict(self.device), dict(self.host), dict(self.disk)
        later.states, later._stored_states = dict(self.states), dict(self._stored_states)
        later._copying = [copy(copying) for copying in self._copying]
        later._writing = {slot: copy(writing) for slot, writing in self._writing.items()}
        for copying in later._copying:
            copying.steps_left = 1000
        for writing in later._writing.values():
            writing.steps_left = 1000
        for work in under_way:
            later.execute(work)
        return later

    def _take_in(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids | plan.preempted_req_ids:
            self._tables.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids)
        cached = plan.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = []
            self._tables[request_id] += block_ids

    def _begin(self, load: KVLoad) -> None:
        slots, blocks = load.copies.host_slots, [*load.copies.block_ids, *load.reads.block_ids]
        assert len(blocks) == load.num_blocks == len(slots) + len(load.reads.disk_slots) > 0
        assert not set(load.reads.disk_slots) & self._writing.keys(), "read while it is written"
        assert not self._blocks_in_copies() & set(blocks), "two loads write one block"
        self._fill(dict.fromkeys(blocks))
        steps, succeeds = self._load_fate()
        contents, on_disk = self._sources(load)
        self._copying.append(_Copying(load, contents, on_disk, steps, succeeds))

    def _sources(self, load: KVLoad) -> tuple[list[BlockHash], list[BlockHash]]:
        """The contents of the host and disk slots that the load reads."""
        return [self.host[slot] for slot in load.copies.host_slots], [
            self.disk[slot] for slot in load.reads.disk_slots
        ]

    def _begin_writes(self, plan: SchedulerOutput) -> None:
        writes = plan.kv_disk_writes
        being_read = {slot for copying in self._copying for slot in copying.load.reads.disk_slots}
        for host_slot, slot in zip(writes.host_slots, writes.disk_slots, strict=True):
            assert slot not in being_read, "written while it is read"
            assert slot not in self._writing, "written twice at once"
            self.disk.pop(slot, None)
            self._writing[slot] = _Writing(self.host[host_slot], *self._write_fate())

    def _blocks_in_copies(self) -> set[int]:
        loads = [copying.load for copying in self._copying]
        return {block for load in loads for block in (*load.copies.block_ids, *load.reads.block_ids)}

    def _write(self, span: _Span) -> None:
        """Writes the step's blocks; the last one may stay partial."""
        layout, hashes = self._layout, span.hashes
        size, num_groups = layout.block_size, layout.num_groups
        for index in range(span.start // size, -(-span.end // size)):
            is_full = (index + 1) * size <= span.end and index < len(hashes)
            for group in range(num_groups):
                block = span.table[index * num_groups + group]
                assert block, "computed into the null block"
                assert block not in self._blocks_in_copies(), "computed into a block that is being loaded"
                self.device[block] = layout.content(hashes[index], group) if is_full else None

    def _read(self, span: _Span) -> None:
        """Checks all earlier full blocks that the step's first token sees."""
        hashes = span.request.block_hashes
        for block_id, index, group in span.read(self._layout):
            if index >= len(hashes):
                continue  # Without prefix caching no block has a hash.
            content = self._layout.content(hashes[index], group)
            assert self.device[block_id] == content, f"{span.request} would read what is not its own"

    def _compute_states(self, work: Work, num_accepted: Mapping[str, int]) -> None:
        """Lets each sequence read its state from one slot and write it to another, all at once."""
        slots = work.plan.state_slots
        assert slots.keys() == work.plan.num_scheduled_tokens.keys()
        sources = {i: source for i, (source, _) in slots.items()}
        targets = [target for _, target in slots.values()]
        assert 0 not in targets
        assert len(set(targets)) == len(targets), "two sequences write one state"
        for request_id, (_, target) in slots.items():
            readers = [i for i, source in sources.items() if source == target]
            assert readers in ([], [request_id]), "a state is written that another sequence reads"
        for span in work.spans:
            source = sources[span.request.request_id]
            assert bool(source) == bool(span.start), "a state is read that nothing wrote"
            if source:
                writer, num_tokens = self.states[source]
                assert num_tokens == span.start, f"{span.request} would go on from another place"
                same = writer.all_token_ids[:num_tokens] == span.request.all_token_ids[:num_tokens]
                assert same, f"{span.request} would go on from another's state"
        for span in work.spans:
            request_id = span.request.request_id
            num_drafts = len(work.plan.scheduled_spec_decode_tokens.get(request_id, ()))
            end = span.end - num_drafts + num_accepted.get(request_id, 0)
            self.states[slots[request_id][1]] = span.request, end

    def check_states(self, cached: Mapping[int, BlockHash]) -> None:
        """Raises AssertionError unless every cached state is the one that it is found for."""
        for slot, block_hash in cached.items():
            writer, num_tokens = self.states[slot]
            num_blocks, rest = divmod(num_tokens, self._layout.block_size)
            assert not rest
            assert writer.block_hashes[num_blocks - 1] == block_hash, "a state is taken for another"

    def _content(self, block: int) -> BlockHash | None:
        """The content of a block; None: not a full block."""
        if not self._layout.is_of_state(block):
            return self.device[block]
        slot, part = self._layout.state_part(block)
        writer, num_tokens = self.states[slot]
        num_blocks, rest = divmod(num_tokens, self._layout.block_size)
        assert not rest, "a state is stored under a name and has none"
        block_hash = writer.block_hashes[num_blocks - 1]
        self._stored_states[block_hash] = writer, num_tokens
        return b"%s state %d" % (block_hash, part)

    def _fill(self, contents: Mapping[int, BlockHash | None]) -> None:
        """Sets the contents of blocks; those of a state only together."""
        for block, content in contents.items():
            if not self._layout.is_of_state(block):
                self.device[block] = content
                continue
            slot, part = self._layout.state_part(block)
            if content is None:
                self.states.pop(slot, None)
                continue
            block_hash, _, number = content.rpartition(b" state ")
            assert int(number) == part, "a state is put together from the wrong parts"
            state = self._stored_states[block_hash]
            assert part == 0 or self.states[slot] == state, "a state is put together from several"
            self.states[slot] = state

    def _store(self, stores: BlockCopies) -> None:
        assert len(set(stores.host_slots)) == len(stores.host_slots) == len(stores.block_ids)
        being_read = {slot for copying in self._copying for slot in copying.load.copies.host_slots}
        for block_id, slot in zip(stores.block_ids, stores.host_slots, strict=True):
            content = self._content(block_id)
            assert content is not None, "stored before it was full"
            assert slot not in being_read, "stored into a slot that is being loaded from"
            self.host[slot] = content

    def _end(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        failed: list[int] = []
        going_on: list[_Copying] = []
        for copying in self._copying:
            copying.steps_left -= 1
            if copying.steps_left >= 0:
                going_on.append(copying)
                continue
            load = copying.load
            assert self._sources(load) == (copying.contents, copying.on_disk)
            if copying.succeeds:
                filled = dict(zip(load.copies.block_ids, copying.contents, strict=True))
                filled |= zip(load.reads.block_ids, copying.on_disk, strict=True)
                self._fill(dict(sorted(filled.items())))
            (finished if copying.succeeds else failed).append(load.load_id)
        self._copying = going_on
        return finished, failed

    def _end_writes(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        failed: list[int] = []
        for slot, writing in list(self._writing.items()):
            writing.steps_left -= 1
            if writing.steps_left < 0:
                del self._writing[slot]
                (finished if writing.succeeds else failed).append(slot)
                if writing.succeeds:
                    self.disk[slot] = writing.content
        return finished, failed

    def check_claims(
        self,
        device: Mapping[int, BlockHash],
        host: Mapping[BlockHash, int],
        disk: Mapping[BlockHash, int],
    ) -> None:
        """Raises AssertionError unless every block and slot holds what the scheduler assumes."""
        for block_id, block_hash in device.items():
            assert self.device[block_id] == block_hash, f"block {block_id} is found and holds something else"
        for name, slot in host.items():
            assert self.host[slot] == _as_stored(name), f"slot {slot} is found and holds something else"
        for name, slot in disk.items():
            assert self.disk[slot] == _as_stored(name), f"disk slot {slot} is found and holds something else"


def _as_stored(name: BlockHash) -> BlockHash:
    """The name that this worker gives a content; for states it differs from the engine's."""
    block_hash, mark, part = name[:32], name[32:37], name[37:]
    return b"%s state %d" % (block_hash, int.from_bytes(part, "big")) if mark == b"state" else name
