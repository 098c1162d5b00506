"""Requests through the synchronous engine over a stand-in model: outputs, stop strings, n answers, aborts."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.frontend.llm_engine import LLMEngine
from engine.frontend.request_output import CompletionOutput, RequestOutput
from engine.records.messages import JobRef, RequestContext
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.testing import FakeExecutorFactory, fake_token
from engine.tokenization.tokenizer import Tokenizer
from tests.frontend.conftest import MakeEngine


def run(engine: LLMEngine) -> list[RequestOutput]:
    """Runs until nothing is left; returns all outputs and asserts that all blocks are free."""
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert_all_free(engine)
    return outputs


def assert_all_free(engine: LLMEngine) -> None:
    engine.check_invariants()
    statistics = engine.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks
    assert statistics.num_running == statistics.num_waiting == 0


def one(engine: LLMEngine, params: SamplingParams) -> list[RequestOutput]:
    engine.add_request("a", "Hello", params)
    return run(engine)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_output_kind_decides_what_an_output_carries(
    make_engine: MakeEngine, kind: RequestOutputKind
) -> None:
    """Cumulative, delta and final-only outputs carry the same answer."""
    outputs = one(make_engine(), SamplingParams(ignore_eos=True, max_tokens=10, output_kind=kind, logprobs=1))
    answers = [output.outputs[0] for output in outputs]
    expected = [fake_token("a", position, 512) for position in range(10)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert answers[-1].finish_reason == "length"
    if kind is RequestOutputKind.DELTA:
        assert [token for answer in answers for token in answer.token_ids] == expected
        assert sum(len(answer.logprobs or ()) for answer in answers) == 10
    else:
        assert answers[-1].token_ids == expected
        assert len(answers[-1].logprobs or ()) == 10
        assert len(answers) == (1 if kind is RequestOutputKind.FINAL_ONLY else 10)


def test_texts_are_the_same_in_all_kinds(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    """Deltas add up to the cumulative text, which is what the tokenizer decodes."""
    engine = make_engine()
    deltas = one(engine, SamplingParams(ignore_eos=True, max_tokens=40, output_kind=RequestOutputKind.DELTA))
    [final] = one(
        engine, SamplingParams(ignore_eos=True, max_tokens=40, output_kind=RequestOutputKind.FINAL_ONLY)
    )
    text = final.outputs[0].text
    assert "".join(output.outputs[0].text for output in deltas) == text
    assert text == tokenizer.decode(final.outputs[0].token_ids, skip_special_tokens=True)


def replay(tokenizer: Tokenizer, text: str, **options: object) -> SamplingParams:
    """Parameters with which the model generates this text."""
    token_ids = tokenizer.encode(text)
    given_options: dict[str, object] = {"max_tokens": len(token_ids), "replay_token_ids": token_ids}
    return SamplingParams(**(given_options | options))  # type: ignore[arg-type]


def test_a_stop_string_ends_a_request_in_the_core_too(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    """The text ends before the stop string, the reason names it, and the core computes no further."""
    params = replay(tokenizer, "one two three four five six", stop=["three"], logprobs=0)
    final = one(make_engine(), params)[-1].outputs[0]
    assert (final.text, final.finish_reason, final.stop_reason) == ("one two ", "stop", "three")
    assert len(final.token_ids) < len(tokenizer.encode("one two three four five six"))
    assert len(final.logprobs or ()) == len(final.token_ids)


def test_a_stop_string_in_the_very_last_token_counts(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    """A stop string counts although the core ended the request for its length in the same step."""
    final = one(make_engine(), replay(tokenizer, "one two", stop=["two"]))[-1].outputs[0]
    assert (final.text, final.finish_reason, final.stop_reason) == ("one ", "stop", "two")


def test_a_stop_token_is_reported_and_eos_is_not(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    """``stop_reason`` names a stop token; for EOS it is None, as in V1."""
    engine = make_engine()
    params = replay(tokenizer, "one two", stop_token_ids=tokenizer.encode("one")[:1])
    final = one(engine, params)[-1].outputs[0]
    assert (final.finish_reason, final.stop_reason) == ("stop", tokenizer.encode("one")[0])
    final = one(engine, replay(tokenizer, "one<|im_end|> two"))[-1].outputs[0]
    assert (final.text, final.finish_reason, final.stop_reason) == ("one", "stop", None)


def test_n_answers_come_back_as_one_output(make_engine: MakeEngine) -> None:
    """FINAL_ONLY gives all n answers at once, in order; the request ends when all have ended."""
    params = SamplingParams(
        ignore_eos=True, n=3, max_tokens=4, seed=1, output_kind=RequestOutputKind.FINAL_ONLY
    )
    [output] = one(make_engine(), params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    assert (output.request_id, output.finished) == ("a", True)


def test_n_answers_stream_side_by_side(make_engine: MakeEngine) -> None:
    """DELTA gives each answer's new tokens under its index; only the very last output is the end."""
    params = SamplingParams(ignore_eos=True, n=2, max_tokens=4, output_kind=RequestOutputKind.DELTA)
    outputs = one(make_engine(), params)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index in range(2):
        answers = [answer for output in outputs for answer in output.outputs if answer.index == index]
        assert sum(len(answer.token_ids) for answer in answers) == 4
        assert answers[-1].finished


def test_an_abort_frees_everything_at_any_moment(make_engine: MakeEngine) -> None:
    """A request that waits, prefills or decodes, with one answer or several, frees all on abort."""
    for num_steps in range(6):
        engine = make_engine(max_num_batched_tokens=16, max_num_seqs=4)
        engine.add_request("a", [1] * 40, SamplingParams(ignore_eos=True, max_tokens=50, n=3))
        engine.add_request("b", [2] * 40, SamplingParams(ignore_eos=True, max_tokens=50))
        for _ in range(num_steps):
            engine.step()
        engine.abort_request("a")
        engine.abort_request("b")
        engine.abort_request("never-existed")
        assert not engine.has_unfinished_requests()
        assert_all_free(engine)


def test_a_wrong_request_costs_the_others_nothing(make_engine: MakeEngine) -> None:
    """A wrong request is refused when added; running ones end as if it had not been."""
    engine = make_engine()
    engine.add_request("a", "Hello", SamplingParams(ignore_eos=True, max_tokens=5))
    engine.step()
    for wrong in (SamplingParams(temperature=-1), SamplingParams(ignore_eos=True, max_tokens=10_000)):
        with pytest.raises(RequestError):
            engine.add_request("b", "Hello", wrong)
    outputs = run(engine)
    assert {output.request_id for output in outputs} == {"a"}
    assert len(outputs[-1].outputs[0].token_ids) == 5


def test_requests_of_one_name_are_kept_apart(make_engine: MakeEngine) -> None:
    """The caller's id may repeat; each request gets its own outputs."""
    engine = make_engine()
    for _ in range(2):
        engine.add_request("same", "Hello", SamplingParams(ignore_eos=True, max_tokens=3))
    finals = [output for output in run(engine) if output.finished]
    assert [len(final.outputs[0].token_ids) for final in finals] == [3, 3]


def test_times_and_cached_tokens_are_reported(make_engine: MakeEngine) -> None:
    """A repeated prompt hits its full blocks; times are in order."""
    engine = make_engine()
    for expected_cached in (0, 32):
        engine.add_request("a", [7] * 40, SamplingParams(ignore_eos=True, max_tokens=3))
        final = run(engine)[-1]
        assert final.num_cached_tokens == expected_cached
        metrics = final.metrics
        assert metrics is not None
        assert metrics.first_token_time is not None
        assert metrics.last_token_time is not None
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time
        assert metrics.num_generation_tokens == 3


def test_iteration_stats_add_up(make_engine: MakeEngine) -> None:
    """Over all steps, each token counts once, and each answer has one first token and one summary."""
    engine = make_engine()
    engine.add_request("a", [1] * 10, SamplingParams(ignore_eos=True, max_tokens=6))
    engine.add_request("b", [2] * 20, SamplingParams(ignore_eos=True, max_tokens=4))
    num_tokens = num_prompt_tokens = 0
    first, later, finished = [], [], []
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.iteration_stats
        assert stats is not None
        num_tokens += stats.num_generation_tokens
        num_prompt_tokens += stats.num_prompt_tokens
        first += stats.time_to_first_tokens_s
        later += stats.inter_token_latencies_s
        finished += stats.finished_requests
    assert (num_tokens, num_prompt_tokens, len(first), len(later)) == (10, 30, 2, 8)
    assert sorted(each.num_generation_tokens for each in finished) == [4, 6]
    assert {each.finish_reason for each in finished} == {"length"}
    for each in finished:
        assert each.e2e_s >= each.inference_s >= each.decode_s >= 0


def test_a_preempted_request_says_the_same(make_engine: MakeEngine) -> None:
    """With too little memory for all at once, every answer is the same as alone."""
    engine = make_engine(FakeExecutorFactory(max_model_len=256), num_gpu_blocks_override=20)
    names = "abcdef"
    for name in names:
        engine.add_request(name, [ord(name)] * 30, SamplingParams(ignore_eos=True, max_tokens=40))
    finals = {output.request_id: output.outputs[0] for output in run(engine) if output.finished}
    for name in names:
        assert finals[name].token_ids == [fake_token(name, position, 512) for position in range(40)]


def test_a_stop_string_keeps_the_count_of_preemptions(make_engine: MakeEngine) -> None:
    """Preemptions of a request are reported however it ends."""

    def finals(stops: dict[str, list[str]]) -> dict[str, RequestOutput]:
        engine = make_engine(FakeExecutorFactory(max_model_len=256), num_gpu_blocks_override=20)
        for name in "abcdef":
            params = SamplingParams(ignore_eos=True, max_tokens=40, stop=stops.get(name, []))
            engine.add_request(name, [ord(name)] * 30, params)
        return {output.request_id: output for output in run(engine) if output.finished}

    def num_preemptions(output: RequestOutput) -> int:
        assert output.metrics is not None
        return output.metrics.num_preemptions

    plain = finals({})
    preempted = next(name for name in plain if num_preemptions(plain[name]))
    text = plain[preempted].outputs[0].text
    end = len(text) - 8  # well before its last token
    stop = next(text[end - n : end] for n in range(1, end) if text.find(text[end - n : end]) == end - n)
    stopped = finals({preempted: [stop]})[preempted]
    assert stopped.outputs[0].stop_reason == stop
    assert len(stopped.outputs[0].token_ids) < 40
    assert num_preemptions(stopped) == num_preemptions(plain[preempted])


def test_a_job_reaches_the_core(make_engine: MakeEngine) -> None:
    """Under a policy without jobs, a turn of a job is a plain request without a receipt."""
    engine = make_engine()
    params, context = SamplingParams(ignore_eos=True, max_tokens=2), RequestContext(job=JobRef("job-1"))
    engine.add_request("a", "Hello", params, context)
    assert run(engine)[-1].receipt is None


deltas = st.lists(
    st.tuples(st.integers(0, 2), st.text("ab", max_size=3), st.lists(st.integers(0, 9), max_size=3)),
    min_size=1,
    max_size=12,
)


@given(deltas)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_merged_deltas_carry_what_the_single_ones_did(parts: list[tuple[int, str, list[int]]]) -> None:
    """A lagging consumer gets the same text and tokens per answer, in fewer outputs."""
    outputs = [
        RequestOutput("a", None, [], [CompletionOutput(index, text, token_ids)])
        for index, text, token_ids in parts
    ]
    merged, *rest = outputs
    for later in rest:
        merged.merge(later, delta=True)
    for index in {part[0] for part in parts}:
        [answer] = [answer for answer in merged.outputs if answer.index == index]
        assert answer.text == "".join(text for i, text, _ in parts if i == index)
        assert answer.token_ids == [token for i, _, ids in parts if i == index for token in ids]
