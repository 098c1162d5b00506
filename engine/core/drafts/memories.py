"""Token memories of jobs and of kinds of jobs, bounded in tokens; the least recent are forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.core.drafts.token_index import TokenIndex

Scope = tuple[str, ...]
"""Key of a memory; memories with different scopes are never mixed."""


class Memory:
    """Indexes of one job, or of one kind of jobs."""

    def __init__(self, longest: int) -> None:
        """``longest``: tokens of the longest context."""
        self._longest = longest
        self.index = TokenIndex(longest)
        self.older: TokenIndex | None = None
        """The previous index of a kind, kept until the next ``turn_over``."""
        self.user: str | None = None
        """Id of the request that extends it; of concurrent turns of a job only the first one does."""
        self.is_forgotten = False

    def __len__(self) -> int:
        return len(self.index) + (len(self.older) if self.older is not None else 0)

    @property
    def indexes(self) -> tuple[TokenIndex, ...]:
        return (self.index,) if self.older is None else (self.index, self.older)

    def turn_over(self) -> None:
        """Begin a new index, and keep the previous one until the next call."""
        self.older = self.index
        self.index = TokenIndex(self._longest)

    def restart(self) -> None:
        """Forget all tokens."""
        self.older = None
        self.index = TokenIndex(self._longest)


class Memories:
    """Memories by scope."""

    def __init__(self, max_memories: int, max_tokens: int, longest: int) -> None:
        self._max_memories = max_memories
        self._max_tokens = max_tokens
        self._longest = longest
        self._by_scope: OrderedDict[Scope, Memory] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_scope)

    def get(self, scope: Scope) -> Memory | None:
        """The memory of a scope, if there is one."""
        return self._by_scope.get(scope)

    def open(self, scope: Scope) -> Memory:
        """The memory of a scope, made if need be and marked as the most recent."""
        memory = self._by_scope.get(scope)
        if memory is None:
            memory = self._by_scope[scope] = Memory(self._longest)
        self._by_scope.move_to_end(scope)
        self._make_room(memory)
        return memory

    def extend(self, memory: Memory, token_ids: Sequence[int]) -> None:
        """Add tokens to a memory, and forget others if there are too many."""
        memory.index.extend(token_ids)
        self.num_tokens += len(token_ids)
        self._make_room(memory)

    def turn_over(self, memory: Memory) -> None:
        """Forget the older half of a memory."""
        num_tokens = len(memory)
        memory.turn_over()
        self.num_tokens -= num_tokens - len(memory)

    def cut(self, memory: Memory, num_tokens: int) -> None:
        """Keep only the first ``num_tokens`` tokens of a job."""
        self.num_tokens -= len(memory.index) - num_tokens
        memory.index.cut(num_tokens)

    def restart(self, memory: Memory) -> None:
        """Forget all tokens of a memory, but keep its scope."""
        self.num_tokens -= len(memory)
        memory.restart()

    def forget(self, scope: Scope) -> None:
        """Forget a memory."""
        memory = self._by_scope.pop(scope, None)
        if memory is not None:
            self.num_tokens -= len(memory)
            memory.restart()
            memory.is_forgotten = True

    def _make_room(self, used: Memory) -> None:
        while len(self._by_scope) > self._max_memories or self.num_tokens > self._max_tokens:
            scope, memory = next(iter(self._by_scope.items()))
            if memory is used:
                return
            self.forget(scope)
