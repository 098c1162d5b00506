"""``make bench-cores``: measures the engine's loss on shared cores, by how OpenMP's threads wait.

Each cell is a separate process, as OpenMP reads its settings when it is loaded. Starts no server.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
PROMPT_TOKENS = 1000
_BUSY = "while True: pass"
_CELL = (
    "from benchmarks.http.shared_cores import main; "
    "main(['--cell', {folder!r}, '--seconds', '{seconds}', '--requests', '{requests}'])"
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second."""

    prefill: float
    decode: float


def measure(folder: str, seconds: float, num_requests: int) -> Rates:
    """Runs bursts of equal requests for ``seconds``: first of one token, which are prefill, then of many."""
    from engine.frontend.llm import LLM
    from engine.records.sampling_params import SamplingParams

    def burst(number: int, max_tokens: int) -> float:
        prompts = [[3 + (number + i + k) % 400 for k in range(PROMPT_TOKENS)] for i in range(num_requests)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def rate(max_tokens: int, tokens_of_burst: int) -> float:
        began = time.perf_counter()
        spent_s = 0.0
        number = 0
        while time.perf_counter() - began < seconds:
            spent_s += burst(number, max_tokens)
            number += 1
            llm.reset_prefix_cache()
        return number * tokens_of_burst / spent_s

    with LLM(folder, num_gpu_blocks_override=1200) as llm:
        burst(0, 2)
        prefill = rate(1, num_requests * PROMPT_TOKENS)
        num_decoded = 64
        with_decode = rate(1 + num_decoded, 1)
    prefill_s = num_requests * PROMPT_TOKENS / prefill
    return Rates(prefill, num_requests * num_decoded / max(1e-9, 1 / with_decode - prefill_s))


def measure_apart(folder: str, seconds: float, num_requests: int, environment: Mapping[str, str]) -> Rates:
    """Runs ``measure`` in a process with these environment variables."""
    cell = _CELL.format(folder=folder, seconds=seconds, requests=num_requests)
    done = subprocess.run(
        [sys.executable, "-c", cell],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    prefill, decode = done.stdout.split()[-2:]
    return Rates(float(prefill), float(decode))


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            stack.callback(process.kill)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-cores", description=__doc__)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 4], metavar="N", help="other processes")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each measurement (5)")
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="at once (8)")
    parser.add_argument("--cell", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell is not None:
        rates = measure(args.cell, args.seconds, args.requests)
        print(rates.prefill, rates.decode)
        return 0
    print(f"{'tokens per second':<28}" + "".join(f"{name:>26}" for name in SETTINGS))
    with tempfile.TemporaryDirectory() as folder:
        _make_model(folder)
        for count in args.busy:
            with _busy_processes(count):
                cells = [
                    measure_apart(folder, args.seconds, args.requests, each) for each in SETTINGS.values()
                ]
            for kind in ("decode", "prefill"):
                figures = "".join(f"{getattr(cell, kind):>26,.0f}" for cell in cells)
                print(f"{f'beside {count} busy: {kind}':<28}{figures}", flush=True)
    return 0


def _make_model(folder: str) -> None:
    from engine.worker.loading.tiny_models import make_model_folder

    make_model_folder(folder, hidden_size=256, num_layers=6)


if __name__ == "__main__":
    sys.exit(main())
