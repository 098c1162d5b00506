"""Simulates one engine by a few events per turn: a fleet of a thousand engines takes minutes.

Like V1 without a policy: turns in the order of their arrival, prompts in chunks together with all decodes,
blocks found by their prefix and evicted by LRU. Approximations: a turn is admitted when its blocks fit for
its whole duration, so none is preempted; and steps between two events are one event, each of the average
length.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from engine.records.lessons import Lesson
from engine.records.messages import EngineCoreOutput, FinishReason, Signal, TurnReceipt
from engine.routing import EngineLoad
from eval.sim.cost_model import StepWork
from eval.sim.event_heap import EventHeap
from eval.sim.replicas.prefix_tree import Node, PrefixTree
from eval.sim.replicas.replica import PausedTurn, PoolUse, ReplicaConfig, ReplicaCounts
from eval.sim.sim_request import SimRequest


@dataclass(slots=True, eq=False)
class _Turn:
    """A running request."""

    request: SimRequest
    end: Node
    """The end of its chain in the prefix cache."""
    num_cached_blocks: int
    """Blocks of that chain."""
    num_reserved: int
    """Further blocks that it will fill."""
    num_computed: int
    num_left: int
    """Prompt tokens that are yet to be computed."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.request.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens


@dataclass(slots=True, eq=False)
class _Steps:
    """Equal steps that run one after another."""

    begun_s: float
    each_s: float
    number: int

    @property
    def end_s(self) -> float:
        return self.begun_s + self.number * self.each_s


class CoarseReplica:
    """Computes a run of decode steps at once; a step that computes prompts is a run by itself."""

    wants_signals: ClassVar[bool] = False

    is_up = True

    def __init__(
        self,
        config: ReplicaConfig,
        events: EventHeap,
        on_outputs: Callable[[Iterable[EngineCoreOutput]], None],
    ) -> None:
        """Calls ``on_outputs`` at a step's end with the requests that ended in it."""
        self._config = config
        self._events = events
        self._on_outputs = on_outputs
        self._cache = PrefixTree(config.num_blocks)
        self._waiting: deque[SimRequest] = deque()
        self._prefilling: list[_Turn] = []
        self._num_fetching = 0
        """Turns whose KV is being fetched."""
        self._fetched_s = 0.0
        """When all requested KV will have arrived."""
        self._decoding: list[tuple[int, int, _Turn]] = []
        """A heap by the number of the step in which a turn ends."""
        self._order = count()
        self._context = 0
        """Tokens whose KV the next step's decodes read."""
        self._num_reserved = 0
        self._steps: _Steps | None = None
        self._counts = ReplicaCounts()

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + self._num_running

    @property
    def load(self) -> EngineLoad:
        num_waiting = len(self._waiting)
        num_running = self._num_running
        return EngineLoad(
            num_waiting + num_running,
            num_running,
            num_waiting,
            self._config.num_blocks,
            self._num_free_blocks,
        )

    def add_request(self, request: SimRequest) -> None:
        self._waiting.append(request)
        if self._steps is None:
            self._begin()
        elif len(self._waiting) == 1 and self._steps.number > 1 and self._fits(request):
            self._cut_short(self._steps)

    def num_new_tokens(self, request: SimRequest) -> int:
        """Tokens of its prompt whose KV is not cached here now."""
        _, depth = self._cache.match(request.block_hashes)
        return request.num_prompt_tokens - depth * self._config.block_size

    def take_lesson(self) -> Lesson | None:
        return None

    def signal(self, signal: Signal) -> TurnReceipt | None:
        raise AssertionError("it wants no signals")

    def pool_use(self) -> PoolUse:
        num_held = self._cache.num_held + self._num_reserved
        num_cached = min(self._cache.num_blocks - self._cache.num_held, self._config.num_blocks - num_held)
        return PoolUse(
            running=num_held,
            pinned=0,
            cached=num_cached,
            free=self._config.num_blocks - num_held - num_cached,
            num_running=self._num_running,
            num_waiting=len(self._waiting),
        )

    def paused_turns(self) -> list[PausedTurn]:
        raise NotImplementedError("only exact replicas are replaced")

    def restart(self) -> None:
        raise NotImplementedError("only exact replicas are replaced")

    def close(self) -> ReplicaCounts:
        self._counts.num_used_blocks = self._cache.num_held + self._num_reserved
        return self._counts

    # ---- admission ----

    @property
    def _num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + self._num_fetching

    @property
    def _num_free_blocks(self) -> int:
        return self._config.num_blocks - self._cache.num_held - self._num_reserved

    def _fits(self, request: SimRequest) -> bool:
        """Whether a turn could be admitted if nothing of it is cached."""
        may_run = self._num_running < self._config.scheduler.max_num_seqs
        return may_run and self._blocks_of(len(request.all_token_ids)) <= self._num_free_blocks

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _admit(self) -> _Turn | None:
        """Admits the first waiting turn, if its blocks fit now."""
        request = self._waiting[0]
        size = self._config.block_size
        prompt = request.block_hashes
        # As in V1, the last token of a prompt is computed even if all of it is cached.
        node, depth = self._cache.match(prompt[: (request.num_prompt_tokens - 1) // size])
        num_new = self._blocks_of(len(request.all_token_ids)) - depth
        if num_new + self._cache.num_not_held(node) > self._num_free_blocks:
            return None
        self._waiting.popleft()
        self._cache.hold(node)
        end = self._cache.append(node, prompt[depth:])
        num_left = request.num_prompt_tokens - depth * size
        turn = _Turn(request, end, len(prompt), depth + num_new - len(prompt), depth * size, num_left)
        self._num_reserved += turn.num_reserved
        if not request.is_prefilled:
            request.first_scheduled_time = self._events.now
            request.num_cached_tokens = depth * size
        return turn

    def _fetch(self, turn: _Turn) -> None:
        """Fetches the KV from another replica, after earlier fetches. The last token of the prompt is
        computed here."""
        cost = self._config.cost
        num_fetched = turn.num_left - 1
        turn.num_computed = turn.num_computed + num_fetched
        turn.num_left = 1
        takes_s = num_fetched * cost.kv_bytes_per_token / self._config.kv_transfer_bandwidth
        self._fetched_s = max(self._fetched_s, self._events.now) + takes_s
        self._num_fetching += 1
        self._events.at(self._fetched_s, lambda: self._have(turn))

    def _have(self, turn: _Turn) -> None:
        self._num_fetching -= 1
        self._prefilling.append(turn)
        if self._steps is None:
            self._begin()
        elif self._steps.number > 1:
            self._cut_short(self._steps)

    # ---- steps ----

    def _begin(self) -> None:
        """Begins the next steps, if there is anything to run."""
        work = self._prefills()
        num_decodes = len(self._decoding)
        number = 1
        if num_decodes and not work.prefills:
            number = self._decoding[0][0] - self._counts.num_steps
        work.num_decodes = num_decodes
        work.decode_context_tokens = self._context + num_decodes * (number - 1) // 2
        if num_decodes or work.prefills:
            each_s = self._config.cost.step_s(work)
            self._run(_Steps(self._events.now, each_s, number))

    def _run(self, steps: _Steps) -> None:
        self._steps = steps
        self._events.at(max(steps.end_s, self._events.now), lambda: self._end(steps))

    def _prefills(self) -> StepWork:
        """Plans the next chunks of prompts."""
        limits = self._config.scheduler
        work = StepWork()
        budget = limits.max_num_batched_tokens - len(self._decoding)
        for turn in self._prefilling:
            budget -= _compute(turn, budget, work)
        while budget > 0 and self._waiting and self._num_running < limits.max_num_seqs:
            if (admitted := self._admit()) is None:
                break
            if admitted.request.is_prefilled:
                self._fetch(admitted)
                continue
            self._prefilling.append(admitted)
            budget -= _compute(admitted, budget, work)
        self._counts.num_computed_tokens += sum(num_tokens for num_tokens, _ in work.prefills)
        return work

    def _cut_short(self, steps: _Steps) -> None:
        """Ends the run of steps with the current step: there is a prompt for the next one."""
        done = int((self._events.now - steps.begun_s) / steps.each_s) + 1
        if done < steps.number:
            self._run(_Steps(steps.begun_s, steps.each_s, done))

    def _end(self, steps: _Steps) -> None:
        if steps is not self._steps:
            return  # was cut short
        self._steps = None
        self._counts.num_steps += steps.number
        self._context += steps.number * len(self._decoding)
        ended = []
        while self._decoding and self._decoding[0][0] <= self._counts.num_steps:
            turn = heapq.heappop(self._decoding)[2]
            self._context -= turn.num_tokens
            ended.append(self._finish(turn))
        prefilled = [turn for turn in self._prefilling if not turn.num_left]
        self._prefilling = [turn for turn in self._prefilling if turn.num_left]
        for turn in prefilled:
            turn.request.first_token_time = self._events.now
            if turn.num_output_tokens == 1:
                ended.append(self._finish(turn))
            else:
                self._decode(turn)
        if ended:
            self._on_outputs(ended)
        if self._steps is None:
            self._begin()

    def _decode(self, turn: _Turn) -> None:
        """Decodes from the next step on, which also reads the KV of the first token of its output."""
        last_step = self._counts.num_steps + turn.num_output_tokens - 1
        heapq.heappush(self._decoding, (last_step, next(self._order), turn))
        self._context += turn.request.num_prompt_tokens + 1

    def _finish(self, turn: _Turn) -> EngineCoreOutput:
        request = turn.request
        self._num_reserved -= turn.num_reserved
        # The KV of the last token was never computed.
        num_blocks = (turn.num_tokens - 1) // self._config.block_size
        end = self._cache.append(turn.end, request.chain[turn.num_cached_blocks : num_blocks])
        self._cache.release(end)
        request.num_tokens = turn.num_tokens
        return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.LENGTH)


def _compute(turn: _Turn, budget: int, work: StepWork) -> int:
    """Computes the next chunk of a prompt, of at most ``budget`` tokens; returns its number of tokens."""
    num_tokens = min(turn.num_left, budget)
    if num_tokens > 0:
        work.prefills.append((num_tokens, turn.num_computed))
        turn.num_computed += num_tokens
        turn.num_left -= num_tokens
    return max(num_tokens, 0)
