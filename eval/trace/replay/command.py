"""``continuum trace replay``: flags and output."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.arguments import count
from eval.errors import TraceFileError, UsageError
from eval.report.tables import render
from eval.sim.simulate import Hardware
from eval.trace.replay.counterfactual import what_if
from eval.trace.replay.replay import replay

_OF_SIMULATIONS = ("model", "gpu", "tensor_parallel", "profile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum trace replay``."""
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="Trace of continuum serve or simulate")
    add(
        "--policy",
        metavar="P",
        help="Simulate the trace's jobs under this policy and under the recorded one instead; policies are "
        "listed by continuum simulate --help",
    )
    group = parser.add_argument_group("hardware for --policy (default: step times fitted to the trace)")
    add = group.add_argument
    add("--profile", type=Path, metavar="FILE", help="Step times measured by continuum profile")
    add("--model", help="Model preset of continuum simulate; needs --gpu")
    add("--gpu", help="GPU preset of continuum simulate; needs --model")
    add(
        "--tensor-parallel",
        type=count,
        metavar="N",
        help="GPUs per replica (default: the fewest with enough memory)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns exit code 1 if a decision differed from the recorded one, or could not be repeated."""
    said, code = _answer(arguments)
    print(said)
    return code


def _answer(arguments: argparse.Namespace) -> tuple[str, int]:
    try:
        if arguments.policy is not None:
            return render(what_if(arguments.trace, arguments.policy, _hardware(arguments))), 0
        _refuse_ignored(arguments)
        result = replay(arguments.trace)
        return str(result), 0 if result.whole else 1
    except OSError as error:
        raise TraceFileError(f"Cannot read the trace {arguments.trace}: {error.strerror}.") from error


def _refuse_ignored(arguments: argparse.Namespace) -> None:
    given = next((name for name in _OF_SIMULATIONS if getattr(arguments, name) is not None), None)
    if given is not None:
        raise UsageError(f"--{given.replace('_', '-')} has no effect without --policy: nothing is simulated.")


def _hardware(arguments: argparse.Namespace) -> Hardware | None:
    """Returns the hardware to simulate; None: that of the trace itself."""
    model = arguments.model
    gpu = arguments.gpu
    profile = arguments.profile
    tensor_parallel = arguments.tensor_parallel
    if profile is not None:
        if any(preset is not None for preset in (model, gpu, tensor_parallel)):
            raise UsageError("--model, --gpu and --tensor-parallel have no effect with --profile.")
        return Hardware(model="", gpu="", profile=profile, kv_tokens=1)  # the trace says how much KV fits
    if model is None and gpu is None:
        if tensor_parallel is not None:
            raise UsageError("--tensor-parallel has no effect without --model and --gpu.")
        return None
    if model is None or gpu is None:
        raise UsageError(
            "--model and --gpu need each other; without both, the step times are those of the trace."
        )
    return Hardware(model=model, gpu=gpu, tensor_parallel=tensor_parallel, kv_tokens=1)
