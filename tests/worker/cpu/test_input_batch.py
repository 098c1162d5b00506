"""The worker's rows, built only from deltas, always equal the scheduler's full state."""

from __future__ import annotations

from hypothesis import given

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.worker.cpu.input_batch import InputBatch, StepInputs
from tests.worker.shadow import (
    ACTIONS,
    BLOCK_SIZE,
    LIMITS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Action,
    SchedulerShadow,
)


class Shadow(SchedulerShadow):
    """An input batch that gets the plans; sampled tokens are made up."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.batch = InputBatch(LIMITS.max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
        self.num_read_at_once = 0
        """The number of blocks that were read in the step that filled them."""

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
        """Compares every array with the scheduler's own requests and block tables."""
        attention = inputs.attention
        assert sorted(inputs.req_ids) == sorted(plan.num_scheduled_tokens)
        assert attention.query_lens[: attention.num_decodes].tolist() == [1] * attention.num_decodes
        self.check_order(inputs)
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

    def check_order(self, inputs: StepInputs) -> None:
        """A sequence that reads a block filled in this step comes after the one that fills it, and is a
        decode only if the other one is."""
        attention = inputs.attention
        ends = attention.seq_lens // BLOCK_SIZE
        starts = (attention.seq_lens - attention.query_lens) // BLOCK_SIZE
        tables = attention.block_tables
        fills: dict[int, int] = {}
        for seq, table in enumerate(tables):
            fills |= dict.fromkeys(table[starts[seq] : ends[seq]].tolist(), seq)
        for seq, table in enumerate(tables):
            for block in table[: starts[seq]].tolist():
                filled_by = fills.get(block)
                if filled_by is not None:
                    self.num_read_at_once += 1
                    assert filled_by < max(seq, attention.num_decodes)


@given(ACTIONS)
def test_rows_follow_the_scheduler(actions: list[Action]) -> None:
    """Through adds, aborts, chunks, hits and preemptions each step's arrays are right; no row leaks."""
    shadow = Shadow()
    shadow.play(actions)
    assert len(shadow.batch) == 0


def test_preemption_is_part_of_it() -> None:
    """The pool is small enough that requests lose their rows and get them back."""
    shadow = Shadow()
    shadow.crowd()


def test_twins_read_what_the_first_of_them_computes() -> None:
    """Of three equal prompts of a block and one token in one step, the second and third compute one token
    each, and are not decodes."""
    shadow = Shadow()
    for _ in range(3):
        shadow.add(9)
    shadow.step()
    assert shadow.num_read_at_once == 4
    shadow.play([])
