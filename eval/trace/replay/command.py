"""``continuum trace replay``: its flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.arguments import count
from eval.errors import EvalError, TraceFileError
from eval.report import render
from eval.sim.simulate import Hardware
from eval.trace.replay.counterfactual import what_if
from eval.trace.replay.replay import replay

_OF_SIMULATIONS = ("model", "gpu", "tensor_parallel", "profile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum trace replay``."""
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="a trace of continuum serve or simulate")
    add(
        "--policy",
        metavar="P",
        help="instead: simulate its jobs under this policy, any that continuum simulate --help lists, and "
        "under the recorded one",
    )
    group = parser.add_argument_group(
        "what computes with --policy; by default, as long as the trace's steps took"
    )
    add = group.add_argument
    add("--profile", type=Path, metavar="FILE", help="step times measured by continuum profile")
    add("--model", help="a preset of continuum simulate; with --gpu")
    add("--gpu", help="likewise; with --model")
    add("--tensor-parallel", type=count, metavar="N", help="GPUs together")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if anything was decided otherwise than it had been, or could not be decided again."""
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
        raise EvalError(f"--{given.replace('_', '-')} means nothing without --policy: nothing is simulated.")


def _hardware(arguments: argparse.Namespace) -> Hardware | None:
    """None: what the trace itself tells of it."""
    model, gpu, profile = arguments.model, arguments.gpu, arguments.profile
    tensor_parallel = arguments.tensor_parallel
    if profile is not None:
        if any(preset is not None for preset in (model, gpu, tensor_parallel)):
            raise EvalError(
                "--model, --gpu and --tensor-parallel mean nothing beside --profile: it says what computes."
            )
        return Hardware(model="", gpu="", profile=profile, kv_tokens=1)  # the trace says how much KV fits
    if model is None and gpu is None:
        if tensor_parallel is not None:
            raise EvalError("--tensor-parallel means nothing without --model and --gpu: GPUs of which kind?")
        return None
    if model is None or gpu is None:
        raise EvalError(
            "--model and --gpu go together: give both, or neither for the trace's own step times."
        )
    return Hardware(model=model, gpu=gpu, tensor_parallel=tensor_parallel, kv_tokens=1)
