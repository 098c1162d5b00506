"""Requests with a grammar wait for it without blocking others, and end where it ends."""

from __future__ import annotations

from engine.core.outputs import ModelRunnerOutput
from engine.core.request import RequestStatus
from engine.records.messages import FinishReason
from tests.core.engine_room import CountingGrammar, EngineRoom


def test_a_request_that_awaits_its_grammar_holds_nothing_and_nobody() -> None:
    """A later request runs and ends meanwhile; the waiting one takes no block, no slot and no place in the
    queue."""
    room = EngineRoom(max_num_seqs=1)
    request = room.add("first", [1] * 10, awaits_grammar=True)
    room.add("second", [2] * 10)
    for _ in range(10):
        room.step()
    assert room.finished.keys() == {"second"}
    assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert room.scheduler.statistics().num_waiting == room.scheduler.statistics().num_compiling == 1
    room.check_invariants()
    room.scheduler.grammar_compiled(request, CountingGrammar(2), room.clock.now())
    room.run()
    assert room.finished["first"].finish_reason is FinishReason.STOP


def test_a_request_that_awaited_its_grammar_keeps_its_place() -> None:
    """Under fcfs it is served in order of arrival; a request that ended meanwhile leaves nothing."""
    room = EngineRoom(max_num_seqs=1)
    room.add("before", [1] * 10, max_tokens=8)
    room.step()
    room.add("earlier", [2] * 10)
    structured = room.add("structured", [3] * 10, awaits_grammar=True)
    room.add("gone", [4] * 10, awaits_grammar=True)
    room.add("later", [5] * 10)
    room.scheduler.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    room.step()
    room.add("last", [6] * 10)
    room.scheduler.grammar_compiled(structured, CountingGrammar(2), room.clock.now())
    room.check_invariants()
    room.run()
    assert list(room.finished) == ["before", "earlier", "structured", "later", "last"]


def test_a_request_that_ended_while_its_grammar_was_compiled_stays_ended() -> None:
    """The late grammar is ignored, also if another request has the id by then."""
    room = EngineRoom()
    gone = room.add("same", [1] * 10, awaits_grammar=True)
    (output,) = room.scheduler.finish_requests(["same"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    assert output.finish_reason is FinishReason.ABORT
    again = room.add("same", [1] * 10, awaits_grammar=True)
    room.scheduler.grammar_compiled(gone, CountingGrammar(1), room.clock.now())
    assert again.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    room.check_invariants()
    room.scheduler.grammar_compiled(again, CountingGrammar(3), room.clock.now())
    room.run()
    assert room.scheduler.statistics().num_free_blocks == 16


def test_a_complete_grammar_ends_the_request_with_stop() -> None:
    """A grammar that completes with the last allowed token ends with stop; a longer one ends by length."""
    room = EngineRoom()
    lengths = {"shorter": 3, "equal": 4, "longer": 5}
    for request_id, num_tokens in lengths.items():
        request = room.add(request_id, [1] * 5, max_tokens=4, awaits_grammar=True)
        room.scheduler.grammar_compiled(request, CountingGrammar(num_tokens), room.clock.now())
    room.run()
    ends = {i: (room.finished[i].finish_reason, len(room.tokens[i]) - 5) for i in lengths}
    assert ends == {
        "shorter": (FinishReason.STOP, 3),
        "equal": (FinishReason.STOP, 4),
        "longer": (FinishReason.LENGTH, 4),
    }


def test_a_token_that_the_grammar_refuses_ends_only_its_own_request() -> None:
    """It ends with an error that says why; the others of the batch go on."""
    room = EngineRoom()
    request = room.add("refused", [1] * 5, awaits_grammar=True)
    room.scheduler.grammar_compiled(request, CountingGrammar(4, refused_after=1), room.clock.now())
    room.add("plain", [2] * 5)
    room.run()
    assert room.finished["refused"].finish_reason is FinishReason.ERROR
    assert "grammar" in str(room.finished["refused"].stop_reason)
    assert room.finished["plain"].finish_reason is FinishReason.LENGTH


def test_a_preempted_request_goes_on_where_its_grammar_was() -> None:
    """Two requests that do not fit together both follow their grammars to the end, one of them
    interrupted."""
    room = EngineRoom(num_blocks=10, scheduler_reserve_full_isl=False)
    grammars = {"a": CountingGrammar(15), "b": CountingGrammar(15)}
    for request_id, grammar in grammars.items():
        request = room.add(request_id, [len(request_id)] * 12, max_tokens=30, awaits_grammar=True)
        room.scheduler.grammar_compiled(request, grammar, room.clock.now())
    room.run()
    assert sum(output.num_preemptions for output in room.finished.values()) > 0
    assert [len(room.tokens[i]) - 12 for i in grammars] == [15, 15]
    assert [grammar.num_accepted for grammar in grammars.values()] == [15, 15]


def test_masks_are_made_only_for_requests_that_sample() -> None:
    """Steps that compute part of a prompt, and requests without a grammar, get no masks."""
    room = EngineRoom(max_num_batched_tokens=8)
    grammar = CountingGrammar(2)
    request = room.add("long", [1] * 20, awaits_grammar=True)
    room.scheduler.grammar_compiled(request, grammar, room.clock.now())
    room.add("plain", [2] * 3)
    masked = []
    for _ in range(4):
        plan = room.scheduler.schedule(room.clock.now())
        masked.append(room.scheduler.sampled_grammars(plan))
        ready = [i for i, r in room.scheduler.requests.items() if r.num_computed_tokens == r.num_tokens]
        result = ModelRunnerOutput(ready, [[7] for _ in ready])
        room.scheduler.update_from_output(plan, result, room.clock.now())
    assert masked == [{}, {}, {"long": grammar}, {"long": grammar}]
    assert grammar.complete
