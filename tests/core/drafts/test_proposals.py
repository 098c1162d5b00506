"""Drafts go to running requests whose tokens are all known, as long as they pay."""

from __future__ import annotations

from engine.core.drafts.lengths import StepCosts
from engine.core.drafts.ngram import NgramDrafter
from engine.core.drafts.proposals import DraftProposals
from tests.core.drafts.requests import make_request

REPEATED = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]


def test_only_requests_whose_tokens_are_computed_get_drafts() -> None:
    """A request without output, or one that recomputes its prompt, gets none."""
    proposals = DraftProposals(NgramDrafter(2, 3), 4)
    ready = make_request("ready", REPEATED[:8], REPEATED[8:])
    silent = make_request("silent", REPEATED)
    resumed = make_request("resumed", REPEATED[:8], REPEATED[8:])
    resumed.num_computed_tokens = 2
    assert proposals.propose([ready, silent, resumed]) == {"ready": [4, 5, 6, 7]}


def test_drafts_are_off_by_themselves_under_load() -> None:
    """One request gets drafts, sixteen get none: each row then costs as much as it gains."""
    costs = StepCosts([(1, 1.0), (8, 1.1), (16, 2.0), (64, 8.0)])
    proposals = DraftProposals(NgramDrafter(2, 3), 4, costs)
    requests = [make_request(str(i), REPEATED[:8], REPEATED[8:]) for i in range(16)]
    assert proposals.propose(requests[:1]) == {"0": [4, 5, 6, 7]}
    assert proposals.propose(requests) == {}


def test_a_step_has_so_many_rows_at_most() -> None:
    """The likeliest drafts of all requests fill the rows."""
    proposals = DraftProposals(NgramDrafter(2, 3), 4, max_rows=8)
    requests = [make_request(str(i), REPEATED[:8], REPEATED[8:]) for i in range(3)]
    assert proposals.propose(requests) == {"0": [4, 5], "1": [4, 5], "2": [4]}


def test_n_grams_are_looked_up_at_their_first_place() -> None:
    """The longest n-gram is looked up at its first position, as in V1; none below the minimum length."""
    drafter = NgramDrafter(2, 3)
    request = make_request("r", [1, 2, 9, 5, 1, 2, 8, 5, 1, 2, 7], [5, 1, 2])
    assert drafter.propose(request, 2).token_ids == [8, 5]
    assert drafter.propose(make_request("s", [1, 2, 3], [2]), 2).token_ids == []
    assert drafter.propose(make_request("t", [4, 4, 4], [4]), 3).token_ids == [4]
