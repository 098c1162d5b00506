"""Holds the blocks of pins: what the job's next turn would hit, of every KV cache group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from engine.core.kv_cache.kv_cache_coordinator import KVCacheCoordinator
from engine.core.kv_cache.state_manager import StateManager
from engine.records.kv_cache_groups import KVCacheGroup, attention_groups, num_window_blocks


def _is_revocable(pin_id: int) -> bool:
    """Whether this is a policy's pin: leases, which another server is to read, have negative ids."""
    return pin_id >= 0


class PinnedBlocks:
    """Holds blocks by the id of their pin, and finds where a pin may be cut."""

    def __init__(
        self,
        pool: BlockPool,
        coordinator: KVCacheCoordinator,
        groups: Sequence[KVCacheGroup],
        states: StateManager | None = None,
    ) -> None:
        self._pool = pool
        self._coordinator = coordinator
        self._states = states
        self._num_full = sum(group.is_full for group in groups)
        self._num_window_blocks = num_window_blocks(attention_groups(groups), coordinator.block_size)
        self._is_unitary = len(groups) == 1 and groups[0].is_full
        self._blocks: dict[int, list[KVCacheBlock]] = {}
        self._blocks_per_state = 0 if states is None else states.blocks_per_state
        self.num_blocks = 0
        """Blocks of all pins; one in two pins counts twice, and a state as the blocks that it takes."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, pin_id: int) -> bool:
        return pin_id in self._blocks

    def held(self) -> Iterable[list[KVCacheBlock]]:
        """The blocks of each pin."""
        return self._blocks.values()

    def blocks_of(self, pin_id: int) -> list[KVCacheBlock]:
        """A copy of the list of blocks that a pin holds now."""
        return list(self._blocks[pin_id])

    def named_blocks_of(self, pin_id: int, block_hashes: Sequence[BlockHash]) -> dict[BlockHash, int]:
        """Block ids by name of the blocks that a pin of these hashes holds, those of its state included."""
        blocks = self._blocks[pin_id]
        named = {block.block_hash: block.block_id for block in blocks if block.block_hash is not None}
        if self._states is not None:
            layout = self._states.layout
            slot = self._states.pins[pin_id].block_id
            named |= zip(layout.names_of(block_hashes[-1]), layout.blocks_of(slot), strict=True)
        return named

    def num_blocks_of(self, pin_id: int) -> int:
        """The number of blocks that a pin counts as, its state included."""
        return len(self._blocks[pin_id]) + self._blocks_per_state

    def hold(self, pin_id: int, blocks: list[KVCacheBlock]) -> None:
        """Begin a pin: it replaces the previous holder of these blocks."""
        assert pin_id not in self._blocks
        self._blocks[pin_id] = blocks
        self.num_blocks += self.num_blocks_of(pin_id)
        if _is_revocable(pin_id):
            self._pool.mark_pinned(blocks)
            self._pool.begin_pin(pin_id, [block.ref_cnt for block in blocks].count(1))

    def end(self, pin_id: int) -> int | None:
        """End a pin: blocks without another holder become ordinary cached blocks. Returns how many of them
        would have been evicted without it; None where states are not counted and so this is not known."""
        self.num_blocks -= self.num_blocks_of(pin_id)
        blocks = self._blocks.pop(pin_id)
        if _is_revocable(pin_id):
            self._pool.unmark_pinned(blocks)
        self._pool.free_blocks(reversed(blocks))
        num_needed = self._pool.needed.end(pin_id)
        if self._states is not None:
            self._states.end_pin(pin_id)
            return None
        return num_needed

    # ---- what a return would hit ----

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> list[KVCacheBlock]:
        """Cached blocks that cover a prefix of at most ``max_tokens`` tokens, as a block table.

        Where layers have states, it is the longest such prefix that ends where a state is cached.
        """
        coordinator = self._coordinator
        states = self._states
        hit = coordinator.find_longest_cache_hit(block_hashes, max_tokens)
        while states is not None:
            num_blocks = len(hit) // coordinator.num_groups
            num_hit = states.longest_hit(block_hashes, num_blocks)
            if num_hit == num_blocks:
                break
            hit = coordinator.find_longest_cache_hit(block_hashes, num_hit * coordinator.block_size)
        return hit

    # ---- cuts ----

    def longest_cut(self, block_hashes: Sequence[BlockHash], num_blocks: int) -> int:
        """The largest number of first blocks, at most ``num_blocks``, that a pin of these can be cut to.

        Where a group has a window, the blocks before the new end must still be cached, as they were freed
        when the window moved on; where layers have states, so must the state there. 0 if the next turn would
        hit nothing, wherever the pin is cut.
        """
        if self._is_unitary:
            return num_blocks
        num_before = self._num_held(len(block_hashes))
        while num_blocks > 0:
            hit = self.find_longest_cache_hit(block_hashes, num_blocks * self._coordinator.block_size)
            num_blocks = num_hit = len(hit) // self._coordinator.num_groups
            # A pin that ends within a chunk may hold more blocks than one that ends after it.
            while num_blocks and self._num_held(num_blocks) >= num_before:
                num_blocks -= 1
            if num_blocks == num_hit:
                break
        return num_blocks if self._num_held(num_blocks) else 0

    def _num_held(self, num_blocks: int) -> int:
        """Number of blocks, over all groups, of a pin of ``num_blocks`` blocks of tokens."""
        coordinator = self._coordinator
        return num_blocks * coordinator.num_groups - coordinator.num_skipped_blocks(num_blocks)

    def shrink(self, pin_id: int, block_hashes: Sequence[BlockHash], num_kept: int) -> int:
        """Cut a pin to the first ``num_kept`` blocks of its tokens, a number from ``longest_cut``.

        ``block_hashes`` are those of its tokens. Returns the number of blocks cut, over all groups.
        """
        blocks = self._blocks[pin_id]
        num_before = len(blocks)
        if _is_revocable(pin_id):
            self._pool.unmark_pinned(blocks)
        if self._is_unitary:
            lost = blocks[num_kept:]
            del blocks[num_kept:]
        else:
            lost = blocks
            blocks = self._blocks[pin_id] = self._blocks_of_cut(block_hashes, num_kept)
            self._pool.touch(blocks)
        if _is_revocable(pin_id):
            self._pool.mark_pinned(blocks)
            self._pool.needed.cut(pin_id, len(blocks))
        if self._states is not None:
            self._states.move_pin(pin_id, block_hashes, num_kept)
        assert 0 < len(blocks) < num_before
        self.num_blocks -= num_before - len(blocks)
        self._pool.free_blocks(reversed(lost))
        return num_before - len(blocks)

    def freed_by_end(self, pin_id: int) -> tuple[int, bool]:
        """How many blocks become free if a pin ends, and whether a state slot does."""
        num_freed = [block.ref_cnt for block in self._blocks[pin_id]].count(1)
        return num_freed, self._states is not None and self._states.frees(pin_id)

    def cut_to_free(self, pin_id: int, block_hashes: Sequence[BlockHash], wanted: int) -> tuple[int, int]:
        """Where to cut a pin to free ``wanted`` blocks: how many blocks of its tokens it keeps, and how many
        blocks become free.

        ``block_hashes`` are those of its tokens. Blocks that a request or another pin also holds do not
        become free. It keeps 0 where ``wanted`` exceeds what it has, or where no shorter prefix is of use.
        """
        blocks = self._blocks[pin_id]
        if not self._is_unitary:
            return self._cut_windows_to_free(blocks, block_hashes, wanted)
        freed = 0
        for count, block in enumerate(reversed(blocks), start=1):
            freed += block.ref_cnt == 1
            if freed == wanted:
                return len(blocks) - count, freed
        return 0, freed

    def _cut_windows_to_free(
        self, blocks: list[KVCacheBlock], block_hashes: Sequence[BlockHash], wanted: int
    ) -> tuple[int, int]:
        """Cut enough blocks even if the windows before the new end take as many as the old ones free."""
        num_full = self._num_full
        num_cut = -(-(wanted + self._num_window_blocks) // num_full) if num_full else len(block_hashes)
        num_kept = self.longest_cut(block_hashes, max(0, len(block_hashes) - num_cut))
        kept = self._blocks_of_cut(block_hashes, num_kept)
        kept_ids = {block.block_id for block in kept}
        freed = sum(block.ref_cnt == 1 and block.block_id not in kept_ids for block in blocks)
        freed -= [block.ref_cnt for block in kept].count(0)
        if num_kept and freed >= wanted:
            return num_kept, freed
        return 0, [block.ref_cnt for block in blocks].count(1)

    def _blocks_of_cut(self, block_hashes: Sequence[BlockHash], num_kept: int) -> list[KVCacheBlock]:
        """The blocks, over all groups, in a hit of a pin's first ``num_kept`` blocks."""
        null = self._pool.null_block
        hit = self._coordinator.find_longest_cache_hit(block_hashes, num_kept * self._coordinator.block_size)
        return [block for block in hit if block is not null]

    # ---- all ----

    def check_invariants(self) -> None:
        """Raise AssertionError unless the counts match the blocks that are held."""
        assert self.num_blocks == sum(map(self.num_blocks_of, self._blocks))
        assert self._states is None or self._states.num_pinned == len(self._blocks)
