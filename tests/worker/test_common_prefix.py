"""The common prefix of a step's sequences, found in the block tables of plans by the real scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import pytest

from engine.config.engine_config import SchedulerConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.policy import FcfsPolicy
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup, groups_of
from engine.records.sampling_params import SamplingParams
from engine.worker import common_prefix
from engine.worker.common_prefix import CommonPrefix, PrefixFinder
from engine.worker.request_rows import RequestRows, StepRows

BLOCK_SIZE, UNIT, MIN_TOKENS, MIN_SEQS = 2, 4, 8, 3
MAX_NUM_SEQS, MAX_MODEL_LEN = 8, 64
HYBRID = groups_of([None, 6])
"""A group of layers with full attention, and one with a window."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_prefix, "MIN_TOKENS", MIN_TOKENS)
    monkeypatch.setattr(common_prefix, "MIN_SEQS", MIN_SEQS)


class Steps:
    """The scheduler's plans, applied to the rows of a worker with made-up tokens."""

    def __init__(self, num_blocks: int = 400, groups: Sequence[KVCacheGroup] = ONE_FULL_GROUP) -> None:
        limits = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=32)
        self.scheduler = Scheduler(
            limits,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            policy=FcfsPolicy(),
            kv_cache_groups=groups,
        )
        self.rows = RequestRows(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, 100, len(groups))
        self.finder = self.new_finder()
        self.requests: dict[str, Request] = {}
        self._ids = count()

    def new_finder(self) -> PrefixFinder:
        return PrefixFinder(self.rows, BLOCK_SIZE, [0], UNIT)

    def add(self, prompt: list[int], max_tokens: int = 20) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        hasher = self.scheduler.request_block_hasher
        request = Request(f"r{next(self._ids)}", prompt, params, 0.0, block_hasher=hasher)
        self.requests[request.request_id] = request
        self.scheduler.add_request(request, 0.0)
        return request.request_id

    def end(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED, 0.0)

    def step(self) -> tuple[StepRows, SchedulerOutput, CommonPrefix | None] | None:
        """Runs one step; returns None if there was nothing to compute."""
        plan = self.scheduler.schedule(0.0)
        self.rows.update(plan)
        if not plan.total_num_scheduled_tokens:
            self.scheduler.update_from_output(plan, ModelRunnerOutput([], []), 0.0)
            return None
        step = self.rows.step_rows(plan, writes_first=True)
        prefix = self.finder.find(plan, step)
        samples = set(step.sample_seqs.tolist())
        tokens = [[seq % 100] if seq in samples else [] for seq in range(len(step.rows))]
        rows = step.rows[step.sample_seqs]
        self.rows.add_tokens(rows)
        self.scheduler.update_from_output(plan, ModelRunnerOutput(step.req_ids, tokens), 0.0)
        return step, plan, prefix

    def decode(self, prompts: Sequence[list[int]]) -> tuple[StepRows, CommonPrefix | None]:
        """The first step in which all of these decode; the first prompt is computed before the others."""
        self.add(prompts[0])
        while self.requests["r0"].num_output_tokens == 0:
            self.step()
        for prompt in prompts[1:]:
            self.add(prompt)
        while True:
            done = self.step()
            assert done is not None
            step, _, prefix = done
            if step.num_uniform == len(prompts):
                return step, prefix

    def tokens_of(self, step: StepRows, seq: int) -> list[int]:
        return self.requests[step.req_ids[seq]].all_token_ids


SYSTEM = [*range(40, 55)]
"""15 tokens: 7 blocks and one token."""


def test_what_all_begin_with() -> None:
    """The prefix has whole units of whole blocks."""
    steps = Steps()
    _, prefix = steps.decode([[*SYSTEM, 90 + i, 7] for i in range(4)])
    assert prefix is not None
    assert prefix.num_tokens == 12
    assert prefix.has_it.all()


def test_who_begins_otherwise_stands_aside() -> None:
    """At least half of the sequences must have the prefix."""
    others = [[1] * 13, [2] * 14]
    steps = Steps()
    step, prefix = steps.decode([*([*SYSTEM, i] for i in range(3)), *others])
    assert prefix is not None
    for seq, has_it in enumerate(prefix.has_it.tolist()):
        assert has_it == (steps.tokens_of(step, seq)[:12] == SYSTEM[:12])
    assert prefix.has_it.sum() == 3
    assert Steps().decode([*([*SYSTEM, i] for i in range(3)), *others, [3] * 13, [4] * 13])[1] is None


@pytest.mark.parametrize(
    ("prompts", "num_tokens"),
    [
        pytest.param([[*SYSTEM, 1], [*SYSTEM, 2]], None, id="few"),
        pytest.param([[*SYSTEM[:9], i, 5, 5, 5] for i in range(10, 13)], 8, id="just"),
        pytest.param([[*SYSTEM[:7], i, 5, 5, 5, 5] for i in range(10, 13)], None, id="short"),
        pytest.param([[i] * 20 for i in range(4)], None, id="none"),
    ],
)
def test_few_or_little_is_not_worth_a_pass(prompts: list[list[int]], num_tokens: int | None) -> None:
    found = Steps().decode(prompts)[1]
    assert (None if found is None else found.num_tokens) == num_tokens


@pytest.mark.parametrize("groups", [ONE_FULL_GROUP, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("seed", range(4))
def test_at_every_step(seed: int, groups: Sequence[KVCacheGroup]) -> None:
    """With arrivals, ends and preemptions, the prefix is in the tables of its sequences, and was computed
    before the step; a new search finds the same sequences, and a prefix only if this one does."""
    numbers = random.Random(seed)
    steps = Steps(num_blocks=45 * len(groups), groups=groups)
    systems = [[numbers.randrange(100) for _ in range(15)] for _ in range(2)]
    num_found = num_steps = 0
    for _ in range(250):
        if numbers.random() < 0.25 and len(steps.scheduler.waiting) < 3:
            prompt = systems[numbers.random() < 0.2] + numbers.choices(range(100), k=numbers.randrange(1, 9))
            steps.add(prompt, max_tokens=numbers.randrange(2, 30))
        if numbers.random() < 0.03 and steps.scheduler.running:
            steps.end(numbers.choice(steps.scheduler.running).request_id)
        done = steps.step()
        if done is None:
            continue
        step, plan, prefix = done
        anew = steps.new_finder().find(plan, step)
        assert (prefix is None) == (anew is None)
        num_steps += 1
        if prefix is None or anew is None:
            continue
        num_found += 1
        assert prefix.has_it.tolist() == anew.has_it.tolist()
        assert MIN_TOKENS <= prefix.num_tokens <= anew.num_tokens
        assert prefix.num_tokens % UNIT == 0
        num_blocks = prefix.num_tokens // BLOCK_SIZE
        wanted = steps.rows.block_tables[prefix.row, : num_blocks * len(groups) : len(groups)]
        for seq in prefix.has_it.nonzero()[0]:
            table = steps.rows.block_tables[step.rows[seq], : num_blocks * len(groups) : len(groups)]
            assert table.tolist() == wanted.tolist()
            assert prefix.num_tokens <= step.seq_lens[seq] - step.query_lens[seq]
    assert 20 < num_found < num_steps
    assert sum(request.num_preemptions for request in steps.requests.values())
