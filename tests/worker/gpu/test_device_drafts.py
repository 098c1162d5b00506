"""Drafts verified on the device: whatever is proposed, the tokens are those of steps without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from engine.core.outputs import TokenMasks
from engine.core.request import Request
from engine.records.sampling_params import SamplingParams
from engine.worker.gpu.graph_sizes import GraphSizes
from engine.worker.gpu.warm_up import run_warm_up
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.gpu.device_engine import GREEDY, DeviceEngine, count_replays
from tests.worker.gpu.test_device_runner import greedy, mixed_prompts, varied

MOST = 4
EAGER = GraphSizes((), verified_len=MOST + 1)
GRAPHS = GraphSizes((1, 2, 4, 7), verified_len=MOST + 1)
WAYS = pytest.mark.parametrize(
    ("steps_in_flight", "graph_sizes"),
    [(1, EAGER), (2, EAGER), (1, GRAPHS), (2, GRAPHS)],
    ids=["plain", "ahead", "graphs", "graphs-ahead"],
)
Drafting = Callable[[Request], list[int]]


def right(outputs: Mapping[str, list[int]]) -> Drafting:
    """The next tokens that are known."""
    return lambda request: outputs[request.request_id][request.num_output_tokens :][:MOST]


def mixed(outputs: Mapping[str, list[int]]) -> Drafting:
    """None to MOST drafts, right up to a place that depends on the request and its length."""

    def draft(request: Request) -> list[int]:
        place = request.num_output_tokens
        random = np.random.default_rng([place, int(request.request_id[1:])])
        drafts = outputs[request.request_id][place:][: random.integers(MOST + 1)]
        first_wrong = random.integers(MOST + 1)
        return [token if i < first_wrong else (token + 1) % 512 for i, token in enumerate(drafts)]

    return draft


def one_by_one(model_folders: ModelFolders) -> DeviceEngine:
    """An engine that has run all requests, without drafts."""
    engine = DeviceEngine(model_folders("qwen3"), steps_in_flight=1)
    for index, (request_id, prompt) in enumerate(mixed_prompts().items()):
        engine.run_all({request_id: prompt}, lambda _, index=index: varied(index))  # type: ignore[misc]
    return engine


@pytest.fixture(scope="module")
def alone(model_folders: ModelFolders) -> DeviceEngine:
    return one_by_one(model_folders)


@WAYS
@pytest.mark.parametrize("drafting", [right, mixed])
def test_sampled_requests_get_the_same_tokens(
    drafting: Callable[[Mapping[str, list[int]]], Drafting],
    steps_in_flight: int,
    graph_sizes: GraphSizes,
    alone: DeviceEngine,
    model_folders: ModelFolders,
) -> None:
    """Seeds, filters, penalties, minimum lengths, replay and log-probabilities, with chunks and preemptions,
    give the same tokens as without drafts, in fewer steps."""
    expected = {name: request.output_token_ids for name, request in alone.requests.items()}
    engines = [
        DeviceEngine(
            model_folders("qwen3"),
            steps_in_flight=steps_in_flight,
            graph_sizes=graph_sizes,
            num_blocks=24,
            max_num_batched_tokens=24,
            draft=draft,
        )
        for draft in (None, drafting(expected))
    ]
    without, drafted = engines
    for engine in engines:
        assert engine.run_all(mixed_prompts(), varied) == expected
        assert len(engine.batch) == 0
    assert drafted.num_steps < without.num_steps
    assert drafted.num_accepted > 20
    assert (drafted.num_accepted < drafted.num_drafts) == (drafting is mixed)
    told, known = drafted.logprobs["r3"], alone.logprobs["r3"]
    assert [(entry.token_ids, entry.rank) for entry in told] == [
        (entry.token_ids, entry.rank) for entry in known
    ]
    for entry, other in zip(told, known, strict=True):
        assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_bad_words_that_drafts_complete(model_folders: ModelFolders) -> None:
    """A word is banned after drafts that begin it, although they are proposed together."""
    folder, prompt = model_folders("qwen3"), random_tokens(20, seed=5)
    plain = DeviceEngine(folder).run_all({"r0": prompt}, lambda _: GREEDY)
    word = plain["r0"][8:11]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, bad_words_token_ids=[word])
    expected = DeviceEngine(folder).run_all({"r0": prompt}, lambda _: params)
    drafted = DeviceEngine(folder, graph_sizes=EAGER, draft=right(plain))
    assert drafted.run_all({"r0": prompt}, lambda _: params) == expected
    assert expected["r0"][10] != word[-1]
    assert 0 < drafted.num_accepted < drafted.num_drafts


@pytest.mark.parametrize("graph_sizes", [EAGER, GRAPHS], ids=["eager", "graphs"])
def test_each_draft_has_a_mask_of_its_own(graph_sizes: GraphSizes, model_folders: ModelFolders) -> None:
    """The masks of a request follow its drafts in order; a forbidden draft ends the row, and
    log-probabilities are for accepted tokens."""
    drafts = {"r0": [77, 78, 79], "r1": [], "r2": [77, 9, 79]}
    engine = DeviceEngine(
        model_folders("qwen3"), graph_sizes=graph_sizes, draft=lambda request: drafts[request.request_id]
    )
    for i in range(3):
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
        engine.add(f"r{i}", random_tokens(9, seed=i), params)
    while any(not request.num_output_tokens for request in engine.requests.values()):
        plan = engine.scheduler.schedule(0.0)
        engine.scheduler.update_from_output(plan, engine.runner.execute_model(plan), 0.0)
    engine.scheduler.update_draft_token_ids(drafts, 0.0)
    plan = engine.scheduler.schedule(0.0)
    assert plan.scheduled_spec_decode_tokens == {"r0": drafts["r0"], "r2": drafts["r2"]}
    plan.masks = Future()
    launched = engine.runner.launch(plan)
    chosen = [("r2", 77), ("r0", 77), ("r0", 78), ("r2", 78), ("r1", 5), ("r0", 79), ("r0", 6), ("r2", 79)]
    forbidden = np.ones((len(chosen), 512), dtype=np.bool_)
    for row, (_, token) in enumerate(chosen):
        forbidden[row, token] = False
    plan.masks.set_result(TokenMasks([req_id for req_id, _ in chosen], forbidden))
    output = launched.result()
    tokens = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    assert tokens == {"r0": [77, 78, 79, 6], "r1": [5], "r2": [77, 78]}
    assert not output.failed
    told = {req_id: [entry.token_ids[0] for entry in lines] for req_id, lines in output.logprobs.items()}
    assert told == tokens
    engine.scheduler.update_from_output(plan, output, 0.0)
    for row, request in enumerate(engine.requests.values()):
        known = request.all_token_ids
        assert engine.batch.token_ids[row, : len(known)].tolist() == known
    assert len(engine.run()["r0"]) == 24


def test_only_tokens_that_are_taken_can_fail(model_folders: ModelFolders) -> None:
    """A grammar may leave no token after a rejected draft; before it, that ends the request."""
    for place, reasons in ((2, set()), (1, {"r0"})):
        engine = DeviceEngine(model_folders("qwen3"), graph_sizes=EAGER)
        engine.add("r0", random_tokens(9, seed=0))
        plan = engine.scheduler.schedule(0.0)
        engine.scheduler.update_from_output(plan, engine.runner.execute_model(plan), 0.0)
        engine.scheduler.update_draft_token_ids({"r0": [77, 9]}, 0.0)
        plan = engine.scheduler.schedule(0.0)
        forbidden = np.ones((3, 512), dtype=np.bool_)
        forbidden[[0, 1, 2], [77, 78, 79]] = False
        forbidden[place] = True
        plan.masks = Future()
        plan.masks.set_result(TokenMasks(["r0"] * 3, forbidden))
        output = engine.runner.execute_model(plan)
        assert set(output.failed) == reasons
        if not reasons:
            assert output.sampled_token_ids == [[77, 78]]


def test_a_row_that_is_given_away_keeps_no_drafts(model_folders: ModelFolders) -> None:
    """A request is aborted while its drafts are under way; the next plan, launched before their result is
    read, gives its row to another."""
    folder, prompts = model_folders("qwen3"), [random_tokens(9, seed=i) for i in range(2)]
    reference = Reference(folder)
    expected = reference.greedy(prompts[0], 24)
    engine = DeviceEngine(folder, graph_sizes=EAGER, max_num_seqs=1)
    engine.add("r0", prompts[0])
    plan = engine.scheduler.schedule(0.0)
    engine.scheduler.update_from_output(plan, engine.runner.execute_model(plan), 0.0)
    engine.scheduler.update_draft_token_ids({"r0": expected[1:4]}, 0.0)
    plan = engine.scheduler.schedule(0.0)
    launched = engine.runner.launch(plan)
    engine.abort("r0")
    engine.add("r1", prompts[1])
    behind = engine.scheduler.schedule(0.0)
    assert behind.num_scheduled_tokens == {"r1": 9}
    launched_behind = engine.runner.launch(behind)
    output = launched.result()
    assert output.sampled_token_ids == [expected[1:5]]
    engine.scheduler.update_from_output(plan, output, 0.0)
    engine.scheduler.update_from_output(behind, launched_behind.result(), 0.0)
    assert engine.run()["r1"] == reference.greedy(prompts[1], 24)


def test_padding_writes_and_counts_nothing(model_folders: ModelFolders) -> None:
    """A graph gives each sequence the most tokens it may have: the pool equals that without graphs, and the
    tokens are transformers'."""
    folder = model_folders("qwen3")
    prompts = {f"r{i}": random_tokens(5 + i, seed=i) for i in range(3)}
    reference = Reference(folder)
    expected = {name: reference.greedy(prompt, 24) for name, prompt in prompts.items()}
    pools = []
    for graph_sizes in (EAGER, GraphSizes((8,), verified_len=MOST + 1)):
        engine = DeviceEngine(
            folder, graph_sizes=graph_sizes, pool_filled_with=0.25, steps_in_flight=1, draft=mixed(expected)
        )
        replayed = count_replays(engine)
        assert engine.run_all(prompts, lambda _: GREEDY) == expected
        pools.append(engine.pool)
        verified = [shape for shape in replayed if shape.uniform_len > 1]
        assert set(verified) == {(8, MOST + 1)} if graph_sizes.sizes else not replayed
    assert torch.equal(pools[0] == 0.25, pools[1] == 0.25)
    torch.testing.assert_close(*pools)


def test_a_sequence_shorter_than_a_verification_runs_as_it_is(model_folders: ModelFolders) -> None:
    """A sequence shorter than a verification has no earlier tokens for padding, and runs unpadded."""
    sizes = GraphSizes((1,), verified_len=MOST + 1)
    reference = Reference(model_folders("qwen3"))
    expected = {"r0": reference.greedy([3], 10)}

    def draft(request: Request) -> list[int]:
        return right(expected)(request)[:1]

    engine = DeviceEngine(model_folders("qwen3"), graph_sizes=sizes, draft=draft, steps_in_flight=1)
    replayed = count_replays(engine)
    assert engine.run_all({"r0": [3]}, lambda _: greedy(10)) == expected
    assert replayed == [(1, 1), *[(1, MOST + 1)] * 3, (1, 1)]
    assert engine.num_steps == 6


def test_warm_up_runs_with_drafts_leave_nothing_behind(model_folders: ModelFolders) -> None:
    """Warm-up includes steps that verify drafts, and leaves the pool unchanged."""
    prompt = random_tokens(50, seed=1)
    expected = {"r0": Reference(model_folders("qwen3")).greedy(prompt, 24)}
    engine = DeviceEngine(
        model_folders("qwen3"),
        graph_sizes=GRAPHS,
        pool_filled_with=0.5,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        draft=mixed(expected),
    )
    limits = engine.scheduler.config
    run_warm_up(
        engine.forward, engine.batch, engine.sampler, limits, max_model_len=128, verified_len=MOST + 1
    )
    assert (engine.pool == 0.5).all()
    assert engine.run_all({"r0": prompt}, lambda _: GREEDY) == expected


@pytest.mark.slow
@pytest.mark.parametrize("graph_sizes", [EAGER, GraphSizes((4,), verified_len=MOST + 1)])
def test_drafts_by_the_kernels_themselves(graph_sizes: GraphSizes, model_folders: ModelFolders) -> None:
    """Triton's kernels, padded or not, choose transformers' tokens."""
    folder = model_folders("qwen3")
    reference = Reference(folder)
    prompts = {f"r{i}": random_tokens(5 + 4 * i, seed=i) for i in range(3)}
    expected = {name: reference.greedy(prompt, 9) for name, prompt in prompts.items()}
    engine = DeviceEngine(
        folder, graph_sizes=graph_sizes, kernels=True, max_model_len=32, draft=mixed(expected)
    )
    assert engine.run_all(prompts, lambda _: greedy(9)) == expected
    assert 0 < engine.num_accepted < engine.num_drafts
