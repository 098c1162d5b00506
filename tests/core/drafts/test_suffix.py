"""The suffix drafter: what it proposes, for which requests, and what it keeps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.speculative import SpeculativeConfig
from engine.core.drafts import suffix
from engine.core.drafts.suffix import SuffixDrafter
from tests.core.drafts.requests import job_of, make_request, say

SYSTEM = [100, 101, 102, 103]
FILE = list(range(200, 240))


def make_drafter(**fields: float) -> SuffixDrafter:
    return SuffixDrafter(SpeculativeConfig(**fields), job_of)  # type: ignore[arg-type]


def test_a_job_writes_back_what_it_has_read() -> None:
    """A turn that begins to repeat a tool result of its job gets the rest proposed."""
    drafter = make_drafter()
    first = make_request("a1", [*SYSTEM, 1], [7, 8], job="a")
    drafter.propose(first, 16)
    drafter.ended(first)
    second = make_request("a2", [*first.all_token_ids, *FILE], [9, *FILE[:4]], job="a")
    proposal = drafter.propose(second, 16)
    assert proposal.token_ids == FILE[4 : 4 + len(proposal.token_ids)]
    assert len(proposal.token_ids) >= 3
    assert list(proposal.chances) == sorted(proposal.chances, reverse=True)
    assert proposal.chances[-1] >= 0.1


def test_a_kind_of_jobs_learns_from_its_jobs() -> None:
    """Another job with the same beginning gets the first job's output proposed, without having read it."""
    drafter = make_drafter()
    first = make_request("a1", [*SYSTEM, 1], FILE, job="a")
    drafter.propose(first, 16)
    drafter.ended(first)
    sibling = make_request("b1", [*SYSTEM, 2], FILE[:4], job="b")
    assert drafter.propose(sibling, 2).token_ids == FILE[4:6]
    stranger = make_request("c1", [5, 5, 5, 5, 2], FILE[:4], job="c")
    assert drafter.propose(stranger, 2).token_ids == []


@pytest.mark.parametrize("other", [{"tenant": "x"}, {"owner": "x"}, {"salt": "x"}])
def test_nothing_is_proposed_from_another_tenants_text(other: dict[str, str]) -> None:
    """Not even a job with the same name and the same first tokens gets another tenant's text."""
    drafter = make_drafter()
    first = make_request("a1", [*SYSTEM, 1, *FILE], FILE, job="a")
    drafter.propose(first, 16)
    drafter.ended(first)
    foreign = make_request("a2", [*SYSTEM, 1], FILE[:6], job="a", **other)
    assert drafter.propose(foreign, 16).token_ids == []


def test_a_branch_forgets_what_it_left() -> None:
    """A turn from an earlier point gets nothing proposed that its job said after that point."""
    drafter = make_drafter()
    first = make_request("a1", [*SYSTEM, 1, *FILE], [7], job="a")
    drafter.propose(first, 16)
    drafter.ended(first)
    branch = make_request("a2", [*SYSTEM, 2], FILE[:6], job="a")
    assert drafter.propose(branch, 16).token_ids == []


def test_two_turns_of_a_job_at_once_do_not_disturb_each_other() -> None:
    """The second concurrent turn has a separate index, which ends with it; the job keeps the first one's."""
    drafter = make_drafter()
    left = make_request("a1", [*SYSTEM, *FILE], [7], job="a")
    right = make_request("a2", [*SYSTEM, *FILE[::-1]], [8], job="a")
    for turn in (left, right):
        drafter.propose(turn, 16)
    say(left, FILE[:4])
    say(right, FILE[::-1][:4])
    assert drafter.propose(left, 1).token_ids == [FILE[4]]
    assert drafter.propose(right, 1).token_ids == [FILE[::-1][4]]
    drafter.ended(right)
    drafter.ended(left)
    third = make_request("a3", [*left.all_token_ids, 3], [FILE[10]], job="a")
    assert drafter.propose(third, 1).token_ids == [FILE[11]]


def test_a_long_prompt_is_indexed_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each proposal indexes at most one portion; before the whole prompt is indexed nothing is proposed."""
    monkeypatch.setattr(suffix, "MAX_NEW_TOKENS", 16)
    drafter = make_drafter()
    request = make_request("a1", [*SYSTEM, *FILE], FILE[:4], job="a")
    sizes, proposals = [0], list[list[int]]()
    while not proposals or not proposals[-1]:
        proposals.append(drafter.propose(request, 4).token_ids)
        sizes.append(drafter.num_tokens)
    assert max(b - a for a, b in pairwise(sizes)) == 16
    assert len(proposals) == 3
    assert proposals[-1] == FILE[4:8][: len(proposals[-1])]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of all jobs stay below the limits, and the latest jobs are kept."""
    monkeypatch.setattr(suffix, "MAX_TOKENS", 300)
    monkeypatch.setattr(suffix, "MAX_TOKENS_OF_KINDS", 200)
    monkeypatch.setattr(suffix, "MAX_KIND_TOKENS", 80)
    drafter = make_drafter()
    numbers = random.Random(1)
    for job in range(60):
        prompt = [job % 5] * 4 + numbers.choices(range(1000), k=60)
        request = make_request(f"r{job}", prompt, numbers.choices(range(1000), k=30), job=f"j{job}")
        drafter.propose(request, 4)
        drafter.ended(request)
        assert drafter.num_tokens <= 300 + 200 + 31
    again = make_request("again", [*request.all_token_ids, 5], prompt[10:14], job="j59")
    assert drafter.propose(again, 1).token_ids == [prompt[14]]


def test_only_so_many_jobs_are_remembered() -> None:
    """At most ``suffix_decoding_max_cached_requests`` jobs are kept."""
    drafter = make_drafter(suffix_decoding_max_cached_requests=2)
    for job in "abc":
        request = make_request(job, [ord(job), *FILE], [1], job=job)
        drafter.propose(request, 4)
        drafter.ended(request)
    forgotten = make_request("a2", [ord("a"), *FILE[:3]], [FILE[3]], job="a")
    assert drafter.propose(forgotten, 4).token_ids == []


def test_a_request_without_a_job_leaves_only_what_it_said() -> None:
    """The prompt of a request without a job is forgotten when it ends."""
    drafter = make_drafter()
    request = make_request("r", [*SYSTEM, *FILE], [1, 2, 3])
    drafter.propose(request, 4)
    assert drafter.num_tokens == len(request.all_token_ids)
    drafter.ended(request)
    assert drafter.num_tokens == 4  # The output, and the prompt token before it.


@given(st.data())
def test_the_same_requests_get_the_same_proposals(data: st.DataObject) -> None:
    """Two drafters with the same input agree, and propose at most the requested number."""
    drafters = (make_drafter(), make_drafter())
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=12)
    for number in range(data.draw(st.integers(1, 6))):
        job = data.draw(st.sampled_from("ab"))
        request = make_request(f"{number}", data.draw(tokens), data.draw(tokens), job=job)
        most = data.draw(st.integers(1, 5))
        first, second = (drafter.propose(request, most) for drafter in drafters)
        assert first == second
        assert len(first.token_ids) == len(first.chances) <= most
        assert suffix.NO_TOKEN not in first.token_ids
        for drafter in drafters:
            drafter.ended(request)
    assert drafters[0].num_tokens == drafters[1].num_tokens
