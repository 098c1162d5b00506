"""Draft counts include drafts whose outcome is known, and the tokens that they added."""

from __future__ import annotations

import pytest

from engine.config.engine_config import SchedulerConfig
from engine.core.outputs import ModelRunnerOutput
from engine.core.policy import FcfsPolicy
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.records.reported_stats import SpecDecodingStats
from engine.records.row_failures import NOT_NUMBERS
from engine.records.sampling_params import SamplingParams

END = 99
"""The stop token."""
DRAFTS = [21, 22, 23]


def verified(
    sampled: list[int], *, drafts: list[int] = DRAFTS, failed: str | None = None
) -> tuple[Request, Scheduler]:
    """A request whose second step verifies three drafts and samples these tokens."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4),
        block_size=4,
        num_blocks=17,
        max_model_len=64,
        policy=FcfsPolicy(),
        enable_prefix_caching=False,
    )
    params = SamplingParams(max_tokens=20, stop_token_ids=[END])
    request = Request("r", [1, 2, 3, 4, 5], params, 0.0)
    scheduler.add_request(request, 0.0)
    scheduler.update_from_output(scheduler.schedule(0.0), ModelRunnerOutput(["r"], [[20]]), 0.0)
    scheduler.update_draft_token_ids({"r": drafts}, 1.0)
    plan = scheduler.schedule(1.0)
    assert plan.scheduled_spec_decode_tokens == {"r": drafts}
    failures = {"r": failed} if failed else {}
    scheduler.update_from_output(plan, ModelRunnerOutput(["r"], [sampled], failed=failures), 1.0)
    return request, scheduler


@pytest.mark.parametrize(
    ("sampled", "num_accepted"),
    [
        ([30], 0),
        ([21, 30], 1),
        ([21, 22, 23, 30], 3),
        ([21, END], 1),
        ([END], 0),
    ],
    ids=["none", "one", "all", "one and the end", "the end"],
)
def test_accepted_is_what_a_step_brings_beyond_one_token(sampled: list[int], num_accepted: int) -> None:
    """Accepted tokens are those beyond one per step, so an answer's tokens minus them are its steps."""
    request, scheduler = verified(sampled)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, num_accepted)
    assert request.num_output_steps == 2
    stats = scheduler.make_stats().spec_decoding
    assert stats == SpecDecodingStats(1, 3, num_accepted, [1] * num_accepted)
    assert scheduler.make_stats().spec_decoding is None


def test_what_lies_behind_the_end_of_an_answer_is_not_accepted() -> None:
    """Verified drafts after the end of an answer do not count as accepted."""
    request, _ = verified([21, END, 23, 30], drafts=[21, END, 23])
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.num_accepted_tokens == 1
    assert request.num_output_steps == 2


def test_a_step_without_a_token_brings_nothing() -> None:
    """The worker could sample no token."""
    request, _ = verified([0], failed=NOT_NUMBERS)
    assert request.status is RequestStatus.FINISHED_ERROR
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, 0)


def test_drafts_of_an_aborted_request_are_not_counted() -> None:
    """The outcome of these drafts is never known."""
    request, scheduler = verified([21, 30])
    scheduler.update_draft_token_ids({"r": DRAFTS}, 2.0)
    plan = scheduler.schedule(2.0)
    scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED, 2.0)
    scheduler.update_from_output(plan, ModelRunnerOutput(["r"], [[21, 22, 30]]), 2.0)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, 1)
    assert scheduler.make_stats().spec_decoding == SpecDecodingStats(1, 3, 1, [1])
