"""Section ``idle``: measures how long the device waits for the host between the large model's decode
steps."""

from __future__ import annotations

from benchmarks.gpu import goals
from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.models import engine_options
from benchmarks.gpu.timeline import Span, idle_of
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams


def run(bench: Bench) -> None:
    """Runs the whole engine, including the scheduler, with requests that only decode."""
    sizes = bench.sizes
    shape = bench.sizes.large
    num_prompt_steps = -(-sizes.idle_sequences * sizes.idle_prompt // sizes.step_tokens)
    num_warm_up = num_prompt_steps + sizes.num_warm_up_steps
    max_tokens = num_warm_up + sizes.num_warm_up_steps + 4 * sizes.idle_steps
    options = engine_options(
        bench,
        shape,
        max_model_len=sizes.idle_prompt + max_tokens,
        max_num_seqs=sizes.idle_sequences,
        max_num_batched_tokens=sizes.step_tokens,
    )
    with LLM(**options, multiprocess=False) as llm:
        _begin_requests(bench, llm, max_tokens)
        _run_steps(llm, num_warm_up)
        bench.device.spans(lambda: _run_steps(llm, sizes.num_warm_up_steps))  # the first trace starts slowly
        spans = bench.device.spans(lambda: _run_steps(llm, sizes.idle_steps))
        seconds = bench.repeats(lambda: _run_steps(llm, sizes.idle_steps), num_repeats=1)
        llm.engine.abort_all()
    name = f"{shape.name}, {sizes.idle_sequences} sequences: "
    _report_idle(bench, spans, f"{name}device idle between decode steps")
    context = sizes.idle_prompt + num_warm_up + 2 * sizes.idle_steps
    bench.figure(
        f"{name}decode step of the engine at about {context:,}",
        "ms",
        [1e3 * each / sizes.idle_steps for each in seconds],
        floor=1e3 * bench.floors(shape).decode_s([context] * sizes.idle_sequences),
    )


def _report_idle(bench: Bench, spans: list[Span], name: str) -> None:
    if not spans:
        bench.skip(name, "the profiler saw nothing of the device")
        return
    idle = idle_of(spans)
    bench.figure(
        name,
        "%",
        [100 * idle.waiting],
        goal=goals.IDLE,
        note=f"from a profiler's trace: gaps of more than 10 us; {idle.total:.1%} with those between kernels",
    )


def _begin_requests(bench: Bench, llm: LLM, max_tokens: int) -> None:
    sizes = bench.sizes
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for number in range(sizes.idle_sequences):
        prompt = [(number * 31 + 7 * place) % sizes.large.vocab_size for place in range(sizes.idle_prompt)]
        llm.engine.add_request(f"watched-{number}", prompt, params)


def _run_steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.engine.step()
