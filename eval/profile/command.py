"""``continuum profile``: measures step costs of a model on this machine, for the simulator.

Runs the real server under a designed load and reads its scheduler trace; or reads the trace of any run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from eval.arguments import given_flags, positive
from eval.errors import UNREADABLE, CostModelError, EvalError, UsageError
from eval.load.server_process import ServerProcess, unwound_by_sigterm
from eval.profile.profile_load import Exchange, ProfileLoad, ServerLimits
from eval.report.results import require_own_files, require_writable
from eval.say import say
from eval.sim.fitted import CostProfile, FittedCost, fit_steps, write_profile
from eval.sim.step_samples import StepSample, step_samples
from tracing.events import TraceHeader
from tracing.reader import TraceError, read_trace

PASSED_ON = (
    ("block-size", "TOKENS", "KV cache block size in tokens"),
    ("max-num-batched-tokens", "TOKENS", "Token budget of a step"),
    ("max-num-seqs", "REQUESTS", "Maximum number of running requests"),
    ("max-model-len", "TOKENS", "Maximum context length in tokens"),
    ("kv-cache-memory-bytes", "BYTES", "Size of the KV cache in bytes, such as 2G"),
    ("num-gpu-blocks-override", "BLOCKS", "Number of KV cache blocks"),
    ("dtype", "TYPE", "Data type of weights and activations"),
    ("device", "DEVICE", "Device that runs the model"),
)
"""Flags of ``continuum serve`` that affect which steps run and what they cost."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COPY_BYTES = 64 * 2**20
COPIES = 8
CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to measure."""

    model: str
    """A model folder; also a hub's name, if its config can be read locally."""
    seconds: float = 60.0
    seed: int = 0
    date: str | None = None
    serve_flags: tuple[str, ...] = ()
    trace: Path | None = None
    """File in which to keep the scheduler trace."""


class _Config(msgspec.Struct):
    """The fields of a model's config.json that determine the size of its KV."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def kv_values_per_token(self) -> int:
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        return 2 * self.num_hidden_layers * (self.num_key_value_heads or self.num_attention_heads) * head_dim


@dataclass(frozen=True, slots=True)
class Measurement:
    """Data from one loaded server, or from the trace of any run."""

    header: TraceHeader
    samples: list[StepSample]
    arrivals_s: list[float]
    """For requests served alone: the times from sending to their first step."""
    replies_s: list[float]
    """For the same requests: the times from the end of their last step to the end of the answer."""


def measure(options: ProfileOptions) -> Measurement:
    """Serves the model and loads the server. ServerError or CostModelError if that is not possible."""
    read_model_config(options.model)  # before a server starts for nothing
    with tempfile.TemporaryDirectory(prefix="continuum-profile-") as folder:
        trace = options.trace or Path(folder) / "trace.jsonl"
        if trace.exists():
            raise EvalError(f"The trace {trace} is there already and is not replaced: name another.")
        arguments = [
            options.model,
            *("--scheduling-policy", "fcfs"),
            *("--served-model-name", "profiled"),
            *("--host", "127.0.0.1"),
            *("--port", "0"),
            *("--trace", str(trace)),
            *options.serve_flags,
        ]
        say(f"profile: starting the server for {options.model}")
        with ServerProcess(arguments, Path(folder) / "server.log") as server:
            exchanges = asyncio.run(_load(server.base_url, trace, options))
        return _measurement(trace, exchanges)


async def _load(base_url: str, trace: Path, options: ProfileOptions) -> list[Exchange]:
    header = _header(trace)
    async with ProfileLoad(base_url, options.seed) as load:
        limits = ServerLimits(
            max_model_len=await load.max_model_len(),
            pool_tokens=header.num_blocks * header.block_size,
            max_num_seqs=header.max_num_seqs,
        )
        return await load.run(limits, options.seconds)


def from_trace(trace: Path) -> Measurement:
    """Reads the trace of any run; overheads around the engine stay unknown."""
    return _measurement(trace, [])


def _measurement(trace: Path, exchanges: Sequence[Exchange]) -> Measurement:
    """The trace has no end of a last step: it is assumed to last as long as the one before."""
    header, samples = read_samples(trace)
    steps: dict[str, list[StepSample]] = {}
    for sample in samples:
        for request_id in sample.request_ids:
            steps.setdefault(request_id.rpartition("-")[0], []).append(sample)
    measurement = Measurement(header, samples, [], [])
    for exchange in exchanges:
        own = steps.get(exchange.request_id, [])
        if len(own) >= 3 and own[-2].seconds is not None:
            measurement.arrivals_s.append(own[0].begin_s - exchange.sent_s)
            late_s = exchange.done_s - own[-1].begin_s - own[-2].seconds
            measurement.replies_s.append(max(0.0, late_s))
    return measurement


def fit_profile(options: ProfileOptions, measurements: Sequence[Measurement]) -> CostProfile:
    """Fits costs to all measurements together; CostModelError if they are too few."""
    config = read_model_config(options.model)
    dtype = _dtype(options, config)
    fit = fit_steps([sample for one in measurements for sample in one.samples])
    of_steps = fit.profile(
        model=Path(options.model).name,
        dtype=dtype,
        kv_bytes_per_token=config.kv_values_per_token * VALUE_BYTES[dtype],
        step_tokens=measurements[0].header.max_num_batched_tokens,
    )
    return msgspec.structs.replace(
        of_steps,
        date=options.date,
        arrival_s=_median([late_s for one in measurements for late_s in one.arrivals_s]),
        reply_s=_median([late_s for one in measurements for late_s in one.replies_s]),
        copy_bytes_per_s=_copy_bytes_per_s(),
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def read_samples(trace: Path) -> tuple[TraceHeader, list[StepSample]]:
    """Returns header and steps of a trace file; CostModelError names the invalid line."""
    try:
        return _header(trace), list(step_samples(read_trace(trace)))
    except TraceError as error:
        raise CostModelError(f"{error}.") from error


def _header(trace: Path) -> TraceHeader:
    try:
        header = next(read_trace(trace))
    except OSError as error:
        raise CostModelError(f"Cannot read the trace {trace}: {error.strerror or error}.") from error
    except TraceError as error:
        raise CostModelError(f"{error}.") from error
    assert isinstance(header, TraceHeader), "the reader has checked it"
    return header


def read_model_config(model: str) -> _Config:
    """Reads the sizes in a model folder's config.json; CostModelError if they are missing."""
    path = Path(model) / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError as error:
        raise CostModelError(f"Cannot read {path}: {error.strerror or error}.") from error
    except UNREADABLE as error:
        raise CostModelError(f"{path} does not define the size of the model's KV: {error}.") from error


def _dtype(options: ProfileOptions, config: _Config) -> str:
    given = dict(pairwise(options.serve_flags)).get("--dtype", "auto")
    dtype = given if given != "auto" else (config.dtype or config.torch_dtype or "float32")
    if dtype not in VALUE_BYTES:
        raise CostModelError(f"The KV's type must be one of {', '.join(VALUE_BYTES)}, got {dtype!r}.")
    return dtype


def _copy_bytes_per_s() -> float:
    """Measures the rate of a large copy in host memory; the best of a few, as the machine may be busy."""
    source = np.ones(COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    best_s = float("inf")
    for _ in range(COPIES):
        started = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - started)
    return COPY_BYTES / best_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum profile``."""
    default = ProfileOptions(model="")
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="Hugging Face model folder")
    add(
        "--json",
        type=Path,
        required=True,
        metavar="OUT",
        help="Write the profile to this file, for simulate --profile",
    )
    add(
        "--seconds",
        type=positive,
        default=default.seconds,
        metavar="S",
        help="Duration of the load, in seconds",
    )
    add("--seed", type=int, default=default.seed, metavar="K", help="Random seed of the requests")
    add("--date", metavar="TEXT", help="Date to note in the profile (default: none)")
    add(
        "--trace", type=Path, metavar="PATH", help="Keep the scheduler trace in this file (default: not kept)"
    )
    add(
        "--from-trace",
        type=Path,
        metavar="TRACE",
        help="Fit to a trace of continuum serve --trace instead of measuring",
    )
    served = parser.add_argument_group("passed on to continuum serve")
    for name, metavar, told in PASSED_ON:
        served.add_argument(f"--{name}", metavar=metavar, help=told)


def _options(arguments: argparse.Namespace) -> ProfileOptions:
    flags: list[str] = []
    for name, _, _ in PASSED_ON:
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None:
            flags += [f"--{name}", value]
    return ProfileOptions(
        model=arguments.model,
        seconds=arguments.seconds,
        seed=arguments.seed,
        date=arguments.date,
        serve_flags=tuple(flags),
        trace=arguments.trace,
    )


def _refuse_ignored(arguments: argparse.Namespace) -> None:
    """UsageError if a flag would have no effect. --dtype is allowed, as a trace lacks the server's type."""
    of_server = (f"--{name}" for name, _, _ in PASSED_ON if name != "dtype")
    given = given_flags(arguments)
    ignored = next((flag for flag in ("--seconds", "--seed", "--trace", *of_server) if flag in given), None)
    if arguments.from_trace is not None and ignored is not None:
        raise UsageError(f"{ignored} has no effect with --from-trace: nothing is measured.")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum profile``: prints the results; raises errors."""
    _refuse_ignored(arguments)
    options = _options(arguments)
    require_own_files(
        [("--json", arguments.json), ("--trace", arguments.trace)],
        [("--from-trace", arguments.from_trace), ("--model", Path(arguments.model) / CONFIG)],
    )
    require_writable(arguments.json)
    if arguments.from_trace is not None:
        measurement = from_trace(arguments.from_trace)
    else:
        with unwound_by_sigterm():
            measurement = measure(options)
    profile = fit_profile(options, [measurement])
    write_profile(arguments.json, profile)
    print(render(profile))
    return 0


def render(profile: CostProfile) -> str:
    """Formats the coefficients in readable units, and the notes that every report will include."""

    def ms(seconds: float | None) -> str:
        return "not measured" if seconds is None else f"{seconds * 1e3:.2f} ms"

    lines = [
        f"{profile.model} in {profile.dtype}",
        f"  every step              {ms(profile.step_s)}",
        f"  of several tokens       {ms(profile.batch_s)} more",
        f"  1,000 new tokens        {ms(profile.new_token_s * 1e3)}",
        f"  1,000,000 pairs         {ms(profile.pair_s * 1e6)}",
        f"  a decode                {ms(profile.decode_s)}",
        f"  1,000 tokens it reads   {ms(profile.context_token_s * 1e3)}",
        f"  before the first step   {ms(profile.arrival_s)}",
        f"  after the last one      {ms(profile.reply_s)}",
        *FittedCost(profile).notes(),
    ]
    return "\n".join(lines)
