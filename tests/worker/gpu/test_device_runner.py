"""Steps on the device: whatever is in flight, captured or padded, the tokens are those of transformers."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
import torch

from engine.core.outputs import TokenMasks
from engine.records.sampling_params import SamplingParams
from engine.worker.gpu.graph_sizes import GraphSizes
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.gpu.device_engine import EAGER, GREEDY, DeviceEngine, count_replays

GRAPHS = GraphSizes((1, 2, 4, 7))
WAYS = pytest.mark.parametrize(
    ("steps_in_flight", "graph_sizes"),
    [(1, EAGER), (2, EAGER), (1, GRAPHS), (2, GRAPHS)],
    ids=["plain", "ahead", "graphs", "graphs-ahead"],
)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def mixed_prompts() -> dict[str, list[int]]:
    shared = random_tokens(27, seed=1)
    return {f"r{i}": shared[: 9 * (i % 4)] + random_tokens(7 + 5 * i, seed=10 + i) for i in range(7)}


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize(
    ("name", "num_blocks", "preempts"),
    [("qwen3", 24, True), ("qwen2-window", 32, True), ("mistral-window", 24, False)],
)
def test_mixed_batch_with_chunks_hits_preemption_and_resumption(
    name: str,
    num_blocks: int,
    preempts: bool,
    steps_in_flight: int,
    graph_sizes: GraphSizes,
    model_folders: ModelFolders,
) -> None:
    """Chunked prompts, shared prefixes and a pool too small for all change no token of any request. If all
    layers have a window, the pool is large enough."""
    folder = model_folders(name)
    engine = DeviceEngine(
        folder,
        steps_in_flight=steps_in_flight,
        graph_sizes=graph_sizes,
        num_blocks=num_blocks,
        max_num_batched_tokens=24,
    )
    prompts = mixed_prompts()
    outputs = engine.run_all(prompts, lambda index: greedy(20 + index))

    assert (engine.num_preemptions > 0) == preempts
    assert engine.num_cached_tokens > 0
    assert engine.num_chunked_steps > 0
    assert len(engine.batch) == 0
    reference = Reference(folder)
    for index, (request_id, prompt) in enumerate(prompts.items()):
        assert outputs[request_id] == reference.greedy(prompt, 20 + index), request_id


@WAYS
def test_an_aborted_request_leaves_the_others_alone(
    steps_in_flight: int, graph_sizes: GraphSizes, model_folders: ModelFolders
) -> None:
    """An abort in the middle of a step changes no other request, and its id can be used again."""
    folder = model_folders("qwen3")
    engine = DeviceEngine(
        folder, steps_in_flight=steps_in_flight, graph_sizes=graph_sizes, num_blocks=20, max_num_seqs=2
    )
    prompts = [random_tokens(20, seed=20 + i) for i in range(3)]
    engine.add("stays", prompts[0])
    engine.add("goes", prompts[1])
    for _ in range(5):
        engine.step()
    engine.abort("goes")
    engine.add("goes", prompts[2])
    outputs = engine.run()
    reference = Reference(folder)
    assert outputs["stays"] == reference.greedy(prompts[0], 24)
    assert outputs["goes"] == reference.greedy(prompts[2], 24)


def varied(index: int) -> SamplingParams:
    """Parameters of every feature that depends on earlier tokens or on draws."""
    return [
        SamplingParams(temperature=0.9, seed=index, max_tokens=18, ignore_eos=True, top_k=40, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True, repetition_penalty=1.5),
        SamplingParams(
            temperature=0.8, seed=3, max_tokens=18, ignore_eos=True, presence_penalty=1, frequency_penalty=1
        ),
        SamplingParams(temperature=0.0, max_tokens=18, logprobs=3, min_tokens=18, stop_token_ids=[7, 8]),
        SamplingParams(temperature=0.7, seed=9, max_tokens=18, ignore_eos=True, min_p=0.1),
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, replay_token_ids=[5, 6, 7, 8]),
        SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True),
    ][index]


def test_sampled_requests_get_the_same_tokens_on_every_way(model_folders: ModelFolders) -> None:
    """Seeds, penalties, minimum lengths, replay and log-probabilities give the same with async steps,
    preemption and graphs as one by one."""
    folder = model_folders("qwen3")
    alone = DeviceEngine(folder, steps_in_flight=1)
    expected: dict[str, list[int]] = {}
    for index, (request_id, prompt) in enumerate(mixed_prompts().items()):
        expected |= alone.run_all({request_id: prompt}, lambda _, index=index: varied(index))  # type: ignore[misc]
    together = DeviceEngine(folder, graph_sizes=GRAPHS, num_blocks=24, max_num_batched_tokens=24)
    assert together.run_all(mixed_prompts(), varied) == expected
    assert together.num_preemptions > 0
    ids = [entry.token_ids for entry in together.logprobs["r3"]]
    assert [line[0] for line in ids] == [line[1] for line in ids] == expected["r3"]
    assert expected["r5"][:4] == [5, 6, 7, 8]


def test_bad_words_see_tokens_that_the_host_does_not_know_yet(model_folders: ModelFolders) -> None:
    """A word is banned although its beginning is still in flight."""
    folder = model_folders("qwen3")
    prompt = random_tokens(20, seed=5)
    plain = DeviceEngine(folder).run_all({"r": prompt}, lambda _: GREEDY)["r"]
    word = plain[8:11]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, bad_words_token_ids=[word])
    ahead = DeviceEngine(folder).run_all({"r": prompt}, lambda _: params)["r"]
    behind = DeviceEngine(folder, steps_in_flight=1).run_all({"r": prompt}, lambda _: params)["r"]
    assert ahead == behind
    assert ahead[:10] == plain[:10]
    assert ahead[10] != plain[10]


def test_masks_may_come_after_the_next_launch_began(model_folders: ModelFolders) -> None:
    """A step is queued without its masks; its token follows them, and the next step reads that token."""
    engine = DeviceEngine(model_folders("qwen3"))
    engine.add("r", random_tokens(9, seed=1))
    first = engine.scheduler.schedule(0.0)
    first.masks = Future()
    launched = engine.runner.launch(first)
    forbidden = np.ones((1, 512), dtype=np.bool_)
    forbidden[0, 77] = False
    first.masks.set_result(TokenMasks(["r"], forbidden))
    second = engine.scheduler.schedule(0.0)
    after = engine.runner.launch(second)
    output = launched.result()
    assert output.sampled_token_ids == [[77]]
    engine.scheduler.update_from_output(first, output, 0.0)
    engine.scheduler.update_from_output(second, after.result(), 0.0)
    tokens = engine.requests["r"].all_token_ids
    assert engine.batch.token_ids[0, : len(tokens)].tolist() == tokens


def test_places_that_nobody_took_touch_nothing(model_folders: ModelFolders) -> None:
    """Padded graphs write only the slots of their own sequences, with the same content as without graphs."""
    prompts = {f"r{i}": random_tokens(5 + i, seed=i) for i in range(3)}
    pools = []
    for graph_sizes in (EAGER, GraphSizes((8,))):
        engine = DeviceEngine(model_folders("qwen3"), graph_sizes=graph_sizes, pool_filled_with=0.25)
        engine.run_all(prompts, lambda _: GREEDY)
        pools.append(engine.pool)
    assert torch.equal(pools[0] == 0.25, pools[1] == 0.25)
    torch.testing.assert_close(*pools)
    assert (pools[1][0] == 0.25).all(), "the null block"


@pytest.mark.slow
def test_padded_graphs_of_the_kernels_themselves(model_folders: ModelFolders) -> None:
    """With the kernels that a graph will hold, padding is skipped and tokens are transformers'."""
    folder = model_folders("qwen3")
    engine = DeviceEngine(
        folder, graph_sizes=GraphSizes((4,)), kernels=True, max_model_len=32, pool_filled_with=0.25
    )
    replayed = count_replays(engine)
    prompts = {f"r{i}": random_tokens(5 + 4 * i, seed=i) for i in range(3)}
    outputs = engine.run_all(prompts, lambda _: greedy(3))
    reference = Reference(folder)
    for request_id, prompt in prompts.items():
        assert outputs[request_id] == reference.greedy(prompt, 3)
    assert set(replayed) == {(4, 1)}
    assert (engine.pool[0] == 0.25).all(), "the null block"


def test_steps_of_a_captured_size_are_not_run_call_by_call(model_folders: ModelFolders) -> None:
    """Decodes replay the smallest graph that holds them; prompts and too large batches run eagerly."""
    engine = DeviceEngine(model_folders("qwen3"), graph_sizes=GraphSizes((1, 3)))
    replayed = count_replays(engine)
    for count in (1, 2, 4):
        replayed.clear()
        for i in range(count):
            engine.add(f"{count}-{i}", random_tokens(6, seed=i), greedy(5))
        engine.run()
        assert replayed == {1: [(1, 1)] * 4, 2: [(3, 1)] * 4, 4: []}[count]
