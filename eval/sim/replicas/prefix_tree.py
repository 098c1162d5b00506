"""The prefix cache of a coarse replica: chains of blocks in a radix tree; evicts tails of the chains that
were released longest ago.

A run of blocks is one node, so that a turn costs some nodes instead of thousands of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from engine.core.kv_cache.block_hash import BlockHash


class Node:
    """A run of blocks; a chain can end only at its last block."""

    __slots__ = ("children", "hashes", "num_holders", "parent", "released")

    def __init__(self, parent: Node | None, hashes: list[BlockHash]) -> None:
        self.parent = parent
        self.hashes = hashes
        self.children: dict[BlockHash, Node] = {}
        self.num_holders = 0
        """Requests that hold a chain through this node."""
        self.released = 0
        """Sequence number of its last release."""


class PrefixTree:
    """Cached blocks, including those that requests hold."""

    def __init__(self, num_blocks: int) -> None:
        self._capacity = num_blocks
        self._root = Node(None, [])
        self._releases = 0
        self._leaves: list[tuple[int, int, Node]] = []
        """A heap of nodes to evict from, by their last release; some are held again, or gone."""
        self.num_blocks = 0
        self.num_held = 0
        """Blocks of chains that requests hold."""

    def match(self, chain: Sequence[BlockHash]) -> tuple[Node, int]:
        """The node where the chain's longest cached prefix ends, and the prefix's number of blocks."""
        node = self._root
        depth = 0
        while depth < len(chain) and (child := node.children.get(chain[depth])) is not None:
            length = _common(child.hashes, chain, depth)
            if length < len(child.hashes):
                return self._split(child, length), depth + length
            node = child
            depth = depth + length
        return node, depth

    def num_not_held(self, node: Node) -> int:
        """Returns the blocks of the chain ending at ``node`` that no request holds."""
        total = 0
        at = node
        while at.parent is not None and not at.num_holders:
            total += len(at.hashes)
            at = at.parent
        return total

    def hold(self, node: Node) -> None:
        """Protects the chain that ends here from eviction until it is released."""
        at: Node | None = node
        while at is not None:
            if not at.num_holders:
                self.num_held += len(at.hashes)
            at.num_holders += 1
            at = at.parent

    def release(self, node: Node) -> None:
        self._releases += 1
        at: Node | None = node
        while at is not None:
            at.num_holders -= 1
            at.released = self._releases
            if not at.num_holders:
                self.num_held -= len(at.hashes)
                self._offer(at)
            at = at.parent

    def append(self, node: Node, hashes: list[BlockHash]) -> Node:
        """Caches blocks after a chain that the caller holds; returns its new end, which the caller then holds
        instead. Evicts the blocks that were released longest ago."""
        if not hashes:
            return node
        if (child := node.children.get(hashes[0])) is not None:
            return self._append_to_known(node, child, hashes)
        self._make_room(len(hashes))
        self.num_blocks += len(hashes)
        self.num_held += len(hashes)
        if node.num_holders == 1 and not node.children and node is not self._root:
            node.hashes.extend(hashes)
            return node
        end = node.children[hashes[0]] = Node(node, list(hashes))
        end.num_holders = 1
        return end

    def _append_to_known(self, node: Node, child: Node, hashes: list[BlockHash]) -> Node:
        """Appends to blocks that another request has computed meanwhile."""
        length = _common(child.hashes, hashes, 0)
        child = child if length == len(child.hashes) else self._split(child, length)
        if not child.num_holders:
            self.num_held += len(child.hashes)
        child.num_holders += 1
        return self.append(child, hashes[length:])

    def _split(self, node: Node, length: int) -> Node:
        """Splits a node in two; returns the first, with ``length`` blocks."""
        assert node.parent is not None
        first = Node(node.parent, node.hashes[:length])
        first.num_holders = node.num_holders
        first.released = node.released
        node.parent.children[first.hashes[0]] = first
        node.parent = first
        node.hashes = node.hashes[length:]
        first.children[node.hashes[0]] = node
        return first

    def _offer(self, node: Node) -> None:
        """Makes a node evictable if it is a leaf that no request holds."""
        if not node.num_holders and not node.children and node is not self._root:
            heapq.heappush(self._leaves, (node.released, id(node), node))

    def _make_room(self, num_new: int) -> None:
        while self._leaves and self.num_blocks + num_new > self._capacity:
            released, _, node = self._leaves[0]
            if node.num_holders or node.children or node.released != released or not node.hashes:
                heapq.heappop(self._leaves)
                continue
            surplus = min(self.num_blocks + num_new - self._capacity, len(node.hashes))
            self.num_blocks -= surplus
            if surplus < len(node.hashes):
                del node.hashes[-surplus:]
                return
            heapq.heappop(self._leaves)
            self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.hashes[0]]
        node.hashes = []
        self._offer(parent)


def _common(hashes: list[BlockHash], chain: Sequence[BlockHash], start: int) -> int:
    """How many blocks a node's run shares with the chain from ``start`` on; the first one is shared."""
    length = min(len(hashes), len(chain) - start)
    if hashes[:length] == chain[start : start + length]:
        return length
    # two chains differ in all blocks after their first difference
    alike = 1
    unlike = length
    while unlike - alike > 1:
        middle = (alike + unlike) // 2
        if hashes[middle - 1] == chain[start + middle - 1]:
            alike = middle
        else:
            unlike = middle
    return alike
