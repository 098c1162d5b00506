"""The command line, and the one place where all parts are joined."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from continuum import interrupts
from continuum.config import ContinuumConfig
from continuum.engine_args import add_serve_arguments, continuum_config, engine_config, server_config
from engine.errors import EngineError
from engine.policy import PolicyFactory, fcfs, priority
from engine.version import package_version

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

AddArguments = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]

interrupts.back_to_usual()

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""
UNREAD = 141
"""Likewise where nobody reads what is printed any more, as in ``| head``."""

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
"""Why a disk takes no more. Whoever writes a file of its own names it; what has no name was being printed."""


class _HelpFormatter(argparse.HelpFormatter):
    """Shows a default where there is one worth showing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.help or ""
        if action.default is None or action.default is False or action.default is argparse.SUPPRESS:
            return told
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"{told} (default: on)"
        return f"{told} (default: %(default)s)"


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """As argparse does, but help that cannot be written is not kept quiet."""
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
        else:
            file.write(message)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; its exit code. Start-up errors are one sentence on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        args = _parsed(arguments)
        _require_output(args)
        code = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except EngineError as error:
        print(f"continuum: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _print_no_more()
        return UNREAD
    except OSError as error:
        if error.filename is not None or error.errno not in NO_ROOM:
            raise
        _print_no_more()
        print(f"continuum: Cannot write the answer: {error.strerror}.", file=sys.stderr)
        return 1


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """SystemExit where nothing is left to do, as behind ``--help``, or the line is wrong."""
    try:
        return _parser(arguments).parse_args(arguments, argparse.Namespace(given=arguments))
    except SystemExit:
        if sys.stdout is not None:
            sys.stdout.flush()
        raise


def _require_output(args: argparse.Namespace) -> None:
    """EngineError where stdout is closed; a server does without."""
    if sys.stdout is None and args.run is not _serve:
        raise EngineError("Cannot write the answer: standard output is closed.")


def _print_no_more() -> None:
    """What is left goes nowhere at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="continuum",
        description="An LLM server for agents: it keeps a job's KV cache across the job's tool calls.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = _add_command(commands, "serve", "serve a model over an OpenAI-compatible HTTP API")
    serve.usage = "continuum serve [MODEL] [--flag VALUE ...]"
    add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, told in (
        ("bench", "replay the jobs of a workload against a running server and report"),
        ("simulate", "play jobs against the real scheduler on simulated hardware, policy by policy"),
        ("reproduce", "rerun the Continuum paper's settings in simulation beside its published multiples"),
        ("profile", "measure what a model's steps cost on this machine, for the simulator"),
        ("workload", "say what is in a workload and what of it is assumed, or convert it"),
        ("estimate", "score the estimator of tool times on a workload, against simpler ways"),
        ("compare", "set results of bench and simulate side by side, with ratios and confidence intervals"),
        ("trace", "ask a scheduler's trace why: its jobs, its pins, and what another policy would have done"),
        ("chat", "talk in the terminal to an agent that calls tools, and see what of each prompt was warm"),
        ("demo", "see what keeping KV across tool calls brings, on this machine, in minutes"),
    ):
        command = _add_command(commands, name, told)
        if name == chosen:  # the others' modules stay unloaded
            add_arguments, run = _sub_command(name)
            add_arguments(command)
            command.set_defaults(run=run)
    return parser


def _add_command(commands: argparse._SubParsersAction[_Parser], name: str, told: str) -> _Parser:
    return commands.add_parser(
        name,
        help=told,
        description=told[0].upper() + told[1:] + ".",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )


def _sub_command(name: str) -> tuple[AddArguments, Run]:
    if name == "bench":
        from eval import bench

        return bench.add_arguments, bench.run
    if name == "simulate":
        from eval.sim import command as simulate

        return simulate.add_arguments, simulate.run
    if name == "reproduce":
        from eval.reproduction import command as reproduction

        return reproduction.add_arguments, reproduction.run
    if name == "profile":
        from eval.sim import profile

        return profile.add_arguments, profile.run
    if name == "workload":
        from eval.workloads import command

        return command.add_arguments, command.run
    if name == "estimate":
        from eval.estimate import command as estimate

        return estimate.add_arguments, estimate.run
    if name == "compare":
        from eval import compare

        return compare.add_arguments, compare.run
    if name == "trace":
        from eval.trace import command as trace

        return trace.add_arguments, trace.run
    if name == "chat":
        from eval.agents import chat

        return chat.add_arguments, chat.run
    from eval import demo

    return demo.add_arguments, demo.run


def _serve(args: argparse.Namespace) -> int:
    if args.model is None:
        _take_model_in_the_box(args)
    config = engine_config(args)
    policy = _policy_factory(args.scheduling_policy, continuum_config(args))
    server = server_config(args)

    from engine.api.processes.server import serve
    from engine.core_start import CoreSpec
    from engine.model_executor import model_executor

    return serve(server, CoreSpec(config, model_executor, policy))


def _take_model_in_the_box(args: argparse.Namespace) -> None:
    from eval.agent_model import NAME, folder

    args.model = str(folder())
    args.served_model_name = args.served_model_name or [NAME]
    name = args.served_model_name[0]
    print(f"No MODEL given: serving the small agent model that comes along, as {name!r}.", flush=True)


def _policy_factory(name: str, config: ContinuumConfig) -> PolicyFactory:
    if name == "continuum":
        from continuum.policy import ContinuumPolicyFactory

        return ContinuumPolicyFactory(config)
    if name in ("fcfs", "priority"):
        return priority if name == "priority" else fcfs

    from eval.baselines.catalog import serving_policy

    return serving_policy(name)


if __name__ == "__main__":
    sys.exit(main())
