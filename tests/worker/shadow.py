"""A real scheduler whose plans the worker's rows follow, and random actions of its users."""

from __future__ import annotations

from hypothesis import strategies as st

from engine.config.engine_config import SchedulerConfig
from engine.core.policy import FcfsPolicy
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.records.sampling_params import SamplingParams

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
VOCAB_SIZE = 1000
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12)

Action = tuple[str, int]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)


class SchedulerShadow:
    """Has a pool so small that requests lose their rows and get them back."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self.scheduler = Scheduler(
            limits, block_size=BLOCK_SIZE, num_blocks=17, max_model_len=MAX_MODEL_LEN, policy=FcfsPolicy()
        )
        self.num_added = 0
        self.num_preemptions = 0

    def add(self, length: int) -> None:
        prompt = [7 * (i // BLOCK_SIZE) + i + length % 3 for i in range(length)]
        hasher = self.scheduler.request_block_hasher
        params = SamplingParams(max_tokens=9)
        request = Request(f"r{self.num_added}", prompt, params, 0.0, block_hasher=hasher)
        self.scheduler.add_request(request, 0.0)
        self.num_added += 1

    def abort(self, choice: int) -> None:
        alive = list(self.scheduler.requests)
        if alive:
            victim = alive[choice % len(alive)]
            self.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED, 0.0)

    def step(self) -> None:
        """Plans, checks the rows, and returns a result to the scheduler."""
        raise NotImplementedError

    def play(self, actions: list[Action]) -> None:
        """Does all actions, then steps until all requests have ended and the rows have processed that."""
        for kind, value in actions:
            if kind == "add":
                self.add(value)
            elif kind == "abort":
                self.abort(value)
            else:
                for _ in range(value):
                    self.step()
        for _ in range(2000):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        for _ in range(2):
            self.step()

    def crowd(self) -> None:
        """Runs requests that do not fit together, until all have ended."""
        self.play([("add", length) for length in (14, 15, 16)])
        assert self.num_preemptions > 0
