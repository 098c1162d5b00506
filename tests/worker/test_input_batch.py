"""The worker's rows, built from deltas alone, always say what the scheduler knows in full."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.core.scheduler import Scheduler
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.policy import FcfsPolicy
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.worker.input_batch import InputBatch, StepInputs

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
MAX_NUM_SEQS = 4

Action = tuple[str, int]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)


class Shadow:
    """A real scheduler and an input batch fed with its plans; sampled tokens are made up."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=12),
            block_size=BLOCK_SIZE,
            num_blocks=17,
            max_model_len=MAX_MODEL_LEN,
            policy=FcfsPolicy(),
        )
        self.batch = InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size=1000)
        self.num_added = 0
        self.num_preemptions = 0

    def add(self, length: int) -> None:
        prompt = [7 * (i // BLOCK_SIZE) + i + length % 3 for i in range(length)]
        params = SamplingParams(max_tokens=9)
        hasher = self.scheduler.request_block_hasher
        self.scheduler.add_request(
            Request(f"r{self.num_added}", prompt, params, 0.0, block_hasher=hasher), 0.0
        )
        self.num_added += 1

    def abort(self, choice: int) -> None:
        alive = list(self.scheduler.requests)
        if alive:
            victim = alive[choice % len(alive)]
            self.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED, 0.0)

    def step(self) -> None:
        plan = self.scheduler.schedule(0.0)
        self.num_preemptions += len(plan.preempted_req_ids)
        self.batch.update(plan)
        if not plan.total_num_scheduled_tokens:
            return
        inputs = self.batch.step_inputs(plan)
        self.check(plan, inputs)
        sampled: list[list[int]] = [[] for _ in inputs.req_ids]
        tokens = inputs.sample_rows + 500
        self.batch.append_sampled(inputs.sample_rows, tokens)
        for seq, token in zip(inputs.sample_seqs.tolist(), tokens.tolist(), strict=True):
            sampled[seq] = [token]
        self.scheduler.update_from_output(plan, ModelRunnerOutput(inputs.req_ids, sampled), 0.0)

    def check(self, plan: SchedulerOutput, inputs: StepInputs) -> None:
        """Compare every array with the scheduler's own requests and block tables."""
        attention = inputs.attention
        assert sorted(inputs.req_ids) == sorted(plan.num_scheduled_tokens)
        assert attention.query_lens[: attention.num_decodes].tolist() == [1] * attention.num_decodes
        start, ready = 0, []
        for seq, req_id in enumerate(inputs.req_ids):
            request, count = self.scheduler.requests[req_id], plan.num_scheduled_tokens[req_id]
            end = request.num_computed_tokens  # the plan's tokens already count as computed
            positions = list(range(end - count, end))
            part = slice(start, start + count)
            start += count
            assert attention.query_lens[seq] == count
            assert attention.seq_lens[seq] == end
            assert inputs.positions[part].tolist() == positions
            assert inputs.input_ids[part].tolist() == request.all_token_ids[end - count : end]
            blocks = self.scheduler.kv.block_ids(req_id)[: -(-end // BLOCK_SIZE)]
            assert attention.block_tables[seq, : len(blocks)].tolist() == blocks
            assert attention.slot_blocks[part].tolist() == [blocks[p // BLOCK_SIZE] for p in positions]
            assert attention.slot_offsets[part].tolist() == [p % BLOCK_SIZE for p in positions]
            if end == request.num_tokens:
                ready.append((seq, start - 1))
        assert list(zip(inputs.sample_seqs.tolist(), inputs.sample_tokens.tolist(), strict=True)) == ready


@given(ACTIONS)
def test_rows_follow_the_scheduler(actions: list[Action]) -> None:
    """Through adds, aborts, chunks, hits and preemptions each step's arrays are right; no row leaks."""
    shadow = Shadow()
    for kind, value in actions:
        if kind == "add":
            shadow.add(value)
        elif kind == "abort":
            shadow.abort(value)
        else:
            for _ in range(value):
                shadow.step()
    for _ in range(2000):
        if not shadow.scheduler.has_unfinished_requests():
            break
        shadow.step()
    shadow.step()
    assert len(shadow.batch) == 0


def test_preemption_is_part_of_it() -> None:
    """The pool of this test is small enough that requests lose their rows and get them back."""
    shadow = Shadow()
    for length in (14, 15, 16):
        shadow.add(length)
    while shadow.scheduler.has_unfinished_requests():
        shadow.step()
    assert shadow.num_preemptions > 0
